"""Builds the layout of Qwen3-Coder's calls, which write each parameter between its own marks and strings without quotes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from services.gateway.parsers.parameter_types import ANY, schema_types
from services.gateway.parsers.tags.alternatives import Alternative, alternatives
from services.gateway.parsers.tags.demand import CallDemand, TagRefused, ToolSpec
from services.gateway.parsers.tags.layouts import (
    Layout,
    any_text,
    calls,
    const,
    either,
    optional,
    regex,
    schema,
    sequence,
    star,
    tag,
    within_text,
)
from services.gateway.parsers.tags.parameter_list import Parameter, parameters

_BEGIN, _END = "<tool_call>\n<function=", "</function>\n</tool_call>"
_VALUE_END = "</parameter>"


def qwen3_coder(demand: CallDemand, excludes: Sequence[str]) -> Layout:
    tags = [tag(f"{_BEGIN}{tool.name}>\n", _parameters(demand, tool), _END) for tool in demand.tools]
    if demand.forced:
        return calls(tags, "\n", demand.parallel)
    return within_text([_BEGIN], tags, excludes, demand.parallel)


def _parameters(demand: CallDemand, tool: ToolSpec) -> Layout:
    listed = parameters(demand, tool)
    if listed is None:
        any_of_them = sequence(regex(r"[A-Za-z_][\w.\-]{0,63}"), const(">\n"), any_text())
        return star(_parameter("<parameter=", any_of_them))
    parts = [_parameter(f"<parameter={each.name}>\n", _value(demand, each, tool)) for each in listed]
    shown = [part if each.required else optional(part) for each, part in zip(listed, parts, strict=True)]
    return sequence(const(""), *shown)


def _parameter(begin: str, value: Layout) -> Layout:
    """Returns the layout of a parameter. Its value cannot contain the end mark. The model writes a line end before that mark."""
    return sequence(tag(begin, value, _VALUE_END), const("\n"))


def _value(demand: CallDemand, parameter: Parameter, tool: ToolSpec) -> Layout:
    """Returns the layout of a value. Raises TagRefused for a strict string whose limits cannot be enforced without quotes."""
    found = parameter.schema
    if isinstance(found, bool):
        return any_text()
    ways = alternatives(found)
    if all(way.values for way in ways) and not (tool.strict and any(way.limited for way in ways)):
        texts = [_bare(value) for way in ways for value in way.values]
        return either(*(const(f"{text}\n") for text in dict.fromkeys(texts)))
    types = schema_types(found, found)
    if types != ANY and "string" not in types:
        return sequence(schema(found, demand.origin(tool, parameter.name)), const("\n"))
    if tool.strict and not all(map(_is_any_text, ways)):
        raise TagRefused(
            tool.field,
            "in this model's format, a strict tool's parameter that may be a string has no limits and no type but null besides",
        )
    return any_text()


def _is_any_text(way: Alternative) -> bool:
    is_named = way.values not in ((), (None,))
    return not is_named and not way.limited and (way.types == ANY or way.types <= {"string", "null"})


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()
