"""/v1/responses, judged by the official client. The stub engine repeats its prompt, or says what it is told to."""

import asyncio
import dataclasses
import json
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseStreamEvent

from jaxllm import AsyncLLM, EngineConfig
from jaxllm.server.http.app import create_app

if TYPE_CHECKING:
    from live_server import LiveServer

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(stub_folder: Path) -> "Iterator[LiveServer]":
    from live_server import start_server

    with ExitStack() as stack:
        engine_config = EngineConfig(model=str(stub_folder))
        options: dict[str, Any] = {"served_model_name": ["stub"], "reasoning_parser": "think"}
        yield start_server(stack, engine_config, "stub_engine:StubEngine", **options)


@pytest.fixture
def client(server: "LiveServer") -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client
    server.wait_until_idle()


def say(text: str) -> str:
    return f"!say:{text}"


def events_of(client: openai.OpenAI, **body: Any) -> list[ResponseStreamEvent]:
    with client.responses.create(model="stub", stream=True, **body) as stream:
        return list(stream)


def without_ids(response: Any) -> dict[str, Any]:
    """What is the same when the same is asked again."""
    body = response.to_dict()
    for item in body["output"]:
        for name in ("id", "call_id", "parsed_arguments"):  # The client adds what it parsed.
            item.pop(name, None)
        for part in item.get("content", ()):
            part.pop("parsed", None)
    for name in ("id", "created_at", "completed_at"):
        body.pop(name)
    body["usage"]["input_tokens_details"] = None  # It depends on what was asked before.
    return body


def test_an_answer_has_text_usage_and_what_was_asked(client):
    response = client.responses.create(
        model="stub",
        input=say("Hello é🌧 there."),
        instructions="Be brief.",
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=100,
        metadata={"a": "b"},
    )
    assert response.output_text == "Hello é🌧 there."
    assert response.status == "completed"
    assert response.error is None
    assert response.incomplete_details is None
    assert (response.model, response.instructions, response.metadata) == ("stub", "Be brief.", {"a": "b"})
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 0.9, 100)
    assert response.id.startswith("resp_")
    assert abs(response.created_at - time.time()) < 60
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    prompt = "[system]Be brief.[user]" + say("Hello é🌧 there.") + "[assistant]"
    assert response.usage.input_tokens == len(prompt.encode())
    assert response.usage.output_tokens == len("Hello é🌧 there.".encode()) + 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.output_tokens_details.reasoning_tokens == 0


def test_the_tokens_of_an_input_are_counted_before_it_is_sent(client):
    items: list[Any] = [
        {"role": "user", "content": "a"},
        {"role": "developer", "content": [{"type": "input_text", "text": "b"}]},
    ]
    for more in (
        {"input": "x"},
        {"input": items, "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True},
        {"input": items, "tools": TOOLS, "tool_choice": "none", "instructions": "Be brief.", "truncation": "disabled"},
        {"input": "x", "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
    ):
        count = client.responses.input_tokens.count(model="stub", **more)
        response = client.responses.create(model="stub", max_output_tokens=1, **more)
        assert (count.object, count.input_tokens) == ("response.input_tokens", response.usage.input_tokens)
        body: Any = {"previous_response_id": response.id, "input": "more"}
        then = client.responses.create(model="stub", max_output_tokens=1, **body)
        assert client.responses.input_tokens.count(**body).input_tokens == then.usage.input_tokens
    for bad in ({}, {"input": "x", "conversation": "conv_1"}, {"input": "x", "frobnicate": 1}):
        with pytest.raises(openai.BadRequestError):
            client.responses.input_tokens.count(extra_body=bad)
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        client.responses.input_tokens.count(model="gpt", input="x")


def test_input_may_be_items(client):
    response = client.responses.create(
        model="stub",
        input=[
            {"role": "developer", "content": "D"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "c", "annotations": []}],
            },
            {"role": "user", "content": "d"},
        ],
        max_output_tokens=len("[system]D[user]a\nb[assistant]c[user]d[assistant]"),
    )
    assert response.output_text == "[system]D[user]a\nb[assistant]c[user]d[assistant]"


