"""No option is ignored: each field of each body changes something, is refused, or is documented to change nothing."""

import json
import typing
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pytest

from jaxllm.server.api.protocol.chat_completions import ChatRequest
from jaxllm.server.api.protocol.completions import CompletionRequest
from jaxllm.server.api.protocol.messages import CountTokensRequest, MessagesRequest
from jaxllm.server.api.protocol.responses import InputTokensRequest, ResponseRequest
from jaxllm.server.api.protocol.sampling import Only, RequestModel
from jaxllm.server.api.routes.tokenize import DetokenizeRequest, TokenizeRequest

SAID = {"role": "user", "content": "ab"}
BASES: dict[type[RequestModel], tuple[str, dict[str, Any]]] = {
    CompletionRequest: ("/v1/completions", {"model": "stub", "prompt": "ab", "max_tokens": 4}),
    ChatRequest: ("/v1/chat/completions", {"model": "stub", "messages": [SAID], "max_tokens": 4}),
    ResponseRequest: ("/v1/responses", {"model": "stub", "input": "ab", "max_output_tokens": 4}),
    InputTokensRequest: ("/v1/responses/input_tokens", {"model": "stub", "input": "ab"}),
    MessagesRequest: ("/v1/messages", {"model": "stub", "messages": [SAID], "max_tokens": 4}),
    CountTokensRequest: ("/v1/messages/count_tokens", {"model": "stub", "messages": [SAID]}),
    TokenizeRequest: ("/tokenize", {"model": "stub", "prompt": "ab"}),
    DetokenizeRequest: ("/detokenize", {"model": "stub", "tokens": [70, 71]}),
}
Body = dict[str, Any]


def models_in(kind: Any) -> Iterator[type[RequestModel]]:
    if isinstance(kind, type) and issubclass(kind, RequestModel):
        yield kind
    for argument in typing.get_args(kind):
        yield from models_in(argument)


def fields_that_change_something(model: type[RequestModel]) -> Iterator[str]:
    """Of a body and its parts, as "Model.field", but for those that hold parts, that have one value only, that are
    refused, and that are documented to change nothing."""
    for name, field in model.model_fields.items():
        parts = [*models_in(field.annotation), *(part for extra in field.metadata for part in models_in(extra))]
        for part in parts:
            yield from fields_that_change_something(part)
        is_refused = any(isinstance(extra, Only) for extra in field.metadata) and name != "tool_choice"
        has_choice = typing.get_origin(field.annotation) is not Literal or len(typing.get_args(field.annotation)) > 1
        if not parts and not is_refused and has_choice and "hanges nothing" not in (field.description or ""):
            yield f"{model.__name__}.{name}"


def samples(body: type[RequestModel], /, **changes: Any) -> dict[str, tuple[Body, Body]]:
    """For fields of a body: what is added to its base, or two bodies to compare."""
    name = body.__name__
    pairs = {field: c if isinstance(c, tuple) else ({}, {field: c}) for field, c in changes.items()}
    return {field if "." in field else f"{name}.{field}": pair for field, pair in pairs.items()}


def parts(change: Any, *, of: str, base: Any) -> tuple[Body, Body]:
    """A body with a list of one part, and the same with that part changed."""
    return {of: [*base[:-1], base[-1]]}, {of: [*base[:-1], base[-1] | change]}


SAMPLING: Body = {
    "model": "other", "stream": True, "temperature": 0.5, "top_p": 0.5, "seed": 1, "top_k": 3, "min_p": 0.5,
    "priority": 1, "cache_salt": "x",
}  # fmt: skip
VLLM: Body = {
    "stop": "b", "min_tokens": 1, "ignore_eos": True, "stop_token_ids": [7], "include_stop_str_in_output": True,
    "skip_special_tokens": False,
}  # fmt: skip

FUNCTION: Body = {"name": "f", "description": "d", "parameters": {"type": "object"}}
CHAT_TOOL = [{"type": "function", "function": FUNCTION}]
CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
CALLED = [SAID, {"role": "assistant", "content": "", "tool_calls": CALLS}]
RESULT = [*CALLED, {"role": "tool", "tool_call_id": "c", "content": "r"}]


def chat_tool(**change: Any) -> tuple[Body, Body]:
    return {"tools": CHAT_TOOL}, {"tools": [{"type": "function", "function": FUNCTION | change}]}


def chat_call(name: str, value: str) -> tuple[Body, Body]:
    function = CALLS[0]["function"] | {name: value}  # type: ignore[operator]
    changed = [SAID, CALLED[1] | {"tool_calls": [CALLS[0] | {"function": function}]}]
    return {"messages": [*CALLED, SAID]}, {"messages": [*changed, SAID]}


