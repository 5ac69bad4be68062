"""What RFC 9110 and 9112 ask of a request's line and headers, beyond what the parser has checked."""

import re
from collections.abc import Sequence

import httptools

MAX_HEAD_BYTES = 64 * 1024
MAX_TARGET_BYTES = 16 * 1024

_HOST = re.compile(rb"([\w.~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+\])(:[0-9]*)?", re.ASCII)
_METHOD = re.compile(rb"(\A|\n)[\w!#$%&'*+.^`|~-]+( |\Z)", re.ASCII)


class RefusedRequest(Exception):
    """A request that gets no further than its head. Its connection ends with the answer, for nobody knows where the
    next request would begin."""

    def __init__(self, status: int, message: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers


def check_size(num_bytes: int) -> None:
    """Of request line and headers, or of trailers. Raises RefusedRequest."""
    if num_bytes > MAX_HEAD_BYTES:
        raise RefusedRequest(431, f"the headers are too large; they may have {MAX_HEAD_BYTES:,} bytes together")


def check_target(target: bytes) -> None:
    """Raises RefusedRequest."""
    if len(target) > MAX_TARGET_BYTES:
        raise RefusedRequest(414, f"the request target is too long; it may have {MAX_TARGET_BYTES:,} bytes")


def check_head(method: str, version: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Names of headers are in lower case. Raises RefusedRequest."""
    if version not in ("1.1", "1.0"):
        raise RefusedRequest(505, f"this server speaks HTTP/1.1 and HTTP/1.0, not HTTP/{version}")
    if method == "CONNECT":
        raise RefusedRequest(501, "this server is no proxy; it does not know CONNECT")
    num_hosts = 0
    for name, value in headers:
        if name == b"host":
            num_hosts += 1
            if _HOST.fullmatch(value.strip()) is None:
                raise RefusedRequest(400, "the Host header is not the name of a host")
        elif name == b"transfer-encoding":
            if version == "1.0":
                raise RefusedRequest(400, "Transfer-Encoding does not exist in HTTP/1.0; send Content-Length")
            if value.strip().lower() != b"chunked":
                raise RefusedRequest(501, "this server knows no other Transfer-Encoding than chunked")
        elif name == b"expect" and version == "1.1" and value.strip().lower() != b"100-continue":
            raise RefusedRequest(417, "this server knows no other Expect than 100-continue")
    if num_hosts != 1 and (num_hosts or version == "1.1"):
        raise RefusedRequest(400, f"the request has {num_hosts} Host headers; HTTP/1.1 asks for one")


def path_and_query(target: bytes, method: str) -> bytes:
    """What is asked for, also where the target is a whole URL. Raises RefusedRequest."""
    if target.startswith(b"/") or (target == b"*" and method == "OPTIONS"):
        return target
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserError:
        url = None
    if url is None or url.schema is None:
        raise RefusedRequest(400, "the request target must be a path, or a URL")
    query = b"" if url.query is None else b"?" + url.query
    return (url.path or b"/") + query


def refusal_of(error: httptools.HttpParserError, data: bytes) -> RefusedRequest:
    """The answer to what the parser does not take: `data`, in which there is the place."""
    if isinstance(error.__context__, RefusedRequest):  # raised by one of the parser's callbacks
        return error.__context__
    reason = str(error)
    if isinstance(error, httptools.HttpParserCallbackError):
        return RefusedRequest(400, "the request target cannot be read")
    if "nvalid HTTP version" in reason:
        return RefusedRequest(505, "this server speaks HTTP/1.1 and HTTP/1.0")
    if "method" in reason and _METHOD.search(data) is not None:
        return RefusedRequest(501, "this server does not know the request's method")
    return RefusedRequest(400, f"this is not HTTP: {reason}")
