"""What a chat's choice has said, as OpenAI's message: text, reasoning, calls; whole, or as the deltas of a stream."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from services.gateway.api.choice_events import ChoiceEvents
from services.gateway.parsers.events import CallArguments, CallStart, Event, Reasoning, Text
from services.gateway.parsers.output_parser import Parsing
from services.gateway.request.request import Delta

Json = dict[str, Any]


class ReadChoice:
    """One choice's output as it comes. called: it has made a call, so that its end is no stop."""

    def __init__(self, parsing: Parsing | None) -> None:
        self._events = ChoiceEvents(parsing)
        self.called = False

    def read(self, delta: Delta) -> list[Json]:
        """The deltas that it makes, perhaps none."""
        return list(self._deltas(self._events.of(delta)))

    def finish_reason(self, delta: Delta) -> str:
        assert delta.ending is not None
        reason = delta.ending.finish_reason
        return "tool_calls" if self.called and reason == "stop" else reason

    def _deltas(self, events: Iterable[Event]) -> Iterable[Json]:
        for event in events:
            if isinstance(event, Text):
                yield {"content": event.text}
            elif isinstance(event, Reasoning):
                yield {"reasoning_content": event.text, "reasoning": event.text}
            elif isinstance(event, CallStart):
                self.called = True
                function = {"name": event.name, "arguments": ""}
                yield _call({"index": event.index, "id": _call_id(), "type": "function", "function": function})
            elif isinstance(event, CallArguments):
                yield _call({"index": event.index, "function": {"arguments": event.fragment}})


def message_of(deltas: Iterable[Json]) -> Json:
    """The whole message. Without text its content is null where there are calls, else empty."""
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
