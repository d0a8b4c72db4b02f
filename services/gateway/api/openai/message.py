"""Renders the output of a chat's choice as OpenAI's message: whole, or as the deltas of a stream."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from services.gateway.parsers.events import CallArguments, CallStart, Event, Reasoning, Text
from services.gateway.request.choice import ChoiceReader, Delta

Json = dict[str, Any]


def message_deltas(events: Iterable[Event]) -> Iterable[Json]:
    """Yields the deltas of a message for the events of a choice."""
    for event in events:
        if isinstance(event, Text):
            yield {"content": event.text}
        elif isinstance(event, Reasoning):
            yield {"reasoning_content": event.text, "reasoning": event.text}
        elif isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            yield _call({"index": event.index, "id": _call_id(), "type": "function", "function": function})
        elif isinstance(event, CallArguments):
            yield _call({"index": event.index, "function": {"arguments": event.fragment}})


def finish_reason(reader: ChoiceReader, delta: Delta) -> str:
    """Returns the finish reason of a choice whose last delta the reader has read: "tool_calls" if it stopped after a call."""
    assert delta.ending is not None
    reason = delta.ending.finish_reason
    return "tool_calls" if reader.called and reason == "stop" else reason


def message_of(deltas: Iterable[Json]) -> Json:
    """Returns the whole message. Without text, its content is null if it has calls, else empty."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[tuple[Json, list[str]]] = []
    for delta in deltas:
        texts.append(delta.get("content", ""))
        thoughts.append(delta.get("reasoning_content", ""))
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append((call, []))
            else:
                calls[call["index"]][1].append(call["function"]["arguments"])
    message: Json = {"role": "assistant", "content": "".join(texts) or (None if calls else ""), "refusal": None}
    if any(thoughts):
        message["reasoning_content"] = message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = [_whole(call, fragments) for call, fragments in calls]
    return message


def _whole(call: Json, fragments: list[str]) -> Json:
    function = {"name": call["function"]["name"], "arguments": "".join(fragments)}
    return {"id": call["id"], "type": call["type"], "function": function}


def _call(call: Json) -> Json:
    return {"tool_calls": [call]}


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
