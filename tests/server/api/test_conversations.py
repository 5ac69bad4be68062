"""Odd conversations become the same tokens at every door, and what the server has said can be sent back to it."""

from types import SimpleNamespace

import anthropic
import httpx
import openai
import pytest
from transformers import AutoTokenizer

from jaxllm import LLM, ControlTokens, Conversation, InvalidRequestError

USER = {"role": "user", "content": "hi"}
CUT_OFF = '{"a":"hello'


def call(arguments, id_: str = "call_1") -> dict:
    return {"id": id_, "type": "function", "function": {"name": "f", "arguments": arguments}}


def asks(*calls, **fields) -> dict:
    return {"role": "assistant", "tool_calls": list(calls), **fields}


RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
CONVERSATIONS = {
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    "null content": [USER, asks(call('{"x": 1}'), content=None), RESULT],
    "no content": [USER, asks(call('{"x": 1}')), RESULT],
    "an empty answer": [USER, {"role": "assistant", "content": None, "refusal": None, "annotations": []}, USER],
    "arguments cut off": [USER, asks(call(CUT_OFF), content=""), RESULT],
    "arguments that are a list": [USER, asks(call("[1]"), content=""), RESULT],
    "no arguments": [USER, asks(call(""), content=""), RESULT],
    "two calls, one answered": [USER, asks(call("{}"), call("{}", "call_2")), RESULT],
    "names": [USER | {"name": "ann"}, asks(call("{}")), RESULT | {"name": "f"}],
    "developer": [{"role": "developer", "content": "be brief"}, USER],
    "reasoning": [USER, {"role": "assistant", "content": "x", "reasoning_content": "hm"}, USER],
}
CONVERSATIONS["reasoning, as vLLM calls it"] = [USER, {"role": "assistant", "content": "x", "reasoning": "hm"}, USER]
REFUSED = {
    "a result without a call": ([USER, RESULT], "there is no call 'call_1'"),
    "a result before its call": ([RESULT, asks(call("{}"))], "there is no call 'call_1'"),
    "a result of nothing": ([USER, {"role": "tool", "content": "x"}], "needs tool_call_id"),
    "no content": ([{"role": "user"}], "content is missing"),
    "two reasonings": ([asks(call("{}"), reasoning="a", reasoning_content="b")], "two names of one thing"),
    "a picture": ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "part 0"),
}


@pytest.fixture(scope="module")
def llm(stub_folder) -> LLM:
    """As far as templates need it."""
    tokenizer = AutoTokenizer.from_pretrained(stub_folder)
    llm = object.__new__(LLM)
    llm.engine, llm._control_tokens = SimpleNamespace(tokenizer=tokenizer), ControlTokens(tokenizer)
    return llm


@pytest.fixture
def client(stub_server):
    with openai.OpenAI(base_url=f"{stub_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def as_items(messages: list[dict]) -> list[dict]:
    """The same in the form of /v1/responses."""
    items: list[dict] = []
    for message in messages:
        if message["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": "call_1", "output": message["content"]})
            continue
        if reasoning := message.get("reasoning_content") or message.get("reasoning"):
            content = [{"type": "reasoning_text", "text": reasoning}]
            items.append({"type": "reasoning", "summary": [], "content": content})
        content = message.get("content")
        if isinstance(content, list):
            content = [{"type": "input_text", "text": part["text"]} for part in content]
        if content or not message.get("tool_calls"):
            items.append({"role": message["role"], "content": content or ""})
        for called in message.get("tool_calls") or ():
            items.append({"type": "function_call", "call_id": called["id"]} | called["function"])
    return items


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_is_the_same_tokens_at_every_door(stub_server, client, llm, name):
    messages = CONVERSATIONS[name]
    answer = httpx.post(f"{stub_server.url}/tokenize", json={"messages": messages})
    assert answer.status_code == 200, answer.text
    token_ids = answer.json()["tokens"]
    text, ours = llm._render(messages, "the conversation")
    assert ours == token_ids
    chat = client.chat.completions.create(model="stub", messages=messages, max_tokens=len(token_ids))
    assert chat.choices[0].message.content == text, "the stub repeats its prompt"
    count = client.responses.input_tokens.count(input=as_items(messages))
    assert count.input_tokens == len(token_ids)
    if "cut off" in name:
        assert r'{"INVALID_JSON": "{\"a\":\"hello"}' in text


