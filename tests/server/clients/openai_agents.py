"""OpenAI's Agents SDK: a tool loop by chat completions and by responses, whole and streamed."""

import asyncio
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from outcome import asked, report

weather = function_tool(asked)


async def main(url: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        agent = Agent(
            name="assistant",
            instructions="Be brief.",
            tools=[weather],
            model=kind(model="stub", openai_client=client),
        )
        result = await Runner.run(agent, "How warm is it?")
        report(kind.__name__, result.final_output)
        stream = Runner.run_streamed(agent, "How warm is it?")
        async for _ in stream.stream_events():
            pass
        report(f"{kind.__name__}, streamed", stream.final_output)


asyncio.run(main(sys.argv[1]))
