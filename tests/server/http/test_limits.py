"""What a client may cost: bodies, headers, time, and patience with those who do not read."""

import json
import socket
import threading
import time
import tracemalloc
import zlib

import httpx
import pytest
from raw_http import connect, post, post_head, read_all, read_until

from jaxllm.server.api.errors import ApiError
from jaxllm.server.http.content_encoding import decoded

HEADER_S, BODY_S, SEND_S = 0.5, 0.5, 1.0
MAX_BYTES = 1000


@pytest.fixture(scope="module")
def strict(stub_folder):
    from contextlib import ExitStack

    from live_server import start_server

    from jaxllm import EngineConfig

    with ExitStack() as stack:
        yield start_server(
            stack,
            EngineConfig(model=str(stub_folder)),
            "stub_engine:StubEngine",
            served_model_name=["stub"],
            max_body_bytes=MAX_BYTES,
            header_timeout_s=HEADER_S,
            body_timeout_s=BODY_S,
            send_timeout_s=SEND_S,
        )


def status_and_body(answer: bytes) -> tuple[int, dict]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def test_a_body_at_the_limit_is_read_and_one_above_is_told_413(strict):
    with httpx.Client(base_url=strict.url, headers={"content-type": "application/json"}) as client:
        frame = len(json.dumps({"prompt": ""}))
        fits = json.dumps({"prompt": "a" * (MAX_BYTES - frame)})
        assert len(fits) == MAX_BYTES
        assert client.post("/tokenize", content=fits).json()["count"] == MAX_BYTES - frame
        answer = client.post("/tokenize", content=fits + " ")
        assert answer.status_code == 413
        assert answer.json()["error"]["message"] == "the body has 1,001 bytes; max_body_bytes is 1,000"
        assert answer.headers["connection"] == "close"
        assert client.post("/tokenize", content=fits).status_code == 200


def test_a_body_in_chunks_is_counted_as_it_comes(strict):
    with httpx.Client(base_url=strict.url, headers={"content-type": "application/json"}) as client:
        assert client.post("/tokenize", content=iter([b'{"prompt":', b'"abc"}'])).json()["count"] == 3
        answer = client.post("/tokenize", content=iter([b" " * 600] * 2))
        assert answer.status_code == 413
        assert "more than 1,000 bytes" in answer.json()["error"]["message"]


def test_a_client_that_sends_far_too_much_can_read_the_answer(strict):
    with connect(strict.url) as client:
        client.sendall(post_head("/tokenize", 100_000_000))
        for _ in range(20):
            client.sendall(b" " * 65536)
        status, body = status_and_body(read_all(client))
        assert status == 413
        assert "100,000,000 bytes" in body["error"]["message"]


def test_a_body_that_is_announced_as_too_large_is_not_asked_for(strict):
    with connect(strict.url) as client:
        client.sendall(post_head("/tokenize", 100_000_000, "expect: 100-continue"))
        answer = read_until(client, b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_body_that_does_not_come_is_told_408(strict):
    with connect(strict.url) as client:
        client.sendall(post_head("/tokenize", 100) + b'{"prompt":')
        start = time.monotonic()
        status, body = status_and_body(read_all(client))
        assert status == 408
        assert body["error"]["message"] == "the body took longer than 0.5 s to come"
        assert body["error"]["type"] == "timeout_error"
        assert time.monotonic() - start < BODY_S + 4


@pytest.mark.parametrize("is_first", [True, False])
def test_headers_that_do_not_come_are_told_408(strict, is_first):
    with connect(strict.url) as client:
        if not is_first:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: test\r\n\r\n")
            assert b'"ok"' in read_until(client, b"}")
            time.sleep(HEADER_S + 0.2)  # Between requests a connection may be idle.
        stopped = threading.Event()

        def drip() -> None:
            try:
                for byte in b"GET /health HTTP/1.1\r\nx-slow: " + b"a" * 1000:
                    client.send(bytes([byte]))
                    if stopped.wait(0.05):
                        return
            except OSError:
                pass

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            start = time.monotonic()
            answer = read_until(client, b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert time.monotonic() - start < HEADER_S + 2
        finally:
            stopped.set()
            thread.join()


def test_a_connection_on_which_nothing_comes_is_closed(strict):
    with connect(strict.url) as client:
        start = time.monotonic()
        assert read_all(client) == b""
        assert HEADER_S * 0.8 < time.monotonic() - start < HEADER_S + 2


def test_headers_without_end_are_told_431(strict):
    with connect(strict.url) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n")
        try:
            for number in range(40):
                client.sendall(b"x-%d: " % number + b"a" * 10_000 + b"\r\n")
                time.sleep(0.002)
        except OSError:
            pass  # The server does not wait for all of them.
        try:
            answer = client.recv(65536)
        except ConnectionResetError:
            return
        assert answer.startswith(b"HTTP/1.1 431 ")


def test_a_client_that_does_not_read_loses_its_connection_and_its_request(strict):
    with connect(strict.url, receive_buffer=4096) as client:
        # Many choices with log-probabilities, about 14 MB: more than the kernel's buffers take.
        body = {"model": "stub", "prompt": "abc", "n": 16, "max_tokens": 2000, "stream": True, "logprobs": 5}
        client.sendall(post("/v1/completions", body))
        strict.wait_for(lambda: strict.board.total_active == 1)
        strict.wait_for(lambda: strict.board.total_active == 0, timeout_s=60)
        client.settimeout(10)
        try:
            received = read_all(client)
        except ConnectionResetError:
            return
        assert b"[DONE]" not in received


def deep(depth: int) -> bytes:
    return b'{"prompt": "[", "tools": ' + b"[" * depth + b"]" * depth + b"}"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"prompt":\n "a" "b"}', "is not JSON: Expecting ',' delimiter at line 2, column 6"),
        (b'{"prompt": "\xff\xfe"}', "is not UTF-8: the byte 0xff at index 12"),
        (
            b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}",
            "the number at index 24 has 5,000 digits; it may have 4,300",
        ),
        (deep(100_000), "is nested 100,001 levels deep at index 100,024"),
    ],
    ids=["syntax", "UTF-8", "digits", "depth"],
)
def test_what_is_wrong_with_a_body_is_said_and_where(stub_server, body, words):
    for path in ("/v1/completions", "/v1/messages"):
        answer = httpx.post(stub_server.url + path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]


