"""/v1/chat/completions: its fields, tools, reasoning, and what is refused."""

import json

import httpx
import pytest

CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
PATH = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
TOOL = {"type": "function", "function": {"name": "f", "description": "…", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "f", "arguments": {"x": "é😀"}}</tool_call>'


def post(server, messages=None, **body) -> httpx.Response:
    messages = [{"role": "user", "content": "hi"}] if messages is None else messages
    names = server.app.state.server.model_names
    content = json.dumps({"model": names[0], "messages": messages} | body)  # httpx encodes no half characters
    return httpx.post(server.url + PATH, content=content, headers=JSON, timeout=30)


def answer(server, *args, **body) -> dict:
    response = post(server, *args, **body)
    assert response.status_code == 200, response.text
    return response.json()


def say(text: str) -> list[dict]:
    return [{"role": "user", "content": f"!say:{text}"}]


def error(server, *args, **body) -> dict:
    response = post(server, *args, **body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def streamed(server, messages, **body) -> list[dict]:
    """The choices of all chunks."""
    return [choice for event in streamed_events(server, messages, **body) for choice in event["choices"]]


def streamed_events(server, messages, **body) -> list[dict]:
    response = post(server, messages, stream=True, **body)
    assert response.status_code == 200, response.text
    return [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-2]]


def test_the_whole_answer(stub_server):
    whole = answer(stub_server, say("Hello"))
    assert whole.pop("id").startswith("chatcmpl-")
    assert whole.pop("created") > 1.7e9
    usage = whole.pop("usage")
    assert usage["completion_tokens"] == 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    message = {"role": "assistant", "content": "Hello", "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    assert whole == {"object": "chat.completion", "model": "stub", "choices": [choice]}


def test_an_answer_may_fill_the_context(stub_server):
    whole = answer(stub_server, [{"role": "user", "content": "a" * 2000}])
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["total_tokens"] == 2048
    for name in ("max_tokens", "max_completion_tokens"):
        assert answer(stub_server, **{name: 3})["usage"]["completion_tokens"] == 3


def test_content_in_parts_becomes_lines(stub_server):
    parts = [{"type": "text", "text": "!say:a"}, {"type": "text", "text": "b"}]
    assert answer(stub_server, [{"role": "user", "content": parts}])["choices"][0]["message"]["content"] == "a\nb"


def test_log_probabilities(stub_server):
    logprobs = answer(stub_server, say("a€"), logprobs=True, top_logprobs=2, max_tokens=3)["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    first, second, _ = logprobs["content"]
    top = [{"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "b", "logprob": -1.5, "bytes": [98]}]
    assert first == {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": top}
    assert (second["token"], second["bytes"]) == (r"bytes:\xe2", [0xE2])
    none = answer(stub_server, say("a"), logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in none] == [[], []]
    options = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True, "max_tokens": 1}
    (entry,) = answer(stub_server, say("a"), **options)["choices"][0]["logprobs"]["content"]
    token = {"token": f"token_id:{ord('a') - 30}", "logprob": -0.5, "bytes": [97]}
    assert entry == token | {"top_logprobs": [token]}


def test_log_probabilities_in_a_stream_are_those_of_the_whole(stub_server):
    for text, options in (("a€b", {}), (f"a{CALL}", {"tools": [TOOL]})):
        options |= {"logprobs": True, "top_logprobs": 1}
        whole = answer(stub_server, say(text), **options)["choices"][0]["logprobs"]["content"]
        chunks = streamed(stub_server, say(text), **options)
        assert [entry for choice in chunks for entry in (choice["logprobs"] or {"content": []})["content"]] == whole


def test_a_tool_call(stub_server):
    server, messages = stub_server, say(f"Wait.{CALL}")
    (choice,) = answer(server, messages, tools=[TOOL])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "f")
    assert json.loads(call["function"]["arguments"]) == {"x": "é😀"}
    assert choice["message"]["content"] == "Wait."

    chunks = streamed(server, messages, tools=[TOOL])
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "Wait."
    calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    assert (calls[0]["index"], calls[0]["type"], calls[0]["function"]["name"]) == (0, "function", "f")
    assert all("id" not in call for call in calls[1:])
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert arguments == choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert chunks[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [True, False])
def test_calls_side_by_side_or_only_one(stub_server, stream):
    def calls(**options) -> tuple[list[str], str]:
        if stream:
            chunks = streamed(stub_server, say(CALL * 3 + "."), tools=[TOOL], **options)
            found = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", []) if "id" in call]
            return [call["function"]["name"] for call in found], chunks[-1]["finish_reason"]
        (choice,) = answer(stub_server, say(CALL * 3 + "."), tools=[TOOL], **options)["choices"]
        return [call["function"]["name"] for call in choice["message"]["tool_calls"]], choice["finish_reason"]

    assert calls() == (["f", "f", "f"], "tool_calls")
    assert calls(parallel_tool_calls=True) == (["f", "f", "f"], "tool_calls")
    assert calls(parallel_tool_calls=False) == (["f"], "tool_calls")


def test_without_leave_to_call_tools_a_call_is_text(stub_server):
    for options in ({}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": []}):
        (choice,) = answer(stub_server, say(CALL), **options)["choices"]
        assert choice["message"]["content"] == CALL
        assert choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]


def test_a_call_that_was_cut_off_is_not_called_complete(stub_server):
    (choice,) = answer(stub_server, say(CALL), tools=[TOOL], max_tokens=45)["choices"]
    assert choice["finish_reason"] == "length"


def test_the_history_of_calls_goes_to_the_template(stub_server):
    messages = [
        {"role": "user", "content": "u"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "t"},
    ]
    prompt = '[user]u[assistant]<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>[tool]t[assistant]'
    whole = answer(stub_server, messages, max_tokens=len(prompt))
    assert whole["choices"][0]["message"]["content"] == prompt  # The stub repeats what it is told.
    messages[1]["tool_calls"][0]["function"]["arguments"] = "{"
    prompt = prompt.replace('{"x": 1}', '{"INVALID_JSON": "{"}')
    whole = answer(stub_server, messages, max_tokens=len(prompt))
    assert whole["choices"][0]["message"]["content"] == prompt


def test_an_answer_can_be_sent_back_as_it_came(stub_server):
    message = answer(stub_server, say(f"a{CALL}"), tools=[TOOL])["choices"][0]["message"]
    tool = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "!say:done"}
    whole = answer(stub_server, [{"role": "user", "content": "go"}, message, tool], tools=[TOOL])
    assert whole["choices"][0]["message"]["content"] == "done"


def test_reasoning_is_told_from_the_answer(start_stub):
    server = start_stub(reasoning_parser="think")
    messages = say("<think>Hm.</think>Yes")
    message = answer(server, messages)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"].strip()) == ("Hm.", "Yes")
    chunks = streamed(server, messages)
    assert "".join(chunk["delta"].get("reasoning_content") or "" for chunk in chunks) == "Hm."
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks).strip() == "Yes"
    assert all(chunk["delta"].get("reasoning") == chunk["delta"].get("reasoning_content") for chunk in chunks)
    assert message["reasoning"] == message["reasoning_content"]
    back = answer(server, [{"role": "user", "content": "go"}, message, *say("done")])
    assert back["choices"][0]["message"]["content"] == "done"
    opened = answer(server, say("Hm.</think>Yes"), chat_template_kwargs={"enable_thinking": True})
    assert opened["choices"][0]["message"]["reasoning_content"] == "Hm."


def test_reasoning_that_is_not_wanted_is_left_out_and_counted(start_stub):
    server = start_stub(reasoning_parser="think")
    messages = say("<think>Hm.</think>Yes")
    whole = answer(server, messages, include_reasoning=False)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "Yes", "refusal": None}
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    deltas = [chunk["delta"] for chunk in streamed(server, messages, include_reasoning=False)]
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes"
    assert not any("reasoning" in delta for delta in deltas)


@pytest.mark.parametrize("text", ["a€b", f"a{CALL}"])
def test_the_tokens_of_an_answer_are_shown_to_who_asks_for_them(stub_server, text):
    options = {"tools": [TOOL], "n": 2, "return_token_ids": True}
    whole = answer(stub_server, say(text), **options)
    prompt = httpx.post(f"{stub_server.url}/tokenize", json={"messages": say(text), "tools": [TOOL]}).json()["tokens"]
    assert whole["prompt_token_ids"] == prompt
    token_ids = whole["choices"][0]["token_ids"]
    assert 2 * len(token_ids) == whole["usage"]["completion_tokens"]
    assert text in stub_server.llm.tokenizer.decode(token_ids)
    events = streamed_events(stub_server, say(text), stream_options=CONTINUOUS, **options)
    *chunks, last = events
    assert last["usage"] == whole["usage"] | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
    for index in range(2):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [chunk.get("prompt_token_ids") for chunk in own] == [prompt] + [None] * (len(own) - 1)
        shown = [token_id for chunk in own for token_id in chunk["choices"][0].get("token_ids", ())]
        assert shown == token_ids
        counts = [chunk["usage"]["completion_tokens"] for chunk in own]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (0, len(token_ids))
        for chunk in own:
            usage = chunk["usage"]
            assert usage["prompt_tokens"] == len(prompt)
            assert usage["total_tokens"] == len(prompt) + usage["completion_tokens"]


def test_tokens_of_reasoning_are_counted_where_it_is_told_from_the_answer(start_stub, stub_server):
    server = start_stub(reasoning_parser="think")
    messages = say("<think>Hm.</think>Yes")
    details = {"reasoning_tokens": 3}  # a token is a byte here
    assert answer(server, messages)["usage"]["completion_tokens_details"] == details
    assert answer(server, messages, n=2)["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    response = post(server, messages, stream=True, stream_options={"include_usage": True})
    usage = json.loads(response.text.split("\n\n")[-3].removeprefix("data: "))["usage"]
    assert usage["completion_tokens_details"] == details
    assert "completion_tokens_details" not in answer(stub_server, messages)["usage"]


def test_variables_of_the_template(stub_server):
    prompt = "[user]hi[assistant]<think>"
    whole = answer(stub_server, max_tokens=len(prompt), chat_template_kwargs={"enable_thinking": True})
    assert whole["choices"][0]["message"]["content"] == prompt
    assert "'reasoning_effort'" in error(stub_server, reasoning_effort="low")["message"]


TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
ENDS = [
    ({}, "[user]a[end][assistant]b[end][assistant]"),
    ({"add_generation_prompt": False}, "[user]a[end][assistant]b[end]"),
    ({"continue_final_message": True}, "[user]a[end][assistant]b"),
    ({"continue_final_message": True, "add_generation_prompt": False}, "[user]a[end][assistant]b"),
]


def test_a_prompt_ends_where_it_is_asked_to(start_stub):
    server = start_stub(allow_request_chat_template=True)
    template = TURNS + "{% if add_generation_prompt %}[assistant]{% endif %}"
    for said in ("b", "b</s>c"):  # A control token of somebody is text, in the last message too.
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": said}]
        for options, prompt in ENDS:
            text = prompt.replace("b", said)
            whole = answer(server, messages, chat_template=template, max_tokens=len(text), **options)
            assert whole["choices"][0]["message"]["content"] == text, "the stub repeats its prompt"
            assert whole["usage"]["prompt_tokens"] == len(text)
    dropped = TURNS.replace("m.content", "m.content[:1]")
    refused = error(server, say("b"), chat_template=dropped, continue_final_message=True)
    assert "continue_final_message" in refused["message"]


def test_only_what_can_go_on_is_continued(stub_server):
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    for message, words in (({"content": ""}, "with content"), ({"content": "a", "tool_calls": calls}, "tool_calls")):
        messages = [{"role": "user", "content": "u"}, {"role": "assistant"} | message]
        refused = error(stub_server, messages, continue_final_message=True)
        assert refused["param"] == "continue_final_message"
        assert words in refused["message"]


def test_reasoning_that_has_begun_goes_on_in_the_answer(start_stub):
    server = start_stub(reasoning_parser="think")
    for said, reasoning in (("<think>So", "Hm."), ("<think>So</think>A", None)):
        messages = [*say("Hm.</think>Yes"), {"role": "assistant", "content": said}]
        message = answer(server, messages, continue_final_message=True)["choices"][0]["message"]
        assert message.get("reasoning") == reasoning
        assert message["content"] == ("Yes" if reasoning else "Hm.</think>Yes")


def test_tools_need_a_parser(start_stub):
    server = start_stub(tool_call_parser=None)
    assert "--tool-call-parser" in error(server, tools=[TOOL])["message"]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tool_choice", "required", 'only "none" or "auto" or null is possible; a call cannot be forced yet'),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, "a call cannot be forced yet"),
        ("response_format", {"type": "json_object"}, "forced formats are not supported yet"),
        ("response_format", {"type": "json_schema", "json_schema": {}}, "forced formats are not supported yet"),
        ("frequency_penalty", 0.1, "penalties are not supported yet"),
        ("logit_bias", {"1": 1}, "only {}"),
        ("functions", [], "use tools"),
        ("modalities", ["text", "audio"], "answers are texts"),
        ("store", True, "chat completions are not stored"),
        ("service_tier", "priority", "there are no tiers"),
        ("chat_template", "{{ messages }}", "--allow-request-chat-template"),
        ("tools", [TOOL | {"type": "custom"}], "'function'"),
        ("top_logprobs", 3, "top_logprobs needs logprobs"),
        ("messages", [], "at least 1 item"),
        ("messages", "hi", "valid list"),
        ("messages", [{"role": "user"}], "content is missing"),
        ("messages", [{"role": "king", "content": "x"}], "'system', 'developer', 'user', 'assistant' or 'tool'"),
        ("messages", [{"role": "user", "content": "x", "mood": "good"}], "messages[0].mood is not supported"),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], '"image_url"'),
        ("messages", [{"role": "user", "content": "\ud800"}], "half of a character"),
        ("messages", [{"role": "tool", "content": "x"}], "needs tool_call_id"),
        ("messages", [{"role": "user", "content": "x", "tool_calls": []}], "role user has no tool_calls"),
        ("metadata", {"a": 1}, "valid string"),
        ("audio", {"voice": "x"}, "answers are texts"),
        ("max_completion_tokens", 5000, "the context holds 2,048"),
    ],
)
def test_what_cannot_be_is_refused_by_name(stub_server, field, value, words):
    refusal = error(stub_server, **{field: value})
    assert words in refusal["message"]
    assert refusal["type"] == "invalid_request_error"


