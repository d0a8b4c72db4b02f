"""Runs Pydantic AI over chat completions, Responses and Messages."""

from anthropic import AsyncAnthropic
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from world import MODEL, QUESTIONS, URL, check, get_age, get_mayor

openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, api_key="none"))
for model in (
    OpenAIChatModel(MODEL, provider=openai),
    OpenAIResponsesModel(MODEL, provider=openai),
    AnthropicModel(MODEL, provider=anthropic),
):
    agent = Agent(model, tools=[get_mayor, get_age], model_settings={"temperature": 0})
    for question in QUESTIONS:
        check(question, agent.run_sync(question).output)