def packed(body: bytes, wbits: int = 16 + zlib.MAX_WBITS) -> bytes:
    stream = zlib.compressobj(wbits=wbits)
    return stream.compress(body) + stream.flush()


def post_packed(server, content: bytes, encoding: str = "gzip") -> httpx.Response:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    return httpx.post(server.url + "/tokenize", content=content, headers=headers)


def test_a_compressed_body_is_unpacked(strict):
    body = b'{"prompt": "abc"}'
    for content, encoding in (
        (packed(body), "gzip"),
        (packed(body[:5]) + packed(body[5:]), "GZIP"),  # in two members
        (packed(body, zlib.MAX_WBITS), "deflate"),
        (body, "identity"),
    ):
        assert post_packed(strict, content, encoding).json()["count"] == 3


def test_a_body_that_becomes_too_large_is_not_unpacked_to_its_end(strict):
    frame = len(b'{"prompt": ""}')
    fits = b'{"prompt": "' + b"a" * (MAX_BYTES - frame) + b'"}'
    assert post_packed(strict, packed(fits)).json()["count"] == MAX_BYTES - frame
    for content in (packed(fits + b" "), packed(fits) + packed(b" "), packed(b"a" * 900_000)):
        answer = post_packed(strict, content)
        assert answer.status_code == 413
        assert "more than 1,000 bytes when it is unpacked" in answer.json()["error"]["message"]


def test_a_bomb_costs_no_more_than_a_body_may():
    bomb = packed(b"a" * 100_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match="more than 10,000 bytes"):
            decoded(bomb, "gzip", max_bytes=10_000)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_an_encoding_that_is_not_known_or_not_true_is_refused(strict):
    body = packed(b'{"prompt": "abc"}')
    for encoding in ("br", "zstd", "gzip, gzip"):
        answer = post_packed(strict, body, encoding)
        assert answer.status_code == 415
        assert answer.headers["accept-encoding"] == "gzip, deflate"
        assert answer.json()["error"]["code"] == "request_body_encoding_unsupported"
    for content in (b'{"prompt": "abc"}', body[:-3], b"\x1f\x8b"):
        answer = post_packed(strict, content)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "request_body_encoding_invalid"


@pytest.mark.parametrize(
    "body", [b"{", b"", b"[", b"nonsense", b'{"prompt": "\xff\xfe"}', b"[" * 900, b'"text"', b"null"]
)
def test_a_body_that_is_not_the_json_we_know_is_told_400(strict, body):
    for path in ("/tokenize", "/v1/completions", "/v1/chat/completions"):
        answer = httpx.post(strict.url + path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, (path, answer.text)
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_garbage_in_place_of_http_is_told_400(strict):
    with connect(strict.url) as client:
        client.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 400 ")


def test_requests_on_one_connection_are_answered_in_order(strict):
    with connect(strict.url) as client:
        client.sendall(b"".join(post("/tokenize", {"prompt": "a" * n}) for n in (1, 2, 3)))
        received = b""
        while received.count(b"max_model_len") < 3:
            received += client.recv(65536)
        counts = [part.split(b",")[0] for part in received.split(b'"count":')[1:]]
        assert counts == [b"1", b"2", b"3"]


def test_half_a_request_and_a_farewell_leave_nothing(strict):
    for data in (b"", b"GET /hea", post_head("/tokenize", 100) + b"{"):
        client = connect(strict.url)
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        assert b"200 OK" not in read_all(client)
        client.close()
    assert httpx.get(strict.url + "/health").status_code == 200