def test_values_that_ask_for_nothing_are_taken(stub_server):
    neutral = {
        "frequency_penalty": 0, "logit_bias": None, "response_format": {"type": "text"}, "tool_choice": "none",
        "modalities": ["text"], "store": False, "service_tier": "auto", "verbosity": "medium", "n": 1, "tools": None,
        "user": "me", "metadata": {"a": "b"}, "prompt_cache_key": "k",
        "safety_identifier": "me", "logprobs": False, "stream_options": None, "reasoning_effort": None,
    }  # fmt: skip
    assert answer(stub_server, say("a"), **neutral)["choices"][0]["message"]["content"] == "a"


def test_an_operator_may_end_a_request(stub_server):
    """It is told as an error: the answer is not complete."""
    messages = [{"role": "user", "content": "!slow"}]
    body = {"model": "stub", "messages": messages, "stream": True}
    with httpx.stream("POST", stub_server.url + PATH, json=body) as response:
        lines = response.iter_lines()
        request_id = json.loads(next(lines).removeprefix("data: "))["id"]
        assert stub_server.run(stub_server.llm.abort(request_id))
        rest = [line for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "request_aborted"


def test_the_operators_default_ends_an_answer_without_a_limit(start_stub):
    """On each endpoint that has no limit of its own, and never beyond what fits."""
    server = start_stub(default_max_tokens=20, max_stored_responses=0)
    with httpx.Client(base_url=server.url + "/v1") as client:

        def num_tokens(path: str, key: str, **body) -> int:
            response = client.post(path, json={"model": "stub"} | body)
            assert response.status_code == 200, response.text
            return response.json()["usage"][key]

        for length, expected in ((10, 20), (2048 - 5, 5)):
            assert num_tokens("/completions", "completion_tokens", prompt="a" * length) == expected
        for length, expected in ((10, 20), (2048 - 5 - len("[user][assistant]"), 5)):
            assert num_tokens("/responses", "output_tokens", input="a" * length) == expected
            messages = [{"role": "user", "content": "a" * length}]
            assert num_tokens("/chat/completions", "completion_tokens", messages=messages) == expected
        assert num_tokens("/chat/completions", "completion_tokens", messages=messages[:1], max_tokens=3) == 3
        ask = {"messages": [{"role": "user", "content": "hi"}], "min_tokens": 30}
        assert num_tokens("/chat/completions", "completion_tokens", **ask) == 30
        assert num_tokens("/completions", "completion_tokens", prompt="a", max_tokens=40) == 40
