"""Request bodies and response readers for every API that generates, so that one test covers all APIs, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.e2e.system import System

Json = dict[str, Any]
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
EVERY = (CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES)
CHATS = (CHAT, MESSAGES, RESPONSES)  # with tools and reasoning
QUESTION = "Count from 3 to 9."
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
_STOPS = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length"}
_STATUSES = {"completed": "stop", "incomplete": "length"}


@dataclass(frozen=True)
class Answer:
    """The parts of a response that all APIs have under different names."""

    text: str
    end: str | None  # finish reason: stop, length or tool_calls; None if the API reports none
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # name and arguments of each call
    matched: Any = None  # stop token or stop string that the response reports


def body_of(path: str, prompt: str = QUESTION, model: str = "demo", most: int = 40, **sampling: Any) -> Json:
    """Returns a request.

    Args:
        most: Largest number of output tokens.
        sampling: Sampling parameters by their field names.
    """
    user = [{"role": "user", "content": prompt}]
    return {
        CHAT: {"model": model, "messages": user, "max_tokens": most, **sampling},
        COMPLETIONS: {"model": model, "prompt": prompt, "max_tokens": most, **sampling},
        GENERATE: {"text": prompt, "sampling_params": {"max_new_tokens": most, **sampling}},
        MESSAGES: {"model": model, "messages": user, "max_tokens": most, **sampling},
        RESPONSES: {"model": model, "input": prompt, "max_output_tokens": most, "store": False, **sampling},
    }[path]


def tools_of(path: str, parameters: Any, name: str = "read", strict: bool = False) -> Json:
    """Returns the body's fields that offer one function.

    Args:
        parameters: JSON schema of the parameters; `...` for a function without this field.
    """
    given = {} if parameters is ... else {"input_schema" if path == MESSAGES else "parameters": parameters}
    function = {"name": name, **({"strict": True} if strict else {}), **given}
    if path == CHAT:
        return {"tools": [{"type": "function", "function": function}]}
    return {"tools": [function if path == MESSAGES else {"type": "function", **function}]}


def forced(path: str) -> Json:
    return {"tool_choice": {"type": "any"} if path == MESSAGES else "required"}


def with_schema(body: Json, path: str, schema: Json) -> Json:
    """Returns the body with a JSON schema for the output text."""
    if path == GENERATE:
        return {**body, "sampling_params": {**body["sampling_params"], "json_schema": json.dumps(schema)}}
    field: Json = {
        CHAT: {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
        COMPLETIONS: {"guided_json": schema},
        MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        RESPONSES: {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}},
    }[path]
    return {**body, **field}


def field_of(path: str, tool: int = 0) -> str:
    """Returns the field name under which the API reports errors of a function's schema."""
    return f"tools[{tool}].{ {CHAT: 'function.parameters', MESSAGES: 'input_schema', RESPONSES: 'parameters'}[path] }"


def post(system: System, path: str, body: Json, stream: bool = False) -> httpx.Response:
    return httpx.post(f"{system.url}{path}", json={**body, "stream": stream}, timeout=60)


def ask(system: System, path: str, body: Json, stream: bool = False) -> Answer:
    response = post(system, path, body, stream)
    assert response.status_code == 200, response.text
    return read(path, response.text, stream)