def test_an_answer_cut_off_is_incomplete(client):
    response = client.responses.create(model="stub", input="Hello", max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == "[us"
    assert response.output[0].status == "incomplete"
    assert response.usage.output_tokens == 3


def test_a_stream_tells_of_everything_in_order(client):
    events = events_of(client, input=say("Hello."))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = [kind for kind in kinds if kind == "response.output_text.delta"]
    assert len(deltas) >= 2, "the text comes in pieces"
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[0].response.status == events[1].response.status == "in_progress"
    assert events[0].response.output == []
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello."
    assert events[-4].text == events[-3].part.text == events[-2].item.content[0].text == "Hello."
    assert events[-1].response.output == [events[-2].item]
    assert len({event.item_id for event in events[3:-2]}) == 1
    assert events[-1].response.usage.output_tokens == len("Hello.") + 1


@pytest.mark.parametrize(
    "text",
    ["Hello é🌧.", "", f"<think>\nHm.\n</think>\n\nI look.\n\n{CALL}\n{CALL}", "<think>\nHm. <tool", f"{CALL} or not?"],
)
def test_a_stream_and_a_whole_answer_are_the_same(client, text):
    body = {"input": say(text), "tools": TOOLS}
    whole = client.responses.create(model="stub", **body)
    with client.responses.stream(model="stub", **body) as stream:
        list(stream)
        streamed = stream.get_final_response()
    assert without_ids(streamed) == without_ids(whole)
    assert without_ids(events_of(client, **body)[-1].response) == without_ids(whole)


def test_reasoning_and_calls_are_items_of_their_own(client):
    response = client.responses.create(
        model="stub", input=say(f"<think>\nHm. Well.\n</think>\n\nI look.\n\n{CALL}\n{CALL}"), tools=TOOLS
    )
    reasoning, message, *calls = response.output
    assert reasoning.type == "reasoning"
    assert [part.text for part in reasoning.content] == ["Hm. Well."]
    assert response.usage.output_tokens_details.reasoning_tokens == len("Hm. Well.")
    assert message.content[0].text == response.output_text == "I look."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"city": "Bern"})] * 2
    assert len({call.call_id for call in calls}) == len({item.id for item in response.output[2:]}) == 2
    assert {item.status for item in response.output} == {"completed"}


def test_the_events_of_reasoning_and_calls(client):
    events = events_of(client, input=say(f"<think>Hm.</think>{CALL}"), tools=TOOLS)
    kinds = list(dict.fromkeys(event.type for event in events[2:]))
    assert kinds == [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
    ]
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 3, "the arguments come in pieces"
    assert "".join(pieces) == '{"city": "Bern"}'
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.output_index for event in added] == [0, 1]
    assert added[1].item.name == "weather"
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert (done.item_id, done.output_index, done.arguments) == (added[1].item.id, 1, '{"city": "Bern"}')


def test_without_parallel_calls_the_answer_ends_with_the_first(client, server):
    body = {"input": say(f"{CALL}{CALL * 20}"), "tools": TOOLS, "parallel_tool_calls": False}
    for response in (client.responses.create(model="stub", **body), events_of(client, **body)[-1].response):
        assert [item.type for item in response.output] == ["function_call"]
        assert response.status == "completed"
        assert response.usage.output_tokens < len(CALL) * 3, "the engine does not go on"


def test_tool_choice_none_leaves_calls_in_the_text(client):
    response = client.responses.create(model="stub", input=say(CALL), tools=TOOLS, tool_choice="none")
    assert response.output_text == CALL
    assert response.usage.input_tokens == len("[user]" + say(CALL) + "[assistant]"), "the model knows of no tools"


def test_results_of_calls_go_back_to_the_model(client):
    first = client.responses.create(model="stub", input=say(CALL), tools=TOOLS)
    (call,) = first.output
    history = [
        {"role": "user", "content": "weather?"},
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    shown = (
        '[user]weather?[assistant]<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>[tool]rain'
    )
    response = client.responses.create(model="stub", input=history, max_output_tokens=len(shown))
    assert response.output_text == shown


def test_a_conversation_goes_on_from_a_stored_response(client):
    first = client.responses.create(model="stub", input="one", instructions="I", max_output_tokens=4)
    assert first.store
    assert client.responses.retrieve(first.id) == first
    shown = "[user]one[assistant][sys[user]two[assistant]"
    second = client.responses.create(
        model="stub", input="two", previous_response_id=first.id, max_output_tokens=len(shown)
    )
    assert second.output_text == shown, "instructions are not carried over"
    assert second.previous_response_id == first.id
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=first.id):
        client.responses.retrieve(first.id)
    shown += shown + "[user]three"
    third = client.responses.create(
        model="stub", input="three", previous_response_id=second.id, max_output_tokens=len(shown)
    )
    assert third.output_text == shown, "it needs no earlier response but the last"