def test_anthropics_door_gives_the_same_tokens(stub_server):
    """The conversations that can be written in its form."""
    messages = CONVERSATIONS["arguments cut off"]
    tokens = httpx.post(f"{stub_server.url}/tokenize", json={"messages": messages}).json()["count"]
    use = {"type": "tool_use", "id": "call_1", "name": "f", "input": {"INVALID_JSON": CUT_OFF}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "rain"}
    body = {
        "model": "stub",
        "messages": [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}],
    }
    count = httpx.post(f"{stub_server.url}/v1/messages/count_tokens", json=body)
    assert count.json() == {"input_tokens": tokens}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_conversation_is_refused_at_every_door(stub_server, llm, name):
    messages, words = REFUSED[name]
    for path in ("/tokenize", "/v1/chat/completions"):
        answer = httpx.post(stub_server.url + path, json={"model": "stub", "messages": messages})
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"].startswith("messages[")
    with pytest.raises(InvalidRequestError, match=words):
        llm._render(messages, "the conversation")


CALLS = [
    '<tool_call>{"name": "f", "arguments": {"city": "Bern"}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a":"hello',
]
TOOL: dict = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("said", ["text", *CALLS])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_official_client_can_send_back_what_it_got(client, said, stream):
    """With all that the client's own classes add to it."""
    messages: list = [{"role": "user", "content": f"!say:{said}"}]
    options = {"model": "stub", "messages": messages, "tools": [TOOL]}
    if stream:
        with client.chat.completions.stream(**options) as events:
            for _ in events:
                pass
            message = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**options).choices[0].message
    results = [{"role": "tool", "tool_call_id": c.id, "content": "x"} for c in message.tool_calls or ()]
    again = [*messages, message.model_dump(), *results, USER]
    assert client.chat.completions.create(model="stub", messages=again, max_tokens=1).choices

    tool = {"type": "function"} | TOOL["function"]
    response = client.responses.create(model="stub", input=f"!say:{said}", tools=[tool])
    items = [item.model_dump() for item in response.output]
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "x"}
        for item in items
        if item["type"] == "function_call"
    ]
    assert client.responses.create(model="stub", input=[*items, *outputs, USER], max_output_tokens=1).output


@pytest.mark.parametrize("said", ["text", *CALLS])
def test_anthropics_client_can_send_back_what_it_got(stub_server, said):
    with anthropic.Anthropic(base_url=stub_server.url, api_key="none", max_retries=0) as claude:
        tools = [{"name": "f", "input_schema": {"type": "object"}}]
        messages: list = [{"role": "user", "content": f"!say:{said}"}]
        answer = claude.messages.create(model="stub", max_tokens=len(said), messages=messages, tools=tools)
        content = [block.model_dump() for block in answer.content]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "x"}
            for block in content
            if block["type"] == "tool_use"
        ]
        again = [*messages, {"role": "assistant", "content": content}, {"role": "user", "content": results or "y"}]
        assert claude.messages.create(model="stub", max_tokens=1, messages=again).usage


def test_reasoning_is_one_thing_under_both_of_its_names():
    turns = []
    for names in (["reasoning"], ["reasoning_content"], ["reasoning", "reasoning_content"]):
        conversation = Conversation()
        conversation.add({"role": "assistant", "content": "x"} | dict.fromkeys(names, "hm"))
        turns.append(conversation.messages)
    assert turns == [[{"role": "assistant", "content": "x", "reasoning_content": "hm"}]] * 3
