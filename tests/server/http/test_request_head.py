"""Requests as RFC 9110 and 9112 have them, and all that is none."""

import json
import socket
import time

import pytest
from raw_http import connect, post, post_head, read_all, read_until

CHAT = "/v1/chat/completions"
HELLO = {"model": "stub", "messages": [{"role": "user", "content": "!say:hello"}]}
HOST = b"host: test\r\n"


def exchange(server, request: bytes, *, pieces: int | None = None) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer, as far as the server's end of the connection; the request is sent in
    pieces of so many bytes."""
    with connect(server.url) as client:
        if pieces is None:
            client.sendall(request)
        else:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for start in range(0, len(request), pieces):
                client.sendall(request[start : start + pieces])
                time.sleep(0.001)
        head, _, body = read_all(client).partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        return int(status.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


def get(*lines: str, path: str = "/health", version: str = "1.1") -> bytes:
    return "\r\n".join([f"GET {path} HTTP/{version}", *lines, "", ""]).encode("latin-1")


CLOSE = "connection: close"
GOOD = {
    "a host with a port": get("host: test:8000", CLOSE),
    "an address": get("Host: [::1]:8000", CLOSE),
    "an empty host": get("host:", CLOSE),
    "HTTP/1.0 without a host": get(version="1.0"),
    "a whole URL": get("host: other", CLOSE, path="http://test:80/health?a=1"),
    "empty lines before": b"\r\n\r\n" + get("host: a", CLOSE),
    "headers of 60 kB": get("host: a", CLOSE, *(f"x-{n}: {'a' * 5990}" for n in range(10))),
    "a target of 16 kB": get("host: a", CLOSE, path="/health?" + "a" * 16_000),
    "space around a value": get("host:  a\t", CLOSE),
    "an offer to upgrade": get("host: a", "connection: upgrade, close", "upgrade: websocket"),
}
BAD = {
    "no host": (get(), 400),
    "two hosts": (get("host: a", "host: a"), 400),
    "a host with a path": (get("host: a/b"), 400),
    "a host with a user": (get("host: u@a"), 400),
    "HTTP/1.0 with two hosts": (get("host: a", "host: b", version="1.0"), 400),
    "space before the colon": (get("host: a", "x : b"), 400),
    "a folded line": (get("host: a", "x: b", " c"), 400),
    "a line without a colon": (get("host: a", "abc"), 400),
    "NUL in a value": (get("host: a", "x: a\0b"), 400),
    "a carriage return in a value": (get("host: a", "x: a\rb: c"), 400),
    "line feeds alone": (b"GET /health HTTP/1.1\nhost: a\n\n", 400),
    "a relative target": (get("host: a", path="health"), 400),
    "a star for GET": (get("host: a", path="*"), 400),
    "a target of 100 kB": (get("host: a", path="/" + "a" * 100_000), 414),
    "headers of 70 kB": (get("host: a", *(f"x-{n}: {'a' * 6990}" for n in range(10))), 431),
    "one header of 70 kB": (get("host: a", f"x: {'a' * 70_000}"), 431),
    "many headers": (get("host: a", *(f"x-{n}: a" for n in range(8000))), 431),
    "a version to come": (get("host: a", version="3.0"), 505),
    "HTTP/2 without asking": (get("host: a", version="2.0"), 505),
    "an unknown method": (b"BREW / HTTP/1.1\r\nhost: a\r\n\r\n", 501),
    "a method in small letters": (b"get / HTTP/1.1\r\nhost: a\r\n\r\n", 501),
    "a proxy's method": (b"CONNECT x:80 HTTP/1.1\r\nhost: x:80\r\n\r\n", 501),
    "an unknown expectation": (get("host: a", "expect: tea"), 417),
    "both framings": (post_head("/tokenize", 5, "transfer-encoding: chunked") + b"0\r\n\r\n", 400),
    "two lengths": (post_head("/tokenize", 5, "content-length: 6") + b"hello", 400),
    "a list of lengths": (post_head("/tokenize", 5).replace(b": 5", b": 5, 5") + b"hello", 400),
    "a signed length": (post_head("/tokenize", 5).replace(b": 5", b": +5") + b"hello", 400),
    "an unknown coding": (post_head("/tokenize", None).replace(b"chunked", b"gzip, chunked") + b"0\r\n\r\n", 501),
    "a coding without an end": (post_head("/tokenize", None).replace(b"chunked", b"gzip"), 501),
    "two codings": (post_head("/tokenize", None, "transfer-encoding: chunked") + b"0\r\n\r\n", 400),
    "chunks in HTTP/1.0": (post_head("/tokenize", None).replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n", 400),
    "a chunk of no size": (post_head("/tokenize", None) + b"x\r\n", 400),
    "a chunk that is longer": (post_head("/tokenize", None) + b"3\r\nabcd\r\n0\r\n\r\n", 400),
    "trailers of 70 kB": (post_head("/tokenize", None) + b"2\r\n{}\r\n0\r\nx: %b\r\n\r\n" % (b"a" * 70_000), 431),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_request_is_served_however_it_is_cut(stub_server, name):
    for pieces in (None, 1_000, 7):
        if pieces is None or len(GOOD[name]) < 100 * pieces:
            status, _, body = exchange(stub_server, GOOD[name], pieces=pieces)
            assert (status, body) == (200, b'{"status":"ok"}'), pieces


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_request_is_refused_however_it_is_cut(stub_server, name):
    request, expected = BAD[name]
    for pieces in (None, 1_000, 7):
        if pieces is None or len(request) < 120 * pieces:
            status, headers, body = exchange(stub_server, request, pieces=pieces)
            assert status == expected, (pieces, body)
            assert json.loads(body)["error"]["message"]
            assert headers["connection"] == "close"
            assert "date" in headers


def test_a_bad_request_does_not_spoil_the_answers_before_it(stub_server):
    good = post(CHAT, HELLO | {"stream": True})
    for bad in (b"nonsense\r\n\r\n", get("host: a", "host: b"), post_head("/tokenize", None) + b"x\r\n"):
        with connect(stub_server.url) as client:
            client.sendall(good + good + bad)
            received = read_all(client)
        assert received.count(b"HTTP/1.1 200 OK") == 2
        assert received.count(b"data: [DONE]\n\n\r\n0\r\n\r\n") == 2
        assert b"\r\n0\r\n\r\nHTTP/1.1 " in received[received.rindex(b"[DONE]") :]


def test_trailers_are_no_headers(stub_server, admin_headers):
    """Else they would pass by whoever looks at headers before the body comes."""
    body = b"2\r\n{}\r\n0\r\nauthorization: %b\r\nx-request-id: mine\r\n\r\n" % admin_headers["Authorization"].encode()
    status, headers, _ = exchange(stub_server, post_head("/admin/drain", None, CLOSE) + body)
    assert status == 403
    assert headers["x-request-id"] != "mine"


@pytest.mark.parametrize("cut", [None, 7])
def test_a_client_that_offers_another_protocol_keeps_its_body_however_it_is_cut(stub_server, cut):
    """Also in chunks, and where it is not the first of its packet."""
    offer = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAARAAAAAAAIAAAAA")
    content = json.dumps({"prompt": "abc"}).encode()
    chunked = post_head("/tokenize", None, *offer) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)
    whole = post("/tokenize", {"prompt": "abc"}, *offer)
    status, _, body = exchange(stub_server, whole + chunked + whole + get("host: a", CLOSE), pieces=cut)
    assert status == 200
    assert body.count(b'"count":3') == 3
    assert body.endswith(b'{"status":"ok"}')


def test_an_expectation_of_an_old_client_is_not_answered(stub_server):
    request = post("/tokenize", {"prompt": "abc"}, "expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0")
    assert exchange(stub_server, request)[0] == 200


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_ends_its_side_after_a_request_gets_the_answer(stub_server, version):
    with connect(stub_server.url) as client:
        client.sendall(get("host: a", version=version))
        client.shutdown(socket.SHUT_WR)
        received = read_all(client)
    assert received.startswith(b"HTTP/1.1 200 OK")
    assert received.endswith(b'{"status":"ok"}')


@pytest.mark.parametrize("stream", [True, False])
def test_so_does_one_that_waits_for_the_model(stub_server, stream):
    prompt = "!slow" * 3
    request = post("/v1/completions", {"model": "stub", "prompt": prompt, "max_tokens": 8, "stream": stream})
    with connect(stub_server.url) as client:
        client.sendall(request + request)
        client.shutdown(socket.SHUT_WR)
        received = read_all(client)
    assert received.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").startswith(b"HTTP/1.1 200 OK")
    assert received.count(b"HTTP/1.1 200 OK") == 2
    assert received.count(b'"finish_reason":"length"') == 2


@pytest.mark.parametrize("num_requests", [1, 3])
def test_a_client_that_has_left_is_told_from_one_that_has_ended_its_side(stub_server, num_requests):
    client = connect(stub_server.url)
    client.sendall(post("/v1/completions", {"model": "stub", "prompt": "!slow", "max_tokens": 1000}) * num_requests)
    stub_server.wait_for(lambda: stub_server.board.total_active == 1)
    client.close()
    stub_server.wait_for(lambda: stub_server.board.total_active == 0, timeout_s=3.0)


def test_an_idle_connection_is_not_kept_open_by_empty_lines(start_stub):
    server = start_stub(header_timeout_s=0.3)
    with connect(server.url) as client:
        client.sendall(get("host: a"))
        read_until(client, b'"ok"}')
        client.sendall(b"\r\n")
        assert client.recv(1000) == b""


def test_refusals_are_counted(stub_server):
    def counts() -> dict[str, float]:
        text = exchange(stub_server, get("host: a", CLOSE, path="/metrics"))[2].decode()
        lines = [line for line in text.splitlines() if line.startswith("jaxllm:request_refusals_total")]
        return {line.split('status="')[1][:3]: float(line.split()[-1]) for line in lines}

    before = counts()
    for name in ("no host", "a target of 100 kB", "headers of 70 kB", "an unknown method", "an unknown expectation"):
        exchange(stub_server, BAD[name][0])
    after = counts()
    assert {s: after[s] - before[s] for s in ("400", "414", "431", "501", "417")} == dict.fromkeys(
        ("400", "414", "431", "501", "417"), 1
    )
