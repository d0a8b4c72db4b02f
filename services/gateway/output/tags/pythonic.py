"""Builds the layout of Llama's pythonic calls. Values are JSON, which the parser also reads as Python literals."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rootstock_llm.services.gateway.output.tags.demand import CallDemand, TagRefused, ToolSpec
from rootstock_llm.services.gateway.output.tags.layouts import (
    Layout,
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
from rootstock_llm.services.gateway.output.tags.parameter_list import Parameter, parameters

_KEYWORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def pythonic(demand: CallDemand, excludes: Sequence[str]) -> Layout:
    """Returns the layout. If no call is forced, `[NAME(` begins the calls in a text, and the output ends after the calls."""
    if demand.forced:
        tags = [tag(f"{tool.name}(", _keywords(demand, tool), ")") for tool in demand.tools]
        return sequence(const("["), calls(tags, ", ", demand.parallel), const("]"))
    more = [star(sequence(const(", "), _any_call(demand)))] if demand.parallel else []
    begins = [f"[{tool.name}(" for tool in demand.tools]
    contents = [sequence(_keywords(demand, tool), const(")"), *more) for tool in demand.tools]
    tags = [tag(begin, content, "]") for begin, content in zip(begins, contents, strict=True)]
    return within_text(begins, tags, excludes, parallel=False)


def _any_call(demand: CallDemand) -> Layout:
    return either(*(sequence(const(f"{tool.name}("), _keywords(demand, tool), const(")")) for tool in demand.tools))


def _keywords(demand: CallDemand, tool: ToolSpec) -> Layout:
    """Returns the layout of the text between a call's brackets.

    Without a required parameter before it, an optional parameter is followed by a comma. Otherwise, the comma precedes it.
    """
    listed = parameters(demand, tool)
    if listed is None:
        pair = sequence(regex(r"[a-z_][a-z0-9_]*"), const("="), schema(True))
        return optional(sequence(pair, star(sequence(const(", "), pair))))
    found = [each for each in listed if _can_be_written(each, tool)]
    begun, parts = False, [const("")]
    for each in found:
        pair = sequence(const(f"{each.name}="), schema(each.schema, demand.origin(tool, each.name)))
        part = sequence(const(", "), pair) if begun else pair if each.required else sequence(pair, const(", "))
        begun = begun or each.required
        parts.append(part if each.required else optional(part))
    return sequence(*parts)


def _can_be_written(parameter: Parameter, tool: ToolSpec) -> bool:
    """Returns whether the parameter's name is a valid keyword. Raises TagRefused for a required parameter without one."""
    if _KEYWORD.fullmatch(parameter.name):
        return True
    if parameter.required:
        raise TagRefused(tool.field, "in this model's format, the name of a required parameter must be letters, digits and '_'")
    return False
