"""Compares the responses of two servers to one request.

A stream's events are assembled before the comparison, because servers cut a stream at random points. Fields with random ids or
times are not compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

# Names of fields with random ids, times, or sequence numbers of stream events.
RANDOM = frozenset(
    (
        *("id", "item_id", "call_id", "response_id", "request_id", "sequence_number"),
        *("created", "created_at", "completed_at", "e2e_latency", "queue_time"),
    )
)
# Names of fields with a number of cached tokens. This number depends on the other requests, which fill the prefix cache too.
CACHED = frozenset(("cached_tokens", "cached_tokens_details", "cache_read_input_tokens", "cache_creation_input_tokens"))
# Names of fields whose texts are appended when two pieces of a value are joined.
JOINED = frozenset(("content", "reasoning_content", "text", "arguments", "delta", "partial_json", "thinking", "refusal", "name"))
DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    media_type: str
    body: Any  # parsed JSON; a list of assembled events if the response was a stream


@dataclass(frozen=True, slots=True)
class Difference:
    path: str  # names and indices that lead to the value, such as choices.0.text
    old: Any
    new: Any


class Missing:
    """Replaces a value that one of the two responses does not have."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()


def read_answer(status: int, media_type: str, content: bytes) -> Answer:
    """Parses the body of a whole or a streamed response. Raises ValueError if the body is not JSON."""
    kind = media_type.partition(";")[0]
    if kind == "text/event-stream":
        return Answer(status, kind, assembled(list(_events(content.decode()))))
    return Answer(status, kind, json.loads(content) if content else None)


def differences(old: Answer, new: Answer, compare_cached: bool = True) -> list[Difference]:
    """Compares two responses to one request that was served.

    Args:
        compare_cached: Whether numbers of cached tokens must be equal. These numbers depend on the timing of concurrent requests.
    """
    found = [Difference(name, getattr(old, name), getattr(new, name)) for name in ("status", "media_type")]
    found = [each for each in found if each.old != each.new]
    left_out = RANDOM if compare_cached else RANDOM | CACHED
    forms = [body if compare_cached else _without_cached(body) for body in (old.body, new.body)]
    return [*found, *_compare(forms[0], forms[1], "", left_out)]


def refusal_differences(old: Answer, new: Answer) -> list[Difference]:
    """Compares two responses to one request that must be refused. Message texts may differ."""
    if old.status < 400 or new.status < 400:
        return [Difference("status", old.status, new.status)]
    return differences(_without_message(old), _without_message(new))


def _events(text: str) -> Iterator[Any]:
    """Yields the data of each event except comments and pings."""
    for line in text.splitlines():
        if line.startswith("data:"):
            data = line.removeprefix("data:").strip()
            event = data if data == DONE else json.loads(data)
            if not isinstance(event, dict) or event.get("type") != "ping":
                yield event


def assembled(events: list[Any]) -> list[Any]:
    """Returns the events of a stream in a form that does not depend on where the stream is cut.

    1. Chunks with the same choice index become one choice.
    2. Consecutive deltas of one content part become one delta.
    3. SGLang's events are cumulative, so only the last event of each index remains.
    """
    joined: list[Any] = []
    by_index: dict[tuple[str, int], Json] = {}
    for event in events:
        if not isinstance(event, dict) or not ({"choices", "meta_info", "type"} & event.keys()):
            joined.append(event)
        elif "choices" in event:
            _add_choices(event, by_index)
        elif "meta_info" in event:
            by_index["output", event.get("index", 0)] = event
        elif joined and _continues(joined[-1], event):
            joined[-1] = merged(joined[-1], event)
        else:
            joined.append(event)
    return [*(by_index[place] for place in sorted(by_index)), *joined]


def _add_choices(event: Json, by_index: dict[tuple[str, int], Json]) -> None:
    for choice in event["choices"]:
        place = ("choice", choice["index"])
        by_index[place] = merged(by_index.get(place, {}), choice)
    rest = {name: value for name, value in event.items() if name != "choices"}
    by_index["stream", 0] = merged(
        by_index.get(("stream", 0), {}), {name: value for name, value in rest.items() if value is not None}
    )


def _continues(before: Any, event: Json) -> bool:
    """Returns whether both events are deltas of the same content part."""
    if not isinstance(before, dict) or "delta" not in event or not str(event.get("type")).endswith("delta"):
        return False
    if event["type"] == "message_delta":
        return False
    part = ("type", "index", "output_index", "content_index", "summary_index")
    kinds = [each["delta"].get("type") if isinstance(each.get("delta"), dict) else None for each in (before, event)]
    return all(before.get(name) == event.get(name) for name in part) and kinds[0] == kinds[1]


def merged(before: Any, after: Any, name: str = "") -> Any:
    """Joins two pieces of one value.

    Objects are joined by member name, and tool calls by index. Lists, and texts of the fields in JOINED, are appended. Other
    values are replaced by the later piece.

    Args:
        name: Name of the value's field.
    """
    if before is None or after is None:
        return after if before is None else before
    if isinstance(before, dict) and isinstance(after, dict):
        return {key: merged(before.get(key), after.get(key), key) for key in (before | after)}
    if name == "tool_calls":
        calls = {call["index"]: call for call in before}
        for call in after:
            calls[call["index"]] = merged(calls.get(call["index"]), call)
        return [calls[index] for index in sorted(calls)]
    if isinstance(before, list) and isinstance(after, list):
        return before + after
    return before + after if name in JOINED and isinstance(before, str) else after


def _without_message(answer: Answer) -> Answer:
    """Returns the refusal without its error message. If the refusal is a stream, its first event has the error."""
    body = answer.body[0] if isinstance(answer.body, list) and answer.body else answer.body
    error = body.get("error") if isinstance(body, dict) else body
    kept = {name: value for name, value in error.items() if name != "message"} if isinstance(error, dict) else error
    return Answer(answer.status, answer.media_type, kept)


def _without_cached(value: Any) -> Any:
    """Removes the numbers of cached tokens.

    Anthropic's input_tokens exclude cached tokens. The function therefore adds the cached tokens to input_tokens.
    """
    if isinstance(value, list):
        return [_without_cached(each) for each in value]
    if not isinstance(value, dict):
        return value
    form = {name: _without_cached(each) for name, each in value.items()}
    if "cache_read_input_tokens" in form and "input_tokens" in form:
        form["input_tokens"] += form["cache_read_input_tokens"] + form.get("cache_creation_input_tokens", 0)
    return form


def _compare(old: Any, new: Any, path: str, left_out: Iterable[str]) -> Iterator[Difference]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            if name not in left_out:
                yield from _compare(old.get(name, MISSING), new.get(name, MISSING), _join(path, name), left_out)
    elif isinstance(old, list) and isinstance(new, list):
        for index in range(max(len(old), len(new))):
            values = [each[index] if index < len(each) else MISSING for each in (old, new)]
            yield from _compare(values[0], values[1], _join(path, str(index)), left_out)
    elif type(old) is not type(new) or old != new:
        yield Difference(path, old, new)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
