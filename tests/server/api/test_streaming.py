"""Server-sent events, byte by byte."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import anthropic
import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

CHAT = "/v1/chat/completions"


def events_of(server, path: str, **body) -> list[str]:
    """The payloads of a stream, whose form is checked."""
    with httpx.stream("POST", server.url + path, json={"stream": True, "model": "stub"} | body) as response:
        raw = response.read()
        assert response.status_code == 200, raw
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache, no-transform"
        assert "content-length" not in response.headers
    events = raw.split(b"\n\n")
    assert events.pop() == b""
    assert all(event.startswith(b"data: ") and b"\n" not in event and b"\r" not in event for event in events)
    payloads = [event.removeprefix(b"data: ").decode() for event in events]
    assert payloads.pop() == "[DONE]"
    return payloads


def chat_chunks(server, text: str, **body) -> list[ChatCompletionChunk]:
    messages = [{"role": "user", "content": f"!say:{text}"}]
    payloads = events_of(server, CHAT, messages=messages, **body)
    chunks = [ChatCompletionChunk.model_validate_json(payload) for payload in payloads]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    return chunks


def test_a_chat_stream_has_the_role_then_the_text_then_the_finish_reason(stub_server):
    first, *middle, last = chat_chunks(stub_server, "Hello")
    assert first.choices[0].delta.model_dump(exclude_unset=True) == {"role": "assistant", "content": ""}
    assert "".join(chunk.choices[0].delta.content for chunk in middle) == "Hello"
    assert all(chunk.choices[0].finish_reason is None for chunk in (first, *middle))
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].delta.model_dump(exclude_unset=True) == {}
    assert all(chunk.usage is None for chunk in (first, *middle, last))


def test_usage_comes_in_a_last_chunk_without_choices(stub_server):
    *others, last = chat_chunks(stub_server, "Hi", stream_options={"include_usage": True})
    assert last.choices == []
    assert (last.usage.completion_tokens, last.usage.total_tokens) == (3, last.usage.prompt_tokens + 3)
    assert all('"usage":null' not in chunk.model_dump_json() or chunk.usage is None for chunk in others)
    assert all(chunk.choices for chunk in others)


def test_a_character_is_never_split(stub_server):
    """Each byte is a token: an emoji takes four, or more with its joiners."""
    text = "é😀👩‍👩‍👧€"
    for payload in events_of(stub_server, CHAT, messages=[{"role": "user", "content": f"!say:{text}"}]):
        assert "�" not in payload
    shown = [chunk.choices[0].delta.content or "" for chunk in chat_chunks(stub_server, text)]
    assert "".join(shown) == text


@pytest.mark.parametrize("text", ['"quotes"\\ and\nlines\r\n\t', "data: [DONE]\n\n", "\u2028\u2029\u0085", "\x1b\x7f"])
def test_text_that_looks_like_the_form_stays_text(stub_server, text):
    chunks = chat_chunks(stub_server, text)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_each_choice_has_its_own_role_and_end(stub_server):
    chunks = chat_chunks(stub_server, "abc", n=3)
    for index in range(3):
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert choices[0].delta.role == "assistant"
        assert all(choice.delta.role is None for choice in choices[1:])
        assert "".join(choice.delta.content or "" for choice in choices) == "abc"
        assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


def test_a_completions_stream(stub_server):
    payloads = events_of(stub_server, "/v1/completions", prompt="abc", max_tokens=7, echo=True)
    chunks = [Completion.construct(**json.loads(payload)) for payload in payloads]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abcabcabca"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.id.startswith("cmpl-") and chunk.object == "text_completion" for chunk in chunks)


def test_several_prompts_and_choices_are_told_apart(stub_server):
    payloads = events_of(
        stub_server, "/v1/completions", prompt=["ab", "xyz"], n=2, max_tokens=4, stream_options={"include_usage": True}
    )
    *chunks, last = [Completion.construct(**json.loads(payload)) for payload in payloads]
    texts = ["", "", "", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["abab", "abab", "xyzx", "xyzx"]
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 16)


def test_an_error_before_the_first_chunk_has_its_status(stub_server):
    body = {"model": "stub", "stream": True, "prompt": "!raise"}
    response = httpx.post(stub_server.url + "/v1/completions", json=body)
    assert response.status_code == 500
    assert "a defect in step" in response.json()["error"]["message"]


def test_an_error_inside_a_stream_is_its_last_chunk(start_stub):
    server = start_stub(request_timeout_s=0.5)
    body = {"model": "stub", "stream": True, "messages": [{"role": "user", "content": "!slow"}], "max_tokens": 1000}
    response = httpx.post(server.url + CHAT, json=body)
    assert response.status_code == 200
    *chunks, error, done, end = response.text.split("\n\n")
    assert len(chunks) > 3
    assert (done, end) == ("data: [DONE]", "")
    error = json.loads(error.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "timeout")
    assert "was not complete after 0.5 s" in error["message"]
    server.wait_until_idle()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_a_client_that_leaves_frees_its_pages_at_once(stub_server, path, stream):
    prompt = {"prompt": "!slow"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "!slow"}]}
    content = json.dumps({"model": "stub", "stream": stream, "max_tokens": 1500, "n": 3} | prompt).encode()
    address = httpx.URL(stub_server.url)
    with socket.create_connection((address.host, address.port)) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        stub_server.wait_for(lambda: stub_server.llm.stats.scheduler.num_running == 3)
        if stream:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK")
    stub_server.wait_until_idle(timeout_s=1.0)
    assert stub_server.app.state.server.drain.num_active == 0


def test_a_client_that_stops_reading_gets_the_rest_in_fewer_chunks(stub_server):
    """What it has not read grows neither here nor in the engine, and the answer is complete."""
    body = {"model": "stub", "stream": True, "prompt": "ab", "max_tokens": 2000}
    with httpx.stream("POST", stub_server.url + "/v1/completions", json=body) as response:
        stub_server.wait_for(lambda: stub_server.llm.stats.scheduler.num_running == 0)
        stub_server.wait_for(lambda: stub_server.llm.stats.scheduler.num_waiting == 0)
        events = response.read().decode().split("\n\n")
    texts = [json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]]
    assert "".join(texts) == "ab" * 1000


def test_clients_do_not_notice_what_keeps_a_stream_alive(start_stub):
    """The one row is taken for 1.5 s. Meanwhile comments are all there is to say."""
    server = start_stub({"max_num_seqs": 1}, stream_keep_alive_s=0.1)
    body = {"model": "stub", "messages": [{"role": "user", "content": "!say:hi"}], "stream": True, "max_tokens": 9}
    slow = {"model": "stub", "prompt": "!slow", "max_tokens": 30}
    with ThreadPoolExecutor(4) as pool:
        busy = pool.submit(httpx.post, server.url + "/v1/completions", json=slow, timeout=30)
        server.wait_for(lambda: server.llm.stats.scheduler.num_running == 1)
        raw = pool.submit(httpx.post, server.url + CHAT, json=body, timeout=30)
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="-")
        chunks = pool.submit(lambda: list(client.chat.completions.create(**body)))
        other = anthropic.Anthropic(base_url=server.url, api_key="-")
        events = pool.submit(lambda: list(other.messages.create(**body)))
        assert raw.result().text.startswith(": keep-alive\n\n: keep-alive\n\n")
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks.result()) == "hi"
        assert [event.type for event in events.result()][-1] == "message_stop"
        assert busy.result().status_code == 200