def test_calls_go_on_from_a_stored_response(client):
    first = client.responses.create(model="stub", input=say(f"<think>Hm.</think>{CALL}"), tools=TOOLS)
    output = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "rain"}
    second = client.responses.create(model="stub", input=[output], previous_response_id=first.id)
    assert second.status == "completed"
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]: there is no call 'call_x'"):
        client.responses.create(model="stub", input=[output | {"call_id": "call_x"}], previous_response_id=first.id)


def test_a_stream_is_stored_too_and_store_false_is_not(client):
    response = events_of(client, input=say("Hi"))[-1].response
    assert client.responses.retrieve(response.id).output_text == "Hi"
    for body in ({"stream": True}, {}):
        raw = client.responses.with_raw_response.create(model="stub", input=say("Hi"), store=False, **body)
        response_id = raw.http_response.read().decode().partition('"id":"')[2].partition('"')[0]
        assert response_id.startswith("resp_")
        with pytest.raises(openai.NotFoundError, match=r"unless they had store: false"):
            client.responses.retrieve(response_id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="stub", input="x", previous_response_id="resp_none")
    assert caught.value.param == "previous_response_id"


def test_a_response_in_the_background_can_be_asked_for(client):
    response = client.responses.create(model="stub", input=say("!slow Done."), background=True)
    assert (response.status, response.output, response.background) == ("in_progress", [], True)
    assert client.responses.retrieve(response.id).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="is in_progress"):
        client.responses.create(model="stub", input="x", previous_response_id=response.id)
    with pytest.raises(openai.BadRequestError, match="cancel it first"):
        client.responses.delete(response.id)
    deadline = time.monotonic() + 20
    while response.status == "in_progress" and time.monotonic() < deadline:
        time.sleep(0.05)
        response = client.responses.retrieve(response.id)
    assert (response.status, response.output_text) == ("completed", "!slow Done.")


