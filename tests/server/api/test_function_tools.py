"""Tools as the clients' helpers describe them, at every endpoint that takes some."""

import anthropic
import openai
import pytest
from pydantic import BaseModel
from tiny_tokenizer import TINY_CHAT_TEMPLATE

from jaxllm.server.api.protocol import function_tool


class Weather(BaseModel):
    """Tells the weather."""

    city: str


CALL = '!say:<tool_call>{"name": "Weather", "arguments": {"city": "Bern"}}</tool_call>'


@pytest.fixture
def client(stub_server):
    with openai.OpenAI(base_url=f"{stub_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(stub_server):
    with anthropic.Anthropic(base_url=stub_server.url, api_key="none", max_retries=0) as client:
        yield client


def test_strict_tools_of_the_clients_own_helpers_are_taken(client, claude, caplog):
    """The log says once that they are not enforced, and the model reads the same at every endpoint."""
    function_tool._tell_that_strict_is_not_enforced.cache_clear()
    tool = openai.pydantic_function_tool(Weather)
    assert tool["function"]["strict"] is True
    messages = [{"role": "user", "content": CALL}]
    chat = client.chat.completions.create(model="stub", messages=messages, tools=[tool])
    assert chat.choices[0].message.tool_calls[0].function.arguments == '{"city": "Bern"}'
    parsed = client.chat.completions.parse(model="stub", messages=messages, tools=[tool])
    assert parsed.choices[0].message.tool_calls[0].function.parsed_arguments == Weather(city="Bern")

    flat = {"type": "function"} | tool["function"]
    response = client.responses.create(model="stub", input=CALL, tools=[flat])
    assert response.output[0].arguments == '{"city": "Bern"}'
    assert response.tools[0].strict is False, "what comes back says what is done"

    given = {"name": flat["name"], "description": flat["description"], "input_schema": flat["parameters"]}
    strict = given | {"strict": True}
    message = claude.messages.create(model="stub", max_tokens=100, messages=messages, tools=[strict])
    assert message.content[0].input == {"city": "Bern"}
    counts = [
        chat.usage.prompt_tokens,
        response.usage.input_tokens,
        claude.messages.count_tokens(model="stub", messages=messages, tools=[strict]).input_tokens,
        client.responses.input_tokens.count(model="stub", input=CALL, tools=[flat | {"strict": False}]).input_tokens,
    ]
    assert len(set(counts)) == 1
    assert caplog.text.count("not enforced") == 1


def test_a_tool_without_description_or_parameters_reads_alike(client, claude):
    messages = [{"role": "user", "content": "x"}]
    function = {"name": "now", "parameters": {"type": "object"}}
    counts = {
        client.chat.completions.create(
            model="stub", max_tokens=1, messages=messages, tools=[{"type": "function", "function": function}]
        ).usage.prompt_tokens,
        client.responses.input_tokens.count(input="x", tools=[{"type": "function"} | function]).input_tokens,
        claude.messages.count_tokens(
            model="stub", messages=messages, tools=[{"name": "now", "input_schema": function["parameters"]}]
        ).input_tokens,
    }
    assert len(counts) == 1


@pytest.mark.parametrize(
    ("template", "options", "why"),
    [
        (TINY_CHAT_TEMPLATE, {}, "this model's chat template has no place for tools"),
        ("{{ tools }}{{ messages }}", {}, "none of the known formats (hermes, llama3_json, mistral)"),
        ("{{ tools }}{{ messages }}<tool_call>", {"tool_call_parser": "none"}, "--tool-call-parser none"),
    ],
)
def test_why_tools_are_refused_is_told_at_every_endpoint(start_stub, tmp_path, template, options, why):
    file = tmp_path / "template.jinja"
    file.write_text(template)
    server = start_stub(chat_template=str(file), **options)
    tool = {"name": "now", "parameters": {"type": "object"}}
    messages = [{"role": "user", "content": "x"}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as chat:
            client.chat.completions.create(
                model="stub", messages=messages, tools=[{"type": "function", "function": tool}]
            )
        with pytest.raises(openai.BadRequestError) as response:
            client.responses.create(model="stub", input="x", tools=[{"type": "function"} | tool])
        with pytest.raises(openai.BadRequestError) as count:
            client.responses.input_tokens.count(model="stub", input="x", tools=[{"type": "function"} | tool])
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        tools = [{"name": "now", "input_schema": {"type": "object"}}]
        with pytest.raises(anthropic.BadRequestError) as message:
            claude.messages.create(model="stub", max_tokens=1, messages=messages, tools=tools)
    for caught in (chat, response, count, message):
        assert why in str(caught.value)
