"""LangChain: a tool loop by chat completions, responses and messages, whole and streamed."""

import sys

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from outcome import asked, report

url = sys.argv[1]
models = {
    "ChatOpenAI": ChatOpenAI(model="stub", base_url=f"{url}/v1", api_key="none", max_retries=0),
    "ChatOpenAI, responses": ChatOpenAI(
        model="stub", base_url=f"{url}/v1", api_key="none", max_retries=0, use_responses_api=True
    ),
    "ChatAnthropic": ChatAnthropic(model="stub", base_url=url, api_key="none", max_retries=0, max_tokens=500),
}
for name, model in models.items():
    agent = create_agent(model, [asked], system_prompt="Be brief.")
    question = {"messages": [("user", "How warm is it?")]}
    report(name, agent.invoke(question)["messages"][-1].text)
    pieces = [
        message.text
        for message, metadata in agent.stream(question, stream_mode="messages")
        if metadata["langgraph_node"] == "model"
    ]
    report(f"{name}, streamed", "".join(pieces))
