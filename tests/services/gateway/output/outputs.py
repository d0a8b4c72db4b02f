"""Cuts model outputs into pieces, and merges parser events so that they are equal for all cuts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rootstock_llm.services.gateway.output.formats.families import output_parser
from rootstock_llm.services.gateway.output.output_parser import (
    CallArguments,
    CallDropped,
    CallEnd,
    CallStart,
    Event,
    ParserSetup,
    Reasoning,
    Text,
)
from rootstock_llm.services.shared.output_formats import OutputFormats

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}
SEARCH: dict[str, Any] = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "more": {"type": "object", "properties": {"deep": {"type": "boolean"}, "near": {"type": ["number", "null"]}}},
    },
    "required": ["query", "tags"],
    "additionalProperties": False,
}
PING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: Mapping[str, dict[str, Any]] = {"get_weather": WEATHER, "search": SEARCH, "ping": PING}


def setup_of(max_calls: int = 100) -> ParserSetup:
    return ParserSetup(TOOLS, max_calls)


def events(formats: OutputFormats, pieces: Iterable[str], setup: ParserSetup | None = None, cut: bool = False) -> list[Event]:
    """Parses the pieces of an output. Returns the events, with adjacent text and argument fragments merged.

    Args:
        cut: Whether a token limit cut off the output.
    """
    parser = output_parser(formats, setup or setup_of())
    found = [event for piece in pieces for event in parser.feed(piece)]
    return merged([*found, *parser.finish(cut)])


def merged(found: Sequence[Event]) -> list[Event]:
    out: list[Event] = []
    for event in found:
        match (out[-1] if out else None, event):
            case (Text(before), Text(text)):
                out[-1] = Text(before + text)
            case (Reasoning(before), Reasoning(text)):
                out[-1] = Reasoning(before + text)
            case (CallArguments(index, before), CallArguments(same, text)) if index == same:
                out[-1] = CallArguments(index, before + text)
            case _:
                out.append(event)
    return out


def in_characters(text: str) -> list[str]:
    return list(text)


def at_random(text: str, chooser: random.Random) -> list[str]:
    """Cuts a text into pieces of random lengths, as long as tokens. Some pieces are empty."""
    pieces, at = [], 0
    while at < len(text):
        size = chooser.choice((0, 1, 2, 3, 5, 9, 30))
        pieces.append(text[at : at + size])
        at += size
    return pieces


def calls_of(found: Iterable[Event]) -> list[tuple[str, Any]]:
    """Returns name and parsed arguments of each complete call. Asserts the order of the events."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    whole: list[tuple[str, Any]] = []
    for event in found:
        match event:
            case CallStart(index, name):
                assert index == len(names)
                names[index], arguments[index] = name, ""
            case CallArguments(index, fragment):
                assert fragment and index == len(names) - 1 == len(whole)
                arguments[index] += fragment
            case CallEnd(index):
                assert index == len(whole)
                whole.append((names[index], json.loads(arguments[index], strict=False)))
            case CallDropped() | Text() | Reasoning():
                pass
    return whole


def text_of(found: Iterable[Event], kind: type[Text] | type[Reasoning] = Text) -> str:
    return "".join(event.text for event in found if isinstance(event, kind))
