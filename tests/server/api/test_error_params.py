"""A 400 says which field is to blame, as the request calls it."""

from typing import Any

import httpx
import pytest

SAID = {"role": "user", "content": "a"}
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "stub", "prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"model": "stub", "messages": [SAID], "max_tokens": 1},
    "/v1/responses": {"model": "stub", "input": "a", "max_output_tokens": 1},
    "/v1/messages": {"model": "stub", "messages": [SAID], "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": "stub", "messages": [SAID]},
    "/tokenize": {"model": "stub"},
    "/detokenize": {"model": "stub", "tokens": [5]},
}
LONG = "a" * 3000  # The context holds 2,048.
HOPELESS = "a" * 100_000  # not even tokenized
TOOL_MESSAGE = {"role": "tool", "content": "a"}

TABLE: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": [1, 256]}, "prompt"),
    ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {"prompt": LONG}, "prompt"),
    ("/v1/completions", {"prompt": HOPELESS}, "prompt"),
    ("/v1/completions", {"max_tokens": 2048}, "max_tokens"),
    ("/v1/completions", {"min_tokens": 2}, "min_tokens"),
    ("/v1/completions", {"temperature": 1e300}, "temperature"),
    ("/v1/completions", {"echo": True, "logprobs": 1}, "logprobs"),
    ("/v1/completions", {"prompt": ["a"] * 2000, "n": 2}, "n"),
    ("/v1/completions", {"best_of": 2}, "best_of"),
    ("/v1/completions", {"stream_options": {}}, "stream_options"),
    ("/v1/completions", {"priority": -1}, "priority"),
    ("/v1/completions", {"stop": ""}, "stop"),
    ("/v1/completions", {"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ("/v1/completions", {"cache_salt": ""}, "cache_salt"),
    ("/v1/completions", {f"f{number}": 1 for number in range(200)}, "f0"),
    ("/v1/completions", {"x" * 500: 1}, "x" * 80 + "…"),
    ("/v1/chat/completions", {"messages": [SAID | {"content": LONG}]}, "messages"),
    ("/v1/chat/completions", {"messages": [SAID | {"content": HOPELESS}]}, "messages"),
    ("/v1/chat/completions", {"max_tokens": 2048}, "max_tokens"),
    ("/v1/chat/completions", {"max_tokens": None, "max_completion_tokens": 2048}, "max_completion_tokens"),
    ("/v1/chat/completions", {"max_completion_tokens": 2}, "max_tokens"),
    ("/v1/chat/completions", {"reasoning_effort": "low"}, "reasoning_effort"),
    ("/v1/chat/completions", {"chat_template_kwargs": {"effort": 1}}, "chat_template_kwargs.effort"),
    ("/v1/chat/completions", {"chat_template": "{{ messages }}"}, "chat_template"),
    ("/v1/chat/completions", {"top_logprobs": 1}, "top_logprobs"),
    (
        "/v1/chat/completions",
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
    ),
    (
        "/v1/chat/completions",
        {"add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
    ),
    ("/v1/chat/completions", {"include_reasoning": False, "logprobs": True}, "include_reasoning"),
    ("/v1/chat/completions", {"include_reasoning": False, "return_token_ids": True}, "include_reasoning"),
    ("/v1/chat/completions", {"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
    ("/v1/completions", {"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
    ("/v1/chat/completions", {"stream_options": {}}, "stream_options"),
    ("/v1/chat/completions", {"tool_choice": "auto"}, "tool_choice"),
    ("/v1/chat/completions", {"tool_choice": "auto", "tools": []}, "tool_choice"),
    ("/v1/chat/completions", {"parallel_tool_calls": False}, "parallel_tool_calls"),
    ("/v1/chat/completions", {"min_tokens": 2}, "min_tokens"),
    ("/v1/chat/completions", {"messages": [SAID, TOOL_MESSAGE]}, "messages[1].tool_call_id"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("/v1/responses", {"input": LONG}, "input"),
    ("/v1/responses", {"input": HOPELESS}, "input"),
    ("/v1/responses", {"max_output_tokens": 2048}, "max_output_tokens"),
    ("/v1/responses", {"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ("/v1/responses", {"chat_template_kwargs": {"effort": 1}}, "chat_template_kwargs.effort"),
    ("/v1/responses", {"background": True, "stream": True}, "background"),
    ("/v1/responses", {"background": True, "store": False}, "store"),
    ("/v1/responses", {"stream_options": {}}, "stream_options"),
    (
        "/v1/responses",
        {"stream": True, "stream_options": {"include_usage": True}},
        "stream_options.include_usage",
    ),
    ("/v1/messages", {"messages": [SAID | {"content": LONG}]}, "messages"),
    ("/v1/messages", {"max_tokens": 2048}, "max_tokens"),
    ("/v1/messages", {"output_config": {"effort": "low"}}, "output_config.effort"),
    ("/v1/messages", {"chat_template_kwargs": {"effort": 1}}, "chat_template_kwargs.effort"),
    ("/v1/messages", {"messages": [SAID, {"role": "assistant", "content": "a"}]}, "messages[1]"),
    ("/v1/messages", {"tool_choice": {"type": "auto"}}, "tool_choice"),
    ("/v1/messages/count_tokens", {"output_config": {"effort": "low"}}, "output_config.effort"),
    ("/v1/messages/count_tokens", {"messages": [SAID | {"content": HOPELESS}]}, "messages"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [SAID]}, "messages"),
    ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
    ("/tokenize", {"prompt": HOPELESS}, "prompt"),
    ("/tokenize", {"messages": [SAID | {"content": HOPELESS}]}, "messages"),
    ("/tokenize", {"messages": [SAID], "chat_template_kwargs": {"effort": 1}}, "chat_template_kwargs.effort"),
    ("/detokenize", {"tokens": [256]}, "tokens[0]"),
    ("/detokenize", {"tokens": [5] * 3000}, "tokens"),
]


@pytest.fixture(scope="module")
def client(_stub_server):
    with httpx.Client(base_url=_stub_server.url, timeout=30) as client:
        yield client


@pytest.mark.parametrize(("path", "body", "param"), TABLE, ids=lambda value: str(value)[:40])
def test_the_field_to_blame_is_named_as_the_request_calls_it(client, path, body, param):
    answer = client.post(path, json=BASES[path] | body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error["message"]


def test_a_call_needs_tools_but_none_can_be_called_without(client):
    for path, choice in (("/v1/chat/completions", "none"), ("/v1/messages", {"type": "none"})):
        answer = client.post(path, json=BASES[path] | {"tool_choice": choice})
        assert answer.status_code == 200, answer.text