CALL_TEXT = '!say:<tool_call>{"name": "f", "arguments": {}}</tool_call>'
STREAMED = {"stream": True}
CHAT = samples(
    ChatRequest, **SAMPLING, **VLLM, n=2, max_completion_tokens=({"max_tokens": None, "max_completion_tokens": 3},
    {"max_tokens": None, "max_completion_tokens": 2}), max_tokens=2, logprobs=True,
    reasoning_effort="low", chat_template="x", top_logprobs=({"logprobs": True}, {"logprobs": True, "top_logprobs": 2}),
    tool_choice=({"tools": CHAT_TOOL}, {"tools": CHAT_TOOL, "tool_choice": "none"}),
    parallel_tool_calls=({"tools": CHAT_TOOL, "messages": [SAID | {"content": CALL_TEXT * 2}], "max_tokens": 200},
                         {"tools": CHAT_TOOL, "messages": [SAID | {"content": CALL_TEXT * 2}], "max_tokens": 200,
                          "parallel_tool_calls": False}),
    chat_template_kwargs={"enable_thinking": True},
    return_token_ids=True, add_generation_prompt=False, continue_final_message=True, add_special_tokens=True,
    return_tokens_as_token_ids=({"logprobs": True}, {"logprobs": True, "return_tokens_as_token_ids": True}),
)  # fmt: skip

MESSAGES_TOOL = [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "r", "is_error": False}


def blocks(role: str, block: Body, **change: Any) -> tuple[Body, Body]:
    """A conversation in which this block is the last one, and the same with the block changed."""

    def conversation(block: Body) -> Body:
        turns: list[Body] = [SAID, {"role": "assistant", "content": [USE]}] if role == "user" else [SAID]
        last = {"role": role, "content": [block]}
        return {"messages": [*turns, last, *([SAID] if role == "assistant" else [])]}

    return conversation(block), conversation(block | change)


COUNTED: Body = {
    "system": "s", "chat_template_kwargs": {"enable_thinking": True},
    "Tool.name": parts({"name": "gg"}, of="tools", base=MESSAGES_TOOL),
    "Tool.description": parts({"description": "dd"}, of="tools", base=MESSAGES_TOOL),
    "Tool.input_schema": parts({"input_schema": {"type": "objects"}}, of="tools", base=MESSAGES_TOOL),
    "ToolChoice.type": ({"tools": MESSAGES_TOOL}, {"tools": MESSAGES_TOOL, "tool_choice": {"type": "none"}}),
    "Thinking.type": ({"thinking": {"type": "adaptive"}}, {"thinking": {"type": "disabled"}}),
    "OutputConfig.effort": ({"output_config": {}}, {"output_config": {"effort": "low"}}),
    "Message.role": ({}, {"messages": [SAID | {"role": "system"}]}),
    "TextBlock.text": blocks("user", {"type": "text", "text": "a"}, text="bb"),
    "ToolUseBlock.id": blocks("assistant", USE, id=3),
    "ToolUseBlock.name": blocks("assistant", USE, name="gg"),
    "ToolUseBlock.input": blocks("assistant", USE, input={"x": 12}),
    "ToolResultBlock.tool_use_id": blocks("user", TOOL_RESULT, tool_use_id="other"),
    "ToolResultBlock.content": blocks("user", TOOL_RESULT, content="rr"),
    "ToolResultBlock.is_error": blocks("user", TOOL_RESULT, is_error=True),
}  # fmt: skip

ITEM = {"type": "message", "role": "user", "content": "ab"}
RESPONSES_TOOL = [{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}]
CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'}
OUTPUT_ITEM = {"type": "function_call_output", "call_id": "c", "output": "r"}

INPUT: Body = {
    "MessageItem.role": parts({"role": "system"}, of="input", base=[ITEM]),
    "MessageItem.content": parts({"content": "abc"}, of="input", base=[ITEM]),
    "FunctionCallItem.call_id": parts({"call_id": "d"}, of="input", base=[ITEM, CALL_ITEM]),
    "FunctionCallItem.name": parts({"name": "g"}, of="input", base=[ITEM, CALL_ITEM]),
    "FunctionCallItem.arguments": parts({"arguments": "{}"}, of="input", base=[ITEM, CALL_ITEM]),
    "FunctionCallOutputItem.call_id": parts({"call_id": "d"}, of="input", base=[CALL_ITEM, OUTPUT_ITEM]),
    "FunctionCallOutputItem.output": parts({"output": "s"}, of="input", base=[CALL_ITEM, OUTPUT_ITEM]),
    "ReasoningItem.content": parts(
        {"content": [{"type": "reasoning_text", "text": "Hm."}]}, of="input", base=[ITEM, {"type": "reasoning"}]
    ),
    "FunctionTool.name": parts({"name": "g"}, of="tools", base=RESPONSES_TOOL),
    "FunctionTool.description": parts({"description": "e"}, of="tools", base=RESPONSES_TOOL),
    "FunctionTool.parameters": parts({"parameters": {}}, of="tools", base=RESPONSES_TOOL),
    "Reasoning.effort": ({"reasoning": {}}, {"reasoning": {"effort": "low"}}),
}

