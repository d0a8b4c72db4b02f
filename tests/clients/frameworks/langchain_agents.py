"""Runs LangChain's agents on LangGraph over chat completions, Responses and Messages."""

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from world import MODEL, QUESTIONS, URL, check, get_age, get_mayor

for model in (
    ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", temperature=0),
    ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", temperature=0, use_responses_api=True),
    ChatAnthropic(model=MODEL, base_url=URL, api_key="none", temperature=0),
):
    agent = create_agent(model, tools=[get_mayor, get_age])
    for question in QUESTIONS:
        answer = agent.invoke({"messages": [{"role": "user", "content": question}]})["messages"][-1]
        check(question, answer.text)
