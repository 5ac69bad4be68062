"""The official client is the judge: what it sends is understood, and what it gets has the types that it knows."""

import asyncio
import json

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

MESSAGES = [{"role": "user", "content": "!say:Hello, 世界"}]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL_MESSAGES = [
    {"role": "user", "content": '!say:<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'}
]


@pytest.fixture
def client(stub_server):
    with OpenAI(base_url=f"{stub_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat(client):
    completion = client.chat.completions.create(model="stub", messages=MESSAGES, temperature=0, seed=1)
    assert completion.choices[0].message.content == "Hello, 世界"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens
    assert completion.usage.prompt_tokens_details.cached_tokens >= 0


def test_a_streamed_chat(client):
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(model="stub", messages=MESSAGES, stream=True, stream_options=options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello, 世界"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == len("Hello, 世界".encode()) + 1


def test_the_clients_own_stream_helper(client):
    with client.chat.completions.stream(model="stub", messages=CALL_MESSAGES, tools=[TOOL]) as stream:
        events = list(stream)
        completion = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in {event.type for event in events}
    (call,) = completion.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Ulm"})
    assert completion.choices[0].finish_reason == "tool_calls"


def test_a_tool_and_its_result(client):
    first = client.chat.completions.create(model="stub", messages=CALL_MESSAGES, tools=[TOOL])
    message = first.choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "!say:Sunny"}
    messages = [{"role": "user", "content": "go"}, message, result]  # The message as the client's object.
    second = client.chat.completions.create(model="stub", messages=messages, tools=[TOOL])
    assert second.choices[0].message.content == "Sunny"


def test_log_probabilities(client):
    options = {"logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(model="stub", messages=MESSAGES, **options).choices[0].logprobs.content
    assert bytes(byte for token in whole for byte in token.bytes).decode() == "Hello, 世界</s>"
    assert all(len(token.top_logprobs) == 2 for token in whole)
    stream = client.chat.completions.create(model="stub", messages=MESSAGES, stream=True, **options)
    pieces = [chunk.choices[0].logprobs for chunk in stream]
    assert [token for piece in pieces if piece for token in piece.content] == whole


def test_completions(client):
    completion = client.completions.create(
        model="stub", prompt=["ab", "c"], max_tokens=3, n=2, logprobs=1, extra_body={"top_k": 5, "min_tokens": 1}
    )
    assert [choice.text for choice in completion.choices] == ["aba", "aba", "ccc", "ccc"]
    assert completion.choices[0].logprobs.tokens == ["a", "b", "a"]
    stream = client.completions.create(model="stub", prompt="ab", max_tokens=3, stream=True, stop="x")
    assert "".join(chunk.choices[0].text for chunk in stream) == "aba"


def test_errors_are_of_the_clients_classes(client):
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'") as not_found:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="penalties are not supported yet") as bad:
        client.chat.completions.create(model="stub", messages=MESSAGES, frequency_penalty=1)
    assert (bad.value.param, bad.value.type) == ("frequency_penalty", "invalid_request_error")
    with pytest.raises(openai.InternalServerError, match="a defect in step"):
        client.completions.create(model="stub", prompt="!raise")
    with pytest.raises(openai.InternalServerError, match="the server failed to handle the request"):
        client.completions.create(model="stub", prompt="!refuse")


def test_an_error_in_a_stream_is_raised(client, stub_server):
    stream = client.completions.create(model="stub", prompt="!slow", max_tokens=900, stream=True)
    stub_server.run(stub_server.llm.abort(next(stream).id))
    with pytest.raises(openai.APIError, match="operator") as caught:
        list(stream)
    assert caught.value.code == "request_aborted"


def test_many_at_once(stub_server):
    async def run() -> list[str]:
        async with AsyncOpenAI(base_url=f"{stub_server.url}/v1", api_key="none", max_retries=0) as client:

            async def ask(number: int) -> str:
                messages = [{"role": "user", "content": f"!say:number {number}"}]
                if number % 2:
                    completion = await client.chat.completions.create(model="stub", messages=messages)
                    return completion.choices[0].message.content
                stream = await client.chat.completions.create(model="stub", messages=messages, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*map(ask, range(100)))

    assert asyncio.run(run()) == [f"number {number}" for number in range(100)]


def test_closing_a_stream_ends_the_request(client, stub_server):
    stream = client.completions.create(model="stub", prompt="!slow", max_tokens=900, stream=True)
    next(iter(stream))
    stream.close()
    stub_server.wait_until_idle(timeout_s=1.0)