def test_a_response_in_the_background_can_be_cancelled(client, server):
    response = client.responses.create(model="stub", input="!slow", background=True)
    start = time.monotonic()
    cancelled = client.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    assert time.monotonic() - start < 2
    assert client.responses.retrieve(response.id).status == "cancelled"
    assert client.responses.cancel(response.id).status == "cancelled"
    server.wait_until_idle()
    other = client.responses.create(model="stub", input=say("Hi"))
    with pytest.raises(openai.BadRequestError, match="was not made in the background"):
        client.responses.cancel(other.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_none")


def test_a_failure_in_the_background_is_told_when_asked_for(client):
    response = client.responses.create(model="stub", input="!raise", background=True)
    deadline = time.monotonic() + 20
    while response.status == "in_progress" and time.monotonic() < deadline:
        time.sleep(0.02)
        response = client.responses.retrieve(response.id)
    assert response.status == "failed"
    assert "a defect in step" in response.error.message


def test_a_failure_in_a_stream_is_its_last_event(client):
    events = events_of(client, input="!raise")
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert events[-1].response.status == "failed"
    assert events[-1].response.error.code == "server_error"
    assert "a defect in step" in events[-1].response.error.message


def test_a_failure_of_a_whole_answer_is_an_error(client):
    with pytest.raises(openai.InternalServerError, match="a defect in step"):
        client.responses.create(model="stub", input="!raise")


def test_a_client_that_leaves_ends_the_generation(client, server):
    stream = client.responses.create(model="stub", input="!slow", stream=True)
    next(iter(stream))
    assert server.llm.stats is not None
    stream.close()
    server.wait_until_idle()


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "input_image"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "an item's type must be"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input", "an item's type must be"),
    ({"input": []}, "input", "at least 1"),
    ({"input": [{"role": "user", "content": "x", "name": "y"}]}, "input", "name is not supported"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
    ({"tool_choice": "required"}, "tool_choice", "cannot be forced"),
    ({"tool_choice": {"type": "function", "name": "weather"}}, "tool_choice", "cannot be forced"),
    ({"text": {"format": {"type": "json_object"}}}, "text.format", "forced formats"),
    ({"include": ["reasoning.encrypted_content"]}, "include", "nothing more can be included"),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "reasoning is given in full"),
    ({"truncation": "auto"}, "truncation", "too long is refused"),
    ({"top_logprobs": 2}, "top_logprobs", "log-probabilities"),
    ({"conversation": "conv_1"}, "conversation", "use previous_response_id"),
    ({"prompt": {"id": "x"}}, "prompt", "not stored"),
    ({"service_tier": "flex"}, "service_tier", "no tiers"),
    ({"max_tool_calls": 3}, "max_tool_calls", "no built-in tools"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    ({"n": 2}, "n", "one answer"),
    ({"frobnicate": 1}, "frobnicate", "frobnicate is not supported"),
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_is_not_supported_is_refused_by_its_name(client, body, param, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.responses.create(**{"model": "stub", "input": "x", "extra_body": body} | {})
    assert caught.value.param.startswith(param)


def test_contradictions_and_too_much_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="background is true and stream is true"):
        client.responses.create(model="stub", input="x", background=True, stream=True)
    with pytest.raises(openai.BadRequestError, match="background is true and store is false"):
        client.responses.create(model="stub", input="x", background=True, store=False)
    with pytest.raises(openai.BadRequestError, match="the context holds 2,048"):
        client.responses.create(model="stub", input="x" * 3000)
    with pytest.raises(openai.BadRequestError, match="reasoning_effort"):
        client.responses.create(model="stub", input="x", reasoning={"effort": "low"})
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        client.responses.create(model="gpt", input="x")
    for query in ({"stream": True}, {"starting_after": 3}):
        response = httpx.get(f"{client.base_url}responses/resp_1", params=query)
        assert response.status_code == 400
        assert f"{next(iter(query))} is not supported" in response.json()["error"]["message"]


def test_neutral_values_are_accepted(client):
    response = client.responses.create(
        model="stub",
        input=say("Hi"),
        include=[],
        truncation="disabled",
        service_tier="auto",
        tool_choice="auto",
        text={"format": {"type": "text"}, "verbosity": "medium"},
        user="me",
        prompt_cache_key="k",
        safety_identifier="s",
        extra_body={"seed": 3, "top_k": 5, "cache_salt": "s", "chat_template_kwargs": {"enable_thinking": False}},
    )
    assert response.output_text == "Hi"


def test_a_template_that_opens_the_reasoning(client):
    response = client.responses.create(
        model="stub",
        input=say("Hm.</think>Yes."),
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output_text == "Yes."


def test_another_tenant_finds_nothing(start_stub, tmp_path):
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"key": f"sk-{n}" * 8, "name": n, "tenant": n} for n in ("one", "two")]}))
    server = start_stub(api_keys_file=str(keys))
    one, two = (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=f"sk-{name}" * 8, max_retries=0) for name in ("one", "two")
    )
    with one, two:
        response = one.responses.create(model="stub", input=say("Hi"))
        assert one.responses.retrieve(response.id).output_text == "Hi"
        for attempt in (
            lambda: two.responses.retrieve(response.id),
            lambda: two.responses.delete(response.id),
            lambda: two.responses.cancel(response.id),
            lambda: two.responses.create(model="stub", input="x", previous_response_id=response.id),
        ):
            with pytest.raises(openai.NotFoundError):
                attempt()


def test_a_server_that_stores_nothing_says_so(start_stub):
    server = start_stub(max_stored_responses=0)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        response = client.responses.create(model="stub", input=say("Hi"))
        assert response.store is False
        with pytest.raises(openai.BadRequestError, match="--max-stored-responses 0"):
            client.responses.create(model="stub", input="x", store=True)
        with pytest.raises(openai.NotFoundError, match="this server keeps none"):
            client.responses.retrieve(response.id)


def test_tools_are_refused_where_calls_would_not_be_found(start_stub):
    server = start_stub(tool_call_parser="none")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
            client.responses.create(model="stub", input="x", tools=TOOLS)
        assert client.responses.create(model="stub", input=say(CALL)).output_text == CALL


def test_the_asynchronous_client_has_many_at_once(server):
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        if number % 2:
            return (await client.responses.create(model="stub", input=say(f"No {number}"))).output_text
        async with client.responses.stream(model="stub", input=say(f"No {number}")) as stream:
            async for _ in stream:
                pass
            return (await stream.get_final_response()).output_text

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(40)))

    assert asyncio.run(ask_all()) == [f"No {number}" for number in range(40)]
    server.wait_until_idle()


