"""Which calls an output may, or must, have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.parsers.tags.layouts import Layout, schema

_OBJECT: Mapping[str, Any] = {"type": "object"}
_SAYS_TYPE = ("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const", "properties")


class TagRefused(ValueError):
    """What a strict tool asks for cannot be held in this format; the message is for the client, and names no value of its own."""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """parameters: a JSON schema, None where the request gives none. strict: it holds even where calls are not asked for."""

    name: str
    parameters: Mapping[str, Any] | None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class CallDemand:
    """tools: those that may be called, the named one alone where one is named. forced: calls and nothing else, one at least.
    parallel: more than one may come."""

    tools: tuple[ToolSpec, ...]
    forced: bool
    parallel: bool

    def parameters(self, tool: ToolSpec) -> Mapping[str, Any]:
        """The schema that the tool's arguments must follow."""
        found = tool.parameters if tool.strict or self.forced else None
        if found is None:
            return _OBJECT
        return found if any(key in found for key in _SAYS_TYPE) else {**found, **_OBJECT}

    def arguments(self, tool: ToolSpec) -> Layout:
        return schema(self.parameters(tool))