EFFECTS: dict[type[RequestModel], dict[str, tuple[Body, Body]]] = {
    CompletionRequest: samples(
        CompletionRequest, **SAMPLING, **VLLM, n=2, prompt="abc", max_tokens=2, logprobs=1, echo=True, best_of=2,
        return_token_ids=True,
        return_tokens_as_token_ids=({"logprobs": 0}, {"logprobs": 0, "return_tokens_as_token_ids": True}),
        **{"ChunkOptions.include_usage": (STREAMED, STREAMED | {"stream_options": {"include_usage": True}})},
    ),
    ChatRequest: CHAT | samples(ChatRequest, **{
        "ChunkOptions.include_usage": (STREAMED, STREAMED | {"stream_options": {"include_usage": True}}),
        "Message.role": ({}, {"messages": [SAID | {"role": "system"}]}),
        "Message.content": ({}, {"messages": [SAID | {"content": "abc"}]}),
        "Message.name": ({}, {"messages": [SAID | {"name": "Ada"}]}),
        "Message.reasoning_content": parts({"reasoning_content": "Hm."}, of="messages", base=[*CALLED[:1], CALLED[1]]),
        "Message.reasoning": parts({"reasoning": "Hm."}, of="messages", base=[*CALLED[:1], CALLED[1]]),
        "Message.tool_call_id": parts({"tool_call_id": "d"}, of="messages", base=RESULT),
        "ToolCall.id": parts({"tool_calls": [CALLS[0] | {"id": "d"}]}, of="messages", base=CALLED),
        "CalledFunction.name": chat_call("name", "g"),
        "CalledFunction.arguments": chat_call("arguments", "{}"),
        "Function.name": chat_tool(name="g"),
        "Function.description": chat_tool(description="e"),
        "Function.parameters": chat_tool(parameters={}),
    }),
    ResponseRequest: samples(
        ResponseRequest, **SAMPLING, **VLLM, instructions="i", previous_response_id="r", store=False, background=True,
        max_output_tokens=2, tool_choice="none", parallel_tool_calls=False, metadata={"a": "b"},
        chat_template_kwargs={"enable_thinking": True},
        **INPUT, **{
            "StreamOptions.include_usage": (STREAMED, STREAMED | {"stream_options": {"include_usage": True}}),
        },
    ),
    InputTokensRequest: samples(
        InputTokensRequest, model="other", instructions="i", previous_response_id="r",
        tool_choice=({"tools": RESPONSES_TOOL}, {"tools": RESPONSES_TOOL, "tool_choice": "none"}),
        chat_template_kwargs={"enable_thinking": True}, **INPUT,
    ),
    MessagesRequest: samples(
        MessagesRequest, **SAMPLING, **COUNTED, max_tokens=2, stop_sequences=["b"],
        **{
            "ThinkingBlock.thinking": blocks(
                "assistant", {"type": "thinking", "thinking": "Hm.", "signature": ""}, thinking="Ah."
            ),
            "ToolChoice.disable_parallel_tool_use": (
                {"tools": MESSAGES_TOOL, "messages": [SAID | {"content": CALL_TEXT * 2}], "max_tokens": 200},
                {
                    "tools": MESSAGES_TOOL, "messages": [SAID | {"content": CALL_TEXT * 2}], "max_tokens": 200,
                    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
                },
            ),
        },
    ),
    CountTokensRequest: samples(CountTokensRequest, model="other", **COUNTED),
    TokenizeRequest: samples(
        TokenizeRequest, model="other", prompt="abc", return_token_strs=True,
        chat_template_kwargs=({"prompt": None, "messages": [SAID]}, {"prompt": None, "messages": [SAID],
                              "chat_template_kwargs": {"enable_thinking": True}}),
        add_generation_prompt=({"prompt": None, "messages": [SAID]}, {"prompt": None, "messages": [SAID],
                               "add_generation_prompt": False}),
        continue_final_message=({"prompt": None, "messages": [SAID]}, {"prompt": None, "messages": [SAID],
                                "continue_final_message": True}),
        add_special_tokens=({"prompt": None, "messages": [SAID]}, {"prompt": None, "messages": [SAID],
                            "add_special_tokens": True}),
    ),
    DetokenizeRequest: samples(DetokenizeRequest, model="other", tokens=[70]),
}  # fmt: skip
EFFECTS[TokenizeRequest] |= {  # which takes the same messages and tools as a chat
    field: ({"prompt": None, "messages": [SAID]} | before, {"prompt": None, "messages": [SAID]} | after)
    for field, (before, after) in EFFECTS[ChatRequest].items()
    if field.partition(".")[0] in ("Message", "CalledFunction", "ToolCall", "Function")
}
UNSEEN: dict[type[RequestModel], set[str]] = {
    # Usage is left out here, see test_completions.py; and the tokenizer adds no tokens, see test_prompt_encoder.py.
    CompletionRequest: {"ChunkOptions.continuous_usage_stats", "CompletionRequest.add_special_tokens"},
    # The same; and there is no reasoning here. See test_chat_completions.py.
    ChatRequest: {"ChunkOptions.continuous_usage_stats", "ChatRequest.include_reasoning"},
    # The template leaves reasoning out, and calls are of the answer.
    CountTokensRequest: {"ThinkingBlock.thinking", "ToolChoice.disable_parallel_tool_use"},
    InputTokensRequest: {"InputTokensRequest.parallel_tool_calls"},
}
VARIES = {"id", "created", "created_at", "completed_at", "usage", "request_id", "call_id"}