def test_a_real_model_answers(tiny_server):
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0) as client:
        body: dict[str, Any] = {"model": "tiny", "input": "Hello", "temperature": 0, "max_output_tokens": 12}
        whole = client.responses.create(**body)
        with client.responses.stream(**body) as stream:
            list(stream)
            streamed = stream.get_final_response() if whole.status == "completed" else None
        assert whole.usage.output_tokens <= 12
        assert streamed is None or streamed.output_text == whole.output_text
        events = list(client.responses.create(**body, stream=True))
        assert events[-1].response.output_text == whole.output_text


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "stub", "input": "\\ud800"}',
        b'{"model": "stub", "input": "x", "tool_choice": "none", "tools": [{"type": "function", "name": "f", '
        b'"parameters": {"a": "\\ud800"}}]}',
        b'{"model": "stub", "input": "x", "metadata": {"a": "\\ud800"}}',
        b'{"model": "stub", "input": "\xff"}',
        b'{"model": "stub", "input": [' + b"[" * 20_000 + b"]" * 20_000 + b"]}",
        b'{"model": "stub", "input": "x", "temperature": 1e999}',
        b'{"model": "stub", "input": 1' + b"0" * 5_000 + b"}",
        b"[]",
        b"",
    ],
    ids=lambda body: repr(body)[:40],
)
def test_a_body_that_makes_no_sense_is_refused(client, body):
    answer = httpx.post(f"{client.base_url}responses", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "arguments", ["{", "[]", '{"a": "\\ud800"}', '{"a": NaN}', "[" * 20_000, '{"a": 1' + "0" * 40 + "}"]
)
def test_arguments_that_a_model_got_wrong_can_be_sent_back(client, arguments):
    items = [
        {"role": "user", "content": "x"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c", "output": "no"},
    ]
    if len(arguments) > 1000:
        with pytest.raises(openai.BadRequestError, match="max_model_len"):
            client.responses.create(model="stub", input=items)
        return
    response = client.responses.create(model="stub", input=items, max_output_tokens=150)
    assert response.output_text.startswith('[user]x[assistant]<tool_call>{"name": "f", "arguments": {"')
    body = {"input": "go on", "previous_response_id": response.id, "max_output_tokens": 150}
    assert client.responses.create(model="stub", **body).output_text == response.output_text


def test_numbers_of_any_size_come_back_in_tools(client):
    tool = TOOLS[0] | {"parameters": {"maximum": 10**30}}
    response = client.responses.create(model="stub", input=say("Hi"), tools=[tool])
    assert response.tools[0].parameters == {"maximum": 10**30}
    assert client.responses.retrieve(response.id).tools[0].parameters == {"maximum": 10**30}


def test_api_workers_share_their_responses_and_cancel_each_others(server, tmp_path):
    async def use_two() -> None:
        config = dataclasses.replace(server.config, ui=False)
        async with AsyncExitStack() as stack:
            clients = []
            for _ in range(2):
                llm = await AsyncLLM.connect(server.process.address)
                stack.push_async_callback(llm.close)
                app = create_app(llm, config, shared_folder=tmp_path)
                stack.callback(app.state.server.close)
                transport = httpx.ASGITransport(app)
                clients.append(
                    await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://x"))
                )
            one, other = clients
            created = (await one.post("/v1/responses", json={"model": "stub", "input": say("Hi")})).json()
            assert (await other.get(f"/v1/responses/{created['id']}")).json() == created

            body = {"model": "stub", "input": "!slow", "background": True}
            created = (await one.post("/v1/responses", json=body)).json()
            assert (await other.get(f"/v1/responses/{created['id']}")).json()["status"] == "in_progress"
            cancelled = (await other.post(f"/v1/responses/{created['id']}/cancel")).json()
            assert cancelled["status"] == "cancelled"
            assert (await one.get(f"/v1/responses/{created['id']}")).json() == cancelled

    asyncio.run(use_two())
    server.wait_until_idle()


def test_an_engine_that_dies_fails_the_stream_and_the_next_is_served(start_stub):
    server = start_stub()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        background = client.responses.create(model="stub", input="!slow", background=True)
        events = events_of(client, input="!die")
        assert events[-1].type == "response.failed"
        assert events[-1].response.error.message
        server.wait_for(lambda: client.responses.retrieve(background.id).status == "failed")
        server.wait_for(lambda: server.llm.state == "ready", timeout_s=30)
        assert client.responses.create(model="stub", input=say("Hi")).output_text == "Hi"
