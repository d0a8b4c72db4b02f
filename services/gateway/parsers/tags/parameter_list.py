"""A tool's parameters one by one, for formats that write each by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.parsers.tags.demand import CallDemand, TagRefused, ToolSpec

_DEFINITIONS = ("$defs", "definitions")
_COMBINERS = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")


@dataclass(frozen=True, slots=True)
class Parameter:
    """schema: with the definitions that it may refer to."""

    name: str
    schema: Mapping[str, Any] | bool
    required: bool


def parameters(demand: CallDemand, tool: ToolSpec) -> list[Parameter] | None:
    """In the schema's order; None where any may come. Raises TagRefused for a strict schema that is no list of them."""
    schema = demand.parameters(tool)
    if tool.strict and any(key in schema for key in _COMBINERS):
        raise TagRefused("parameters of a strict tool must be an object with 'properties'")
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return None
    names = set(required) if isinstance(required, list) else set()
    return [Parameter(name, _whole(found, schema), name in names) for name, found in properties.items()]


def _whole(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any] | bool:
    if not isinstance(schema, Mapping):
        return schema is not False
    return {**schema, **{key: root[key] for key in _DEFINITIONS if key in root}}
