"""Builds structural tags, for workers to enforce required calls, strict tools, and constrained text after reasoning.

services/worker/grammar/schema/structural_tag.py reads the tags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from rootstock_llm.services.gateway.output.tags.demand import ANY_OBJECT, CallDemand
from rootstock_llm.services.gateway.output.tags.harmony import harmony, harmony_answer
from rootstock_llm.services.gateway.output.tags.json_calls import deepseek_v3, deepseek_v31, hermes, llama3_json, mistral
from rootstock_llm.services.gateway.output.tags.layouts import (
    LINES,
    ORIGIN,
    Layout,
    LayoutOrigin,
    any_text,
    either,
    optional,
    regex,
    sequence,
    tag,
)
from rootstock_llm.services.gateway.output.tags.pythonic import pythonic
from rootstock_llm.services.gateway.output.tags.qwen3_coder import qwen3_coder
from rootstock_llm.services.shared.output_formats import REASONING_FORMATS, OutputFormats

_Builder = Callable[[CallDemand, Sequence[str]], Layout]
BUILDERS: Mapping[str, _Builder] = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "llama3_json": llama3_json,
    "pythonic": pythonic,
    "mistral": mistral,
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "harmony": lambda demand, _: harmony(demand),
}


class Tag(str):
    """The JSON text of a structural tag, which the gateway sends to a worker."""

    origins: Mapping[str, LayoutOrigin]  # origins of the tag's parts, by JSON pointer into the text

    def __new__(cls, text: str, origins: Mapping[str, LayoutOrigin]) -> Tag:
        tag = super().__new__(cls, text)
        tag.origins = origins
        return tag


def call_tag(formats: OutputFormats, demand: CallDemand) -> Tag | None:
    """Returns the tag for a request with tools.

    None if no call is forced and no tool is strict, because any output is then valid.

    Args:
        formats: The model's formats. They must have a format of calls.

    Raises:
        TagRefused: A strict tool has parameters that the format cannot enforce.
    """
    if not demand.forced and not any(tool.strict for tool in demand.tools):
        return None
    marks = () if formats.tools == "harmony" else REASONING_FORMATS[formats.reasoning]
    return _tag(_reasoned(formats, BUILDERS[formats.tools](demand, marks)))


def after_reasoning(formats: OutputFormats, answer: Layout) -> Tag:
    """Returns the tag for an output that is reasoning and then content that follows the layout `answer`."""
    return _tag(harmony_answer(answer) if formats.reasoning == "harmony" else _reasoned(formats, answer))


def calls_or_answer(formats: OutputFormats, demand: CallDemand, answer: Layout) -> Tag:
    """Returns the tag for an output that is reasoning, and then either calls or content that follows the layout `answer`.

    Args:
        formats: The model's formats. They must have a format of calls.
        demand: The calls, which must not be forced.

    Raises:
        TagRefused: A strict tool has parameters that the format cannot enforce.
    """
    assert not demand.forced, "calls_or_answer() is only for requests that do not force a call"
    if formats.tools == "harmony":
        return _tag(harmony(demand, answer))
    loose = tuple(tool if tool.strict else replace(tool, parameters=ANY_OBJECT) for tool in demand.tools)
    calls = BUILDERS[formats.tools](replace(demand, tools=loose, forced=True), ())
    return _tag(_reasoned(formats, either(calls, answer)))


def _reasoned(formats: OutputFormats, then: Layout) -> Layout:
    if formats.reasoning in ("", "harmony"):
        return then
    begin, end = REASONING_FORMATS[formats.reasoning]
    if formats.reasoning == "think_open":
        return sequence(tag("", any_text(), end), regex(LINES), then)
    return sequence(optional(sequence(tag(begin, any_text(), end), regex(LINES))), then)


def _tag(layout: Layout) -> Tag:
    """Returns the tag of a layout. The recursion is short, because the layouts of this package have only a few levels."""
    origins: dict[str, LayoutOrigin] = {}
    whole = {"type": "structural_tag", "format": _without_origins(layout, "#/format", origins)}
    return Tag(orjson.dumps(whole).decode(), origins)


def _without_origins(layout: Layout, path: str, origins: dict[str, LayoutOrigin]) -> dict[str, Any]:
    written: dict[str, Any] = {}
    for key, value in layout.items():
        if key == ORIGIN:
            origins[path] = value
        elif key in ("elements", "tags"):
            written[key] = [_without_origins(part, f"{path}/{key}/{at}", origins) for at, part in enumerate(value)]
        elif key == "content":
            written[key] = _without_origins(value, f"{path}/{key}", origins)
        else:
            written[key] = value
    return written
