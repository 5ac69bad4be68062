"""HTTP by hand, for clients that no library would let us be."""

import json
import socket
from urllib.parse import urlsplit


def connect(url: str, timeout_s: float = 20.0, receive_buffer: int | None = None) -> socket.socket:
    parts = urlsplit(url)
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(timeout_s)
    client.connect((parts.hostname, parts.port))
    return client


def post_head(path: str, length: int | None, *more: str) -> bytes:
    """The head of a POST of JSON; in chunks if it has no length."""
    body = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    lines = [f"POST {path} HTTP/1.1", "host: test", "content-type: application/json", body, *more]
    return "\r\n".join([*lines, "", ""]).encode()


def post(path: str, body: object, *more: str) -> bytes:
    """A whole POST of JSON."""
    content = json.dumps(body).encode()
    return post_head(path, len(content), *more) + content


def read_all(client: socket.socket) -> bytes:
    """Until the server closes the connection."""
    received = bytearray()
    while data := client.recv(65536):
        received += data
    return bytes(received)


def read_until(client: socket.socket, end: bytes) -> bytes:
    received = bytearray()
    while end not in received:
        data = client.recv(65536)
        assert data, f"the connection was closed after {bytes(received)!r}"
        received += data
    return bytes(received)
