"""Pydantic AI: a tool loop by chat completions, responses and messages, whole and streamed."""

import asyncio
import sys

from outcome import asked, report
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


async def main(url: str) -> None:
    openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    anthropic = AnthropicProvider(base_url=url, api_key="none")
    for model in (
        OpenAIChatModel("stub", provider=openai),
        OpenAIResponsesModel("stub", provider=openai),
        AnthropicModel("stub", provider=anthropic),
    ):
        agent = Agent(model, instructions="Be brief.", tools=[asked])
        result = await agent.run("How warm is it?")
        report(type(model).__name__, result.output)
        async with agent.run_stream("How warm is it?") as stream:
            report(f"{type(model).__name__}, streamed", await stream.get_output())


asyncio.run(main(sys.argv[1]))
