"""What old, odd and hostile clients of HTTP get."""

import json

import httpx
import pytest
from raw_http import connect, post, read_all, read_until

CHAT = "/v1/chat/completions"
HELLO = {"model": "stub", "messages": [{"role": "user", "content": "!say:hello"}]}


def answer_to(server, request: bytes) -> tuple[bytes, bytes]:
    """Head and body, as far as the server's end of the connection."""
    with connect(server.url) as client:
        client.sendall(request)
        head, _, body = read_all(client).partition(b"\r\n\r\n")
        return head.lower(), body


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_of_http_1_0_gets_no_chunks(stub_server, stream):
    request = post(CHAT, HELLO | {"stream": stream}).replace(b"HTTP/1.1", b"HTTP/1.0")
    head, body = answer_to(stub_server, request)
    assert b" 200 " in head
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    if stream:
        events = body.split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""]
        chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "hello"
    else:
        assert json.loads(body)["choices"][0]["message"]["content"] == "hello"


@pytest.mark.parametrize("path", ["/health", "/", "/v1/models", "/metrics", "/nowhere"])
def test_head_is_get_without_the_body(stub_server, path):
    got, asked = httpx.get(stub_server.url + path), httpx.head(stub_server.url + path)
    assert asked.content == b""
    assert asked.status_code == got.status_code
    assert asked.headers["content-type"] == got.headers["content-type"]


def test_head_where_there_is_no_get_is_refused(stub_server):
    assert httpx.head(stub_server.url + CHAT).status_code == 405


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (CHAT, "POST"),
        ("/health", "GET, HEAD"),
        ("/v1/models/stub", "GET, HEAD"),
        ("/v1/responses/resp_a", "DELETE, GET, HEAD"),
        ("/", "GET, HEAD"),
    ],
)
@pytest.mark.parametrize("method", ["PUT", "TRACE", "OPTIONS", "PROPFIND"])
def test_a_method_that_a_path_does_not_take_is_told_those_that_it_takes(stub_server, path, allowed, method):
    answer = httpx.request(method, stub_server.url + path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert answer.json()["error"]["message"] == f"there is no {method} {path} here; it takes {allowed}"


def test_options_of_the_whole_server_is_a_ping(stub_server):
    head, body = answer_to(stub_server, b"OPTIONS * HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n")
    assert head.startswith(b"http/1.1 204 ")
    assert body == b""


def test_a_slash_at_the_end_needs_no_redirect(stub_server):
    """Which would have to know under what address the client, or its proxy, knows this server."""
    assert httpx.get(stub_server.url + "/v1/models/").json()["data"][0]["id"] == "stub"
    assert httpx.get(stub_server.url + "/health//").status_code == 200
    assert httpx.post(stub_server.url + CHAT + "/", json=HELLO).status_code == 200
    assert httpx.get(stub_server.url + "/nowhere/").status_code == 404


@pytest.mark.parametrize(
    "request_",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
)
def test_what_is_not_http_is_told_so_in_the_shape_of_an_error(stub_server, request_):
    head, body = answer_to(stub_server, request_)
    assert head.startswith(b"http/1.1 400 ")
    assert json.loads(body)["error"]["message"].startswith("this is not HTTP: ")


def test_requests_that_come_at_once_are_answered_one_after_the_other(stub_server):
    texts = ["one", "two", "three"]
    requests = [post(CHAT, {**HELLO, "messages": [{"role": "user", "content": f"!say:{text}"}]}) for text in texts]
    requests.append(post(CHAT, {**HELLO, "stream": True}))
    requests.append(b"GET /health HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n")
    with connect(stub_server.url) as client:
        client.sendall(b"".join(requests))
        received = read_all(client)
    assert received.count(b"HTTP/1.1 200 OK") == 5
    places = [received.index(mark) for mark in (b'"one"', b'"two"', b'"three"', b"[DONE]", b'"ok"')]
    assert places == sorted(places)


def test_a_client_that_offers_http_2_keeps_its_body(stub_server):
    """As Java's does, whatever it asks for."""
    upgrade = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAARAAAAAAAIAAAAA")
    with connect(stub_server.url) as client:
        for _ in range(2):
            client.sendall(post(CHAT, HELLO, *upgrade))
            assert read_until(client, b'"usage"').startswith(b"HTTP/1.1 200 OK")


def test_what_a_client_sends_is_repeated_in_short(stub_server):
    for response in (
        httpx.get(stub_server.url + "/" + "a" * 10_000),
        httpx.get(stub_server.url + "/v1/responses/" + "a" * 10_000),
        httpx.post(stub_server.url + CHAT, json=HELLO | {"model": "a" * 10_000}),
    ):
        assert response.status_code == 404
        assert len(response.content) < 500


@pytest.mark.parametrize("number", ["1_0", "١", "0x10", ""])
def test_numbers_in_headers_are_plain(stub_server, number):
    headers = {"x-priority": number.encode()}
    assert httpx.post(stub_server.url + CHAT, json=HELLO, headers=headers).status_code == 400
