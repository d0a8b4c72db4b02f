"""Runs OpenAI's Agents SDK over Responses and chat completions, streamed and whole."""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from world import MODEL, QUESTIONS, URL, check, get_age, get_mayor


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    tools = [function_tool(get_mayor), function_tool(get_age)]
    for model in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        agent = Agent(name="guide", tools=tools, model=model(MODEL, client), model_settings=ModelSettings(temperature=0))
        for question in QUESTIONS:
            check(question, (await Runner.run(agent, question)).final_output)
            streamed = Runner.run_streamed(agent, question)
            async for _ in streamed.stream_events():
                pass
            check(question, streamed.final_output)


asyncio.run(main())