def stable(value: Any) -> Any:
    """Without what differs from answer to answer."""
    if isinstance(value, dict):
        return {key: stable(item) for key, item in value.items() if key not in VARIES}
    return [stable(item) for item in value] if isinstance(value, list) else value


@pytest.fixture
def observe(stub_server, monkeypatch):
    """What comes of a request: what the engine is asked for, and the answer."""
    llm, asked = stub_server.llm, list[Any]()

    def submit(*asked_for, request_id, on_abandoned, **options):
        asked.append((asked_for, options))
        return type(llm).submit(llm, *asked_for, request_id=request_id, on_abandoned=on_abandoned, **options)

    monkeypatch.setattr(llm, "submit", submit)
    templates = stub_server.app.state.server.templates

    def render(messages, **options):
        asked.append((messages, options))
        return type(templates).render(templates, messages, **options)

    monkeypatch.setattr(templates, "render", render)

    def observe(path: str, body: Body) -> Any:
        asked.clear()
        answer = client.post(path, json=body)
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        return answer.status_code, list(asked), [stable(json.loads(event)) for event in events or [answer.text]]

    with httpx.Client(base_url=stub_server.url, timeout=30) as client:
        yield observe


@pytest.mark.parametrize("model", BASES, ids=lambda model: model.__name__)
def test_every_field_has_its_sample(model):
    """A new field has to be added to EFFECTS, be marked with `Only`, or say "changes nothing" in its description."""
    expected = set(fields_that_change_something(model))
    assert expected - UNSEEN.get(model, set()) == set(EFFECTS[model])


@pytest.mark.parametrize("model", BASES, ids=lambda model: model.__name__)
def test_every_field_changes_something(observe, model):
    path, base = BASES[model]
    assert observe(path, base) == observe(path, base)
    ignored = []
    for field, (before, after) in EFFECTS[model].items():
        if observe(path, base | before) == observe(path, base | after):
            ignored.append(field)
    assert not ignored


@pytest.mark.parametrize("model", BASES, ids=lambda model: model.__name__)
def test_what_is_not_supported_is_refused_by_its_name(stub_server, model):
    path, base = BASES[model]
    with httpx.Client(base_url=stub_server.url) as client:
        for name, field in model.model_fields.items():
            if any(isinstance(extra, Only) for extra in field.metadata):
                answer = client.post(path, json=base | {name: {"odd": 1}})
                assert answer.status_code == 400, name
                assert answer.json()["error"]["param"] == name


NOTHING_ASKED: Body = {
    "prompt_logprobs": None, "logits_processors": [], "bad_words": [], "allowed_token_ids": None,
    "structured_outputs": None, "use_beam_search": False, "length_penalty": 1.0, "truncate_prompt_tokens": None,
    "kv_transfer_params": None, "vllm_xargs": {}, "response_format": {"type": "text"}, "request_id": "r",
    "repetition_penalty": 1.0, "spaces_between_special_tokens": True,
}  # fmt: skip


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest], ids=lambda model: model.__name__)
def test_fields_of_vllm_that_ask_for_nothing_are_taken(observe, model):
    """Clients written for it send them with its defaults."""
    path, base = BASES[model]
    own: Body = {"echo": False, "documents": [], "mm_processor_kwargs": None} if model is ChatRequest else {}
    assert observe(path, base | NOTHING_ASKED | own) == observe(path, base)


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest, ResponseRequest], ids=lambda model: model.__name__)
def test_without_a_model_the_served_one_answers_and_is_named(stub_server, model):
    path, body = BASES[model]
    answer = httpx.post(stub_server.url + path, json={key: value for key, value in body.items() if key != "model"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "stub"
