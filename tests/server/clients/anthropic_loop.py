"""Anthropic's client and its `tool_runner`: a tool loop by messages, whole and streamed."""

import sys

from anthropic import Anthropic, beta_tool
from outcome import asked, report

client = Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
question = {"role": "user", "content": "How warm is it?"}


def text_of(message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def by_hand() -> str:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    messages, tools = [question], [{"name": "asked", "input_schema": schema}]
    while True:
        with client.messages.stream(model="stub", max_tokens=500, messages=messages, tools=tools) as stream:
            message = stream.get_final_message()
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            return text_of(message)
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": asked(**block.input)}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


report("by hand, streamed", by_hand())
options = {"model": "stub", "max_tokens": 500, "messages": [question], "tools": [beta_tool(asked)]}
report("tool_runner", text_of(client.beta.messages.tool_runner(**options).until_done()))
runner = client.beta.messages.tool_runner(**options, stream=True)
report("tool_runner, streamed", [text_of(stream.get_final_message()) for stream in runner][-1])
