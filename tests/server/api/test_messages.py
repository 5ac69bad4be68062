"""/v1/messages, judged by Anthropic's client. The stub engine repeats its prompt, or says what it is told to."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic
import httpx
import openai
import pytest

from jaxllm import EngineConfig
from jaxllm.server.api.protocol.message_blocks import TextBlock, ThinkingBlock, ToolResultBlock, ToolUseBlock
from jaxllm.server.api.protocol.messages import CountTokensRequest, MessagesRequest, OutputConfig, Thinking, Tool

if TYPE_CHECKING:
    from live_server import LiveServer

TOOLS: list[Any] = [
    {
        "name": "weather",
        "description": "Tells the weather.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
BLOCKS: dict[str, Any] = {
    "TextBlock": TextBlock,
    "ThinkingBlock": ThinkingBlock,
    "ToolUseBlock": ToolUseBlock,
    "ToolResultBlock": ToolResultBlock,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(stub_folder: Path) -> "Iterator[LiveServer]":
    from live_server import start_server

    with ExitStack() as stack:
        engine_config = EngineConfig(model=str(stub_folder))
        options: dict[str, Any] = {"served_model_name": ["stub"], "reasoning_parser": "think"}
        yield start_server(stack, engine_config, "stub_engine:StubEngine", **options)


@pytest.fixture
def client(server: "LiveServer") -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=30) as client:
        yield client
    server.wait_until_idle()


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": f"!say:{text}"}]


def without_ids(message: Any) -> dict[str, Any]:
    """What is the same when the same is asked again."""
    body = message.to_dict()
    del body["id"]
    for block in body["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    usage = body["usage"]
    usage["input_tokens"] += usage.pop("cache_read_input_tokens")  # It depends on what was asked before.
    return body


def ask(client: anthropic.Anthropic, **body: Any) -> Any:
    """The answer, whole and streamed, which must be the same."""
    body = {"model": "stub", "max_tokens": 500} | body
    whole = client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        streamed = stream.get_final_message()
    assert without_ids(streamed) == without_ids(whole)
    return whole


def test_an_answer_has_text_usage_and_a_reason(client):
    message = ask(client, system="Be brief.", messages=said("Hello é🌧 there."))
    assert [(block.type, block.text) for block in message.content] == [("text", "Hello é🌧 there.")]
    assert (message.type, message.role, message.model) == ("message", "assistant", "stub")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_")
    prompt = "[system]Be brief.[user]!say:Hello é🌧 there.[assistant]"
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == len(prompt.encode())
    assert message.usage.output_tokens == len("Hello é🌧 there.".encode()) + 1


def test_cached_tokens_are_told_apart(client):
    body: dict[str, Any] = {"model": "stub", "max_tokens": 4, "messages": [{"role": "user", "content": "cache me" * 9}]}
    first = client.messages.create(**body)
    second = client.messages.create(**body)
    assert first.usage.cache_read_input_tokens == 0
    assert second.usage.cache_read_input_tokens >= 64
    assert second.usage.input_tokens + second.usage.cache_read_input_tokens == first.usage.input_tokens


def test_the_reasons_to_stop(client):
    message = ask(client, max_tokens=3, messages=said("Hello"))
    assert (message.stop_reason, message.content[0].text) == ("max_tokens", "Hel")
    message = ask(client, stop_sequences=["!", "lo"], messages=said("Hello"))
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == ("stop_sequence", "lo", "Hel")
    message = ask(client, messages=said(CALL), tools=TOOLS)
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    message = ask(client, messages=said(""))
    assert (message.stop_reason, message.content) == ("end_turn", [])


def test_a_stream_tells_of_everything_in_order(client):
    text = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}"
    with client.messages.create(model="stub", max_tokens=500, messages=said(text), tools=TOOLS, stream=True) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert [kind for kind in kinds if kind != "content_block_delta"] == [
        "message_start",
        *["content_block_start", "content_block_stop"] * 4,
        "message_delta",
        "message_stop",
    ]
    start = events[0].message
    assert (start.content, start.stop_reason, start.usage.output_tokens) == ([], None, 0)
    starts = [event for event in events if event.type == "content_block_start"]
    assert [event.index for event in starts] == [0, 1, 2, 3]
    assert [event.content_block.type for event in starts] == ["thinking", "text", "tool_use", "tool_use"]
    assert starts[2].content_block.input == {}
    assert len({event.content_block.id for event in starts[2:]}) == 2
    pieces: dict[int, list[str]] = {}
    names = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json"}
    for event in events:
        if event.type == "content_block_delta":
            pieces.setdefault(event.index, []).append(getattr(event.delta, names[event.delta.type]))
    assert ["".join(pieces[index]) for index in range(4)] == ["Hm.", "I look."] + ['{"city": "Bern"}'] * 2
    assert all(len(pieces[index]) > 1 for index in range(4)), "everything comes in pieces"
    assert events[-2].delta.stop_reason == "tool_use"
    assert events[-2].usage.output_tokens == len(text.encode()) + 1


def test_thinking_and_calls_are_blocks_of_their_own(client):
    message = ask(client, messages=said(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}"), tools=TOOLS)
    thinking, text, *calls = message.content
    assert (thinking.type, thinking.thinking, thinking.signature) == ("thinking", "Hm.", "")
    assert (text.type, text.text) == ("text", "I look.")
    assert [(call.type, call.name, call.input) for call in calls] == [("tool_use", "weather", {"city": "Bern"})] * 2


def test_a_call_that_is_cut_off_is_passed_on(client):
    whole = client.messages.create(model="stub", max_tokens=60, messages=said(CALL), tools=TOOLS)
    assert whole.stop_reason == "max_tokens"
    assert whole.content[0].input == {"INVALID_JSON": '{"city": "Bern"'}
    with client.messages.stream(model="stub", max_tokens=60, messages=said(CALL), tools=TOOLS) as stream:
        assert stream.get_final_message().content[0].input == {"city": "Bern"}  # as the client understands it


def test_without_parallel_tool_use_the_answer_ends_with_the_first_call(client):
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    body: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 900}
    message = client.messages.create(model="stub", messages=said(CALL * 10), **body)
    assert [block.type for block in message.content] == ["tool_use"]
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens < len(CALL) * 3, "the engine does not go on"


def test_tool_choice_none_leaves_calls_in_the_text(client):
    message = ask(client, messages=said(CALL), tools=TOOLS, tool_choice={"type": "none"})
    assert message.content[0].text == CALL


def test_a_conversation_with_blocks_reaches_the_model(client):
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Bern"}},
                {"type": "tool_use", "id": "call_2", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "call_2", "content": "no city", "is_error": True},
                {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    shown = (
        "[system]S\nT[user]a\nb[assistant]I look."
        '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
        '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
        "[tool]rain[tool]Error: no city[user]So?[assistant]"
    )
    system: list[Any] = [
        {"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "T"},
    ]
    message = client.messages.create(model="stub", max_tokens=len(shown), system=system, messages=messages)
    assert message.content[0].text == shown
    assert client.messages.count_tokens(model="stub", system=system, messages=messages).input_tokens == len(shown)


def test_turns_of_one_role_in_a_row_are_one(client):
    """As Anthropic's API has it. Many templates refuse roles that do not alternate."""
    apart: list[Any] = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "Hm."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "weather", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "rain"}]},
        {"role": "user", "content": "So?"},
        {"role": "user", "content": "Well?"},
    ]
    shown = (
        '[user]a\nb[assistant]Hm.<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
        "[tool]rain[user]So?\nWell?[assistant]"
    )
    message = client.messages.create(model="stub", max_tokens=len(shown), messages=apart)
    assert message.content[0].text == shown
    assert client.messages.count_tokens(model="stub", messages=apart).input_tokens == len(shown)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_clients_tool_runner_goes_round_without_a_thread(client, is_streamed):
    """It asks for a thread first, and is told that there are none in the words that let it go on."""
    asked: list[str] = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Tells the weather."""
        asked.append(city)
        return "rain"

    runner = client.beta.messages.tool_runner(
        model="stub", max_tokens=500, messages=said(f"<think>Hm.</think>{CALL}"), tools=[weather], max_iterations=2,
        stream=is_streamed,
    )  # fmt: skip
    answers = [item.get_final_message() if is_streamed else item for item in runner]
    assert asked == ["Bern", "Bern"]  # The stub says the same again.
    assert [answer.stop_reason for answer in answers] == ["tool_use"] * 2
    lens = [answer.usage.input_tokens + answer.usage.cache_read_input_tokens for answer in answers]
    assert lens[1] > lens[0] + len("[tool]rain"), "the second request has the call and its result"


def test_a_thread_is_refused_in_words_that_a_program_understands(client):
    thread = client.beta.messages.thread(model="stub", max_tokens=5)
    with pytest.raises(anthropic.BadRequestError, match="messages are not kept") as caught:
        thread.send(said("x"))
    assert caught.value.error_code == "thread_unsupported_request"


def test_every_parameter_of_the_official_client_is_known():
    """It is taken, or refused with a reason: "not supported" would be a guess."""
    for params, body in (
        (anthropic.types.message_create_params, MessagesRequest),
        (anthropic.types.beta.message_create_params, MessagesRequest),
        (anthropic.types.message_count_tokens_params, CountTokensRequest),
        (anthropic.types.beta.message_count_tokens_params, CountTokensRequest),
    ):
        (names,) = [
            kind.__annotations__.keys()
            for name, kind in vars(params).items()
            if name in ("MessageCreateParamsBase", "MessageCountTokensParams")
        ]
        assert names - body.model_fields.keys() == ({"betas"} if "beta" in params.__name__ else set())  # a header
    for thinking in ("adaptive", "disabled", "enabled", "between_tools"):
        kind = getattr(anthropic.types.beta, f"BetaThinkingConfig{thinking.title().replace('_', '')}Param")
        assert kind.__annotations__.keys() <= Thinking.model_fields.keys()
    assert anthropic.types.beta.BetaToolParam.__annotations__.keys() <= Tool.model_fields.keys()
    assert anthropic.types.beta.BetaOutputConfigParam.__annotations__.keys() <= OutputConfig.model_fields.keys()
    for name, block in BLOCKS.items():
        kind = getattr(anthropic.types.beta, f"Beta{name}Param")
        assert kind.__annotations__.keys() <= block.model_fields.keys()


@pytest.mark.parametrize("dump", ["model_dump", "to_dict", "to_param"])
def test_what_the_client_makes_of_an_answer_can_be_sent_back(client, dump):
    body: dict[str, Any] = {"model": "stub", "max_tokens": 500, "tools": TOOLS}
    body["messages"] = said(f"<think>Hm.</think>Well.{CALL}")
    for messages in (client.messages, client.beta.messages):
        with messages.stream(**body) as stream:
            streamed = stream.get_final_message()
        for answer in (messages.create(**body), streamed):
            if dump == "to_param":
                turn = answer.to_param()
            else:
                turn = {"role": "assistant", "content": [getattr(block, dump)() for block in answer.content]}
            call = answer.content[-1].id
            result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call, "content": "rain"}]}
            again: list[Any] = [*body["messages"], turn, result]
            assert messages.count_tokens(model="stub", messages=again).input_tokens > 0


def test_models_are_told_to_both_official_clients(client, server):
    (model,) = client.models.list()
    for info in (model, client.models.retrieve("stub"), client.beta.models.retrieve("stub")):
        assert (info.id, info.type, info.display_name, info.lifecycle) == ("stub", "model", "stub", "active")
        assert info.created_at.tzinfo is not None
        assert (info.max_input_tokens, info.max_tokens) == (2048, 2047)
    anthropic.types.ModelInfo.model_validate(model.to_dict(), strict=False)
    assert list(client.models.list(after_id="stub")) == []
    assert list(client.models.list(lifecycle=["retired"])) == []
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.models.retrieve("claude")
    assert missing.value.type == "not_found_error"
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-") as other:
        openai.types.Model.model_validate(other.models.retrieve("stub").to_dict())


def test_an_answer_can_be_sent_back_as_it_came(client):
    answer = client.messages.create(
        model="stub", max_tokens=200, messages=said(f"<think>Hm.</think>Well.{CALL}"), tools=TOOLS
    )
    messages: list[Any] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": answer.content[2].id, "content": "rain"}]},
    ]
    again = client.messages.create(model="stub", max_tokens=150, messages=messages)
    assert again.content[0].text.startswith("[user]x[assistant]Well.<tool_call>")


def test_tools_count_as_tokens(client):
    messages = said("x")
    without = client.messages.count_tokens(model="stub", messages=messages).input_tokens
    with_tools = client.messages.count_tokens(model="stub", messages=messages, tools=TOOLS).input_tokens
    assert with_tools > without + len("Tells the weather.")
    answer = client.messages.create(model="stub", max_tokens=5, messages=messages, tools=TOOLS)
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == with_tools


def test_whether_to_think_is_left_to_the_template(client):
    body: dict[str, Any] = {"model": "stub", "max_tokens": 100, "messages": said("Hm.</think>Yes.")}
    message = client.messages.create(**body, thinking={"type": "adaptive"})
    assert [block.type for block in message.content] == ["thinking", "text"]
    message = client.messages.create(**body, thinking={"type": "disabled"})
    assert [block.type for block in message.content] == ["text"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "only blocks of the types"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "only blocks of the types"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "the last message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": ""}]}]},
            r"messages\[0\]: there is no call 't'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "t", "signature": ""}]}]},
            "the role user cannot have",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool", "name": "weather"}}, "tool_choice.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\]"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
        ({"output_config": {"effort": "high"}}, "reasoning_effort"),
        ({"container": "c"}, "container"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"fallbacks": [{"model": "other"}]}, "fallbacks"),
        ({"diagnostics": {"previous_message_id": None}}, "diagnostics"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
        ({"tool_choice": {"type": "auto"}}, "tool_choice needs tools"),
        ({"service_tier": "batch"}, "no tiers"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"frobnicate": 1}, "frobnicate is not supported"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_supported_is_refused_by_its_name(client, body, message):
    with pytest.raises(anthropic.BadRequestError, match=message) as caught:
        client.messages.create(model="stub", max_tokens=5, messages=said("x"), extra_body=body)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_errors_have_anthropics_shape(client):
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude", max_tokens=5, messages=said("x"))
    assert missing.value.body["error"] == {
        "type": "not_found_error",
        "message": "there is no model 'claude'; this server has 'stub'",
        "details": {"error_code": "model_not_found"},
        "param": "model",
    }
    assert missing.value.request_id == missing.value.body["request_id"]
    assert missing.value.error_code == "model_not_found"
    with pytest.raises(anthropic.BadRequestError, match="the context holds 2,048"):
        client.messages.create(model="stub", max_tokens=3000, messages=said("x"))
    answer = httpx.post(f"{client.base_url}/v1/messages", content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    with pytest.raises(anthropic.InternalServerError, match="a defect in step") as failed:
        client.messages.create(model="stub", max_tokens=5, messages=[{"role": "user", "content": "!raise"}])
    assert failed.value.body["error"]["type"] == "api_error"


def test_a_failure_in_a_stream_is_an_error_event(client):
    body: dict[str, Any] = {"model": "stub", "max_tokens": 5, "messages": [{"role": "user", "content": "!raise"}]}
    with client.messages.create(**body, stream=True) as stream:
        assert next(iter(stream)).type == "message_start"
        with pytest.raises(anthropic.APIStatusError, match="a defect in step") as caught:
            list(stream)
    assert caught.value.body["request_id"] == caught.value.request_id
    assert caught.value.body["error"]["type"] == "api_error"


def test_a_client_that_leaves_ends_the_generation(client, server):
    stream = client.messages.create(
        model="stub", max_tokens=1000, messages=[{"role": "user", "content": "!slow"}], stream=True
    )
    next(iter(stream))
    stream.close()
    server.wait_until_idle()


def test_keys_come_in_x_api_key_or_as_a_bearer(start_stub, tmp_path):
    key = "sk-" + "k" * 40
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"key": key, "name": "one", "tenant": "one"}]}))
    server = start_stub(api_keys_file=str(keys))
    body: dict[str, Any] = {"model": "stub", "max_tokens": 9, "messages": said("Hi")}
    with anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0) as client:
        assert client.messages.create(**body).content[0].text == "Hi"
        assert client.messages.count_tokens(model="stub", messages=said("Hi")).input_tokens > 0
    with anthropic.Anthropic(base_url=server.url, auth_token=key, max_retries=0) as client:
        assert client.messages.create(**body).content[0].text == "Hi"
    with anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as client:
        for ask_for in (client.messages.create, client.messages.count_tokens):
            given = body if ask_for == client.messages.create else {"model": "stub", "messages": said("Hi")}
            with pytest.raises(anthropic.AuthenticationError) as caught:
                ask_for(**given)
            assert caught.value.body["error"]["type"] == "authentication_error"


def test_the_asynchronous_client_has_many_at_once(server):
    async def ask_one(client: anthropic.AsyncAnthropic, number: int) -> str:
        body: dict[str, Any] = {"model": "stub", "max_tokens": 20, "messages": said(f"No {number}")}
        if number % 2:
            message = await client.messages.create(**body)
            return message.content[0].text
        async with client.messages.stream(**body) as stream:
            return await stream.get_final_text()

    async def ask_all() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask_one(client, number) for number in range(40)))

    assert asyncio.run(ask_all()) == [f"No {number}" for number in range(40)]
    server.wait_until_idle()


def test_a_real_model_answers(tiny_server):
    with anthropic.Anthropic(base_url=tiny_server.url, api_key="none", max_retries=0) as client:
        body: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "messages": [{"role": "user", "content": "Hello"}]}
        greedy: dict[str, Any] = {"temperature": 0}
        whole = client.messages.create(**body, extra_body=greedy)
        with client.messages.stream(**body, extra_body=greedy) as stream:
            streamed = stream.get_final_message()
        assert without_ids(streamed) == without_ids(whole)
        assert whole.stop_reason in ("max_tokens", "end_turn")
        assert 1 <= whole.usage.output_tokens <= 12


def test_an_engine_that_dies_fails_the_stream_and_the_next_is_served(start_stub):
    server = start_stub()
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=30) as client:
        body: dict[str, Any] = {"model": "stub", "max_tokens": 5, "messages": [{"role": "user", "content": "!die"}]}
        with (
            pytest.raises(anthropic.APIStatusError) as caught,
            client.messages.create(**body, stream=True) as stream,
        ):
            list(stream)
        assert caught.value.body["error"]["type"] == "overloaded_error"
        server.wait_for(lambda: server.llm.state == "ready", timeout_s=30)
        assert client.messages.create(model="stub", max_tokens=9, messages=said("Hi")).content[0].text == "Hi"
