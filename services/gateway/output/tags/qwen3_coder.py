"""Builds the layout of Qwen3-Coder's calls. Each parameter is between its own marks, and strings have no quotes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from rootstock_llm.services.gateway.output.parameter_types import ANY, keywords_of, referred, schema_types
from rootstock_llm.services.gateway.output.tags.demand import CallDemand, TagRefused, ToolSpec
from rootstock_llm.services.gateway.output.tags.layouts import (
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
from rootstock_llm.services.gateway.output.tags.parameter_list import Parameter, parameters

_BEGIN, _END = "<tool_call>\n<function=", "</function>\n</tool_call>"
_VALUE_END = "</parameter>"


@dataclass(frozen=True, slots=True)
class Alternative:
    """An alternative of a parameter's schema, such as an option of anyOf."""

    types: frozenset[str] = ANY  # allowed JSON types; ANY if they are not limited
    values: tuple[Any, ...] = ()  # allowed values; empty if the schema does not list them
    limited: bool = False  # whether the schema has keywords that limit values further than `types` and `values` do


def alternatives(schema: Mapping[str, Any]) -> list[Alternative]:
    """Returns the alternatives of a schema, at least one. The schema must contain the definitions that it refers to.

    A part that cannot be split into alternatives becomes one alternative with `limited`.
    """
    return _of(schema, schema, set()) or [Alternative(limited=True)]


def _of(schema: Any, root: Mapping[str, Any], followed: set[str]) -> list[Alternative]:
    """Returns the alternatives of `schema`, which is a part of `root`.

    Skips a reference that is in `followed`, and adds each other reference to `followed`.
    """
    if schema is True:
        return [Alternative()]
    if not isinstance(schema, Mapping):
        return [Alternative(limited=True)]
    keywords = keywords_of(schema)
    if keywords == {"$ref"}:
        reference = str(schema["$ref"])
        if reference in followed:
            return []
        followed.add(reference)
        return _of(referred(reference, root), root, followed)
    options = _options(schema, keywords)
    if options is not None:
        return [each for option in options for each in _of(option, root, followed)]
    return [_single(schema, keywords)]


def _options(schema: Mapping[str, Any], keywords: frozenset[str]) -> Sequence[Any] | None:
    """Returns the options of a schema that has only anyOf, only oneOf, or only an allOf with one option.

    None for other schemas.
    """
    for name in ("anyOf", "oneOf", "allOf"):
        options = schema.get(name)
        if keywords == {name} and isinstance(options, list) and options and (name != "allOf" or len(options) == 1):
            return options
    return None


def _single(schema: Mapping[str, Any], keywords: frozenset[str]) -> Alternative:
    types, named = schema_types(schema, schema), "const" if "const" in schema else "enum"
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return Alternative(types, tuple(values), not keywords <= {"type", named})
    return Alternative(types, (None,) if types == {"null"} else (), not keywords <= {"type"})


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
    """Returns the layout of a parameter.

    Its value ends at the first end mark. `value` must include the line end before this mark.
    """
    return sequence(tag(begin, value, _VALUE_END), const("\n"))


def _value(demand: CallDemand, parameter: Parameter, tool: ToolSpec) -> Layout:
    """Returns the layout of a parameter's value.

    Raises:
        TagRefused: A strict tool limits a string in a way that a grammar for text without quotes cannot enforce.
    """
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
            "in this model's call format, a string parameter of a strict tool may have no limits and no second type besides null",
        )
    return any_text()


def _is_any_text(way: Alternative) -> bool:
    is_named = way.values not in ((), (None,))
    return not is_named and not way.limited and (way.types == ANY or way.types <= {"string", "null"})


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()
