"""Agents with the official Python clients: two tool calls in sequence, and a final answer with the second result."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.system import System

TOWNS = {"get_mayor": {"Lima": "Ada", "Oslo": "Hugo"}, "get_age": {"Ada": "52", "Hugo": "37"}}
DESCRIBED = (("get_mayor", "Get the mayor of a city.", "city"), ("get_age", "Get the age of a person.", "person"))
CASES = {
    "What is the age of the mayor of Lima?": (["get_mayor", "get_age"], "52"),
    "What is the age of the mayor of Oslo?": (["get_mayor", "get_age"], "37"),
    "What is 17 + 25?": ([], "17 + 25 = 42"),
}
MOST_TURNS = 5
Loop = Callable[[System, str], tuple[list[str], str]]


def schema(parameter: str) -> dict[str, Any]:
    return {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}


def result(name: str, arguments: dict[str, str]) -> str:
    (value,) = arguments.values()
    return TOWNS[name][value]


def over_chat(system: System, question: str) -> tuple[list[str], str]:
    client = openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0)
    functions = [{"name": name, "description": text, "parameters": schema(parameter)} for name, text, parameter in DESCRIBED]
    tools: Any = [{"type": "function", "function": function} for function in functions]
    messages: list[Any] = [{"role": "user", "content": question}]
    made = []
    for _ in range(MOST_TURNS):
        answer = client.chat.completions.create(model="demo", messages=messages, tools=tools, temperature=0)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            assert answer.choices[0].finish_reason == "stop"
            return made, message.content or ""
        assert answer.choices[0].finish_reason == "tool_calls"
        for call in message.tool_calls:
            assert call.type == "function"
            made.append(call.function.name)
            output = result(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    raise AssertionError(f"the agent has no final answer after {MOST_TURNS} requests")


def over_responses(system: System, question: str) -> tuple[list[str], str]:
    """Runs an agent over /v1/responses. Responses are not stored, so each request has the whole conversation."""
    client = openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0)
    tools: Any = [
        {"type": "function", "name": name, "description": text, "parameters": schema(parameter), "strict": False}
        for name, text, parameter in DESCRIBED
    ]
    items: list[Any] = [{"role": "user", "content": question}]
    made = []
    for _ in range(MOST_TURNS):
        with client.responses.stream(model="demo", input=items, tools=tools, temperature=0, store=False) as stream:
            answer = stream.until_done().get_final_response()
        items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return made, answer.output_text
        for call in calls:
            made.append(call.name)
            output = result(call.name, json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    raise AssertionError(f"the agent has no final answer after {MOST_TURNS} requests")


def over_messages(system: System, question: str) -> tuple[list[str], str]:
    client = anthropic.Anthropic(base_url=system.url, api_key="none", max_retries=0)
    tools: Any = [{"name": name, "description": text, "input_schema": schema(parameter)} for name, text, parameter in DESCRIBED]
    messages: list[Any] = [{"role": "user", "content": question}]
    made = []
    for _ in range(MOST_TURNS):
        asked: Any = {"model": "demo", "max_tokens": 300, "messages": messages, "tools": tools}
        with client.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
            answer = stream.get_final_message()
        messages.append({"role": "assistant", "content": answer.content})
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            assert answer.stop_reason == "end_turn"
            return made, "".join(block.text for block in answer.content if block.type == "text")
        assert answer.stop_reason == "tool_use"
        made += [call.name for call in calls]
        output = [{"type": "tool_result", "tool_use_id": call.id, "content": result(call.name, call.input)} for call in calls]  # type: ignore[arg-type]
        messages.append({"role": "user", "content": output})
    raise AssertionError(f"the agent has no final answer after {MOST_TURNS} requests")


@pytest.mark.parametrize("loop", [over_chat, over_responses, over_messages])
def test_agent_calls_two_tools_in_sequence(system: System, loop: Loop) -> None:
    for question, (names, part) in CASES.items():
        made, answer = loop(system, question)
        assert made == names, (question, made, answer)
        assert part in answer, (question, answer)
