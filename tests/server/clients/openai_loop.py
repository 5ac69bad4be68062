"""OpenAI's client: a tool loop by chat completions and by responses, whole and streamed, written by hand."""

import json
import sys

from openai import OpenAI, pydantic_function_tool
from outcome import asked, report
from pydantic import BaseModel

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)


class Asked(BaseModel):
    city: str


def chat(streamed: bool) -> str:
    messages, tools = [{"role": "user", "content": "How warm is it?"}], [pydantic_function_tool(Asked, name="asked")]
    while True:
        if streamed:
            with client.chat.completions.stream(model="stub", messages=messages, tools=tools) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.parse(model="stub", messages=messages, tools=tools).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = asked(call.function.parsed_arguments.city)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def respond(streamed: bool) -> str:
    items = [{"role": "user", "content": "How warm is it?"}]
    tools = [{"type": "function", "strict": True, "name": "asked", "parameters": Asked.model_json_schema()}]
    while True:
        if streamed:
            with client.responses.stream(model="stub", input=items, tools=tools) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.create(model="stub", input=items, tools=tools)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items += response.output
        for call in calls:
            result = asked(json.loads(call.arguments)["city"])
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


for name, loop in (("chat completions", chat), ("responses", respond)):
    report(name, loop(streamed=False))
    report(f"{name}, streamed", loop(streamed=True))