def read(path: str, content: str, stream: bool) -> Answer:
    """Returns the parts of a whole response, or of all events of a stream."""
    if not stream:
        return _WHOLE[path](json.loads(content))
    lines = [line[6:] for line in content.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
    events = [json.loads(line) for line in lines]
    assert events and not [event for event in events if event.get("error") or event.get("type") == "error"], content
    return _STREAMS[path](events)


def _chat(document: Json) -> Answer:
    choice = document["choices"][0]
    message = choice["message"]
    calls = tuple((call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ())
    reasoning = message.get("reasoning_content") or ""
    return Answer(message["content"] or "", choice["finish_reason"], reasoning, calls, choice.get("stop_reason"))


def _completion(document: Json) -> Answer:
    choice = document["choices"][0]
    return Answer(choice["text"], choice["finish_reason"], matched=choice.get("stop_reason"))


def _generated(document: Json) -> Answer:
    reason = document["meta_info"]["finish_reason"]
    return Answer(document["text"], reason["type"], matched=reason.get("matched"))


def _message(document: Json) -> Answer:
    blocks = document["content"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    thinking = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    calls = tuple((block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use")
    return Answer(text, _STOPS[document["stop_reason"]], thinking, calls, document["stop_sequence"])


def _response(document: Json) -> Answer:
    items = document["output"]
    parts = [part for item in items if item["type"] == "message" for part in item["content"]]
    thoughts = [part for item in items if item["type"] == "reasoning" for part in item["content"]]
    calls = tuple((item["name"], item["arguments"]) for item in items if item["type"] == "function_call")
    end = _STATUSES[document["status"]]
    return Answer(
        "".join(part["text"] for part in parts),
        "tool_calls" if calls and end == "stop" else end,
        "".join(part["text"] for part in thoughts),
        calls,
    )


def _chat_stream(events: Sequence[Json]) -> Answer:
    choices = [choice for event in events for choice in event["choices"]]
    calls: dict[int, list[str]] = {}
    for fragment in (each for choice in choices for each in choice["delta"].get("tool_calls") or ()):
        call = calls.setdefault(fragment["index"], [fragment["function"].get("name") or "", ""])
        call[1] += fragment["function"].get("arguments") or ""
    text, reasoning = (
        "".join(choice["delta"].get(name) or "" for choice in choices) for name in ("content", "reasoning_content")
    )
    last = [choice for choice in choices if choice["finish_reason"]]
    assert len(last) == 1
    called = tuple((name, arguments) for name, arguments in calls.values())
    return Answer(text, last[0]["finish_reason"], reasoning, called, last[0].get("stop_reason"))


def _completion_stream(events: Sequence[Json]) -> Answer:
    choices = [choice for event in events for choice in event["choices"]]
    last = [choice for choice in choices if choice["finish_reason"]]
    assert len(last) == 1
    return Answer("".join(choice["text"] for choice in choices), last[0]["finish_reason"], matched=last[0].get("stop_reason"))


def _message_stream(events: Sequence[Json]) -> Answer:
    blocks: dict[int, list[str]] = {}
    for event in events:
        if event["type"] == "content_block_start":
            block = event["content_block"]
            blocks[event["index"]] = [block["type"], block.get("name", ""), ""]
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[event["index"]][2] += next((delta[n] for n in ("text", "thinking", "partial_json") if n in delta), "")
    last = [event["delta"] for event in events if event["type"] == "message_delta"]
    assert len(last) == 1 and sum(event["type"] == "content_block_stop" for event in events) == len(blocks)
    text, thinking = ("".join(block[2] for block in blocks.values() if block[0] == kind) for kind in ("text", "thinking"))
    calls = tuple((name, arguments or "{}") for kind, name, arguments in blocks.values() if kind == "tool_use")
    return Answer(text, _STOPS[last[0]["stop_reason"]], thinking, calls, last[0]["stop_sequence"])


def _response_stream(events: Sequence[Json]) -> Answer:
    """Returns the parts of the whole response in the last event. Checks that the deltas have the texts of this response."""
    whole = _response(events[-1]["response"])
    for kind, text in (
        ("output_text", whole.text),
        ("reasoning_text", whole.reasoning),
        ("function_call_arguments", "".join(arguments for _, arguments in whole.calls)),
    ):
        assert "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta") == text
    return whole


_WHOLE = {CHAT: _chat, COMPLETIONS: _completion, GENERATE: _generated, MESSAGES: _message, RESPONSES: _response}
_STREAMS = {
    CHAT: _chat_stream,
    COMPLETIONS: _completion_stream,
    GENERATE: lambda events: _generated(events[-1]),
    MESSAGES: _message_stream,
    RESPONSES: _response_stream,
}
