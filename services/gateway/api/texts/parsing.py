"""Finds the tool calls or the reasoning in a model's output that a client sends as text. Raises ApiError."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rootstock_llm.services.gateway.generation.errors import ApiError, bad_request
from rootstock_llm.services.gateway.output.output_parser import (
    CallArguments,
    CallStart,
    Event,
    MakeParser,
    ParserSetup,
    Reasoning,
    Schema,
    Text,
)
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.output_formats import NONE, REASONING_FORMATS, TOOL_FORMATS, OutputFormats

PIECE_CHARS = 1024  # characters that are parsed at once; other tasks of the event loop run after each piece
# This server's names of formats, by SGLang's names that differ from them.
_TOOLS = {
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "gpt-oss": "harmony",
    "llama3": "llama3_json",
    "qwen": "hermes",
    "qwen25": "hermes",
}
_REASONING = {
    "deepseek-r1": "think_open",
    "deepseek-v3": "think",
    "glm45": "think",
    "gpt-oss": "harmony",
    "mistral": "mistral_think",
    "qwen3": "think",
    "qwen3-thinking": "think_open",
}


async def calls_in(text: str, tools: Mapping[str, Schema | None], parser: str, make: MakeParser) -> dict[str, Any]:
    """Returns the calls in an output, and the text around them.

    Args:
        tools: JSON schema of the parameters by tool name; None for a tool without a schema.
        parser: Name of the format of the calls, either this server's or SGLang's.
    """
    name = _format(_TOOLS.get(parser, parser), TOOL_FORMATS, "tool_call_parser")
    formats = OutputFormats(name, "harmony" if name == "harmony" else NONE)
    events = await _events(text, formats, ParserSetup(tools, limits.MAX_CALLS), make)
    order = list(tools)
    calls: list[tuple[str, list[str]]] = []  # by the index of a call: its name and the pieces of its arguments
    for event in events:
        if isinstance(event, CallStart):
            calls.append((event.name, []))
        elif isinstance(event, CallArguments):
            calls[event.index][1].append(event.fragment)
    found = [{"tool_index": order.index(called), "name": called, "parameters": "".join(pieces)} for called, pieces in calls]
    return {"normal_text": _texts(events), "calls": found}


async def reasoning_in(text: str, parser: str, make: MakeParser) -> dict[str, Any]:
    """Returns the reasoning in an output, and the other text. `parser` is this server's or SGLang's name of the format."""
    name = _format(_REASONING.get(parser, parser), REASONING_FORMATS, "reasoning_parser")
    formats = OutputFormats("harmony" if name == "harmony" else NONE, name)
    events = await _events(text, formats, ParserSetup({}, 0), make)
    thoughts = "".join(event.text for event in events if isinstance(event, Reasoning))
    return {"reasoning_text": thoughts, "text": _texts(events)}


async def _events(text: str, formats: OutputFormats, setup: ParserSetup, make: MakeParser) -> list[Event]:
    parser, events = make(formats, setup), list[Event]()
    for at in range(0, len(text), PIECE_CHARS):
        events += parser.feed(text[at : at + PIECE_CHARS])
        await asyncio.sleep(0)
    return [*events, *parser.finish()]


def _texts(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def _format(name: str, known: Any, field: str) -> str:
    if name == NONE or name not in known:
        raise _unknown(field, [each for each in known if each])
    return name


def _unknown(field: str, names: list[str]) -> ApiError:
    return bad_request(field, f"'{field}' must be one of {', '.join(names)}, or SGLang's name for one of these formats.")
