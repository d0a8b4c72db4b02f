"""Builds the layout of Llama's pythonic calls. It restricts values to JSON, which the parser reads like Python literals."""

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
    """Returns the layout of an output with calls.

    If no call is forced, free text may precede `[NAME(`, and the list of calls is last.
    """
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
    """Returns the layout of the keyword arguments between a call's brackets.

    A comma follows each optional parameter before the first required parameter, and precedes each parameter after the first
    required parameter.
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
    """Returns whether the parameter's name is a valid Python keyword argument.

    Raises TagRefused if the parameter is required and its name is not valid.
    """
    if _KEYWORD.fullmatch(parameter.name):
        return True
    if parameter.required:
        raise TagRefused(
            tool.field, "in this model's call format, the name of a required parameter must have only letters, digits and '_'"
        )
    return False
