"""Describes the calls that an output may or must have, as the builders of grammars need them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rootstock_llm.services.gateway.output.tags.layouts import Layout, LayoutOrigin, schema
from rootstock_llm.services.shared.json_schema import is_annotation

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_NO_MEMBERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# Keywords of a schema that restrict the type of a value.
_TYPE_KEYWORDS = ("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const", "properties")
_OF_NO_MEMBERS = {"type", "properties", "required"}  # keywords that the schema of a tool without parameters may have


class TagRefused(ValueError):
    """A strict tool has parameters that a grammar of this format cannot enforce. The client must change the tool.

    The message is for the client and contains no value of the request.
    """

    def __init__(self, field: str, why: str) -> None:
        """Makes the error.

        Args:
            field: The request's field with the tool's parameters.
            why: The message for the client.
        """
        super().__init__(why)
        self.field = field


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool of a request."""

    name: str
    parameters: Mapping[str, Any] | None  # JSON schema of the parameters, or None if the tool has none
    strict: bool = False  # whether the grammar enforces the whole schema in every call of the tool
    field: str = "tools"  # the request's field with `parameters`, for errors


@dataclass(frozen=True, slots=True)
class CallDemand:
    """The calls that a request allows or requires."""

    tools: tuple[ToolSpec, ...]  # tools that may be called; only the named tool if the request names one
    forced: bool  # whether the output must be calls only, at least one
    parallel: bool  # whether the output may have more than one call

    def parameters(self, tool: ToolSpec) -> Mapping[str, Any]:
        """Returns the schema that a call's arguments must follow: any object if the tool is not strict and no call is forced."""
        if not (tool.strict or self.forced):
            return ANY_OBJECT
        found = tool.parameters
        if found is None or _has_no_members(found):
            return _NO_MEMBERS
        if tool.strict:
            return found if any(key in found for key in _TYPE_KEYWORDS) else {**found, **ANY_OBJECT}
        return found if "type" in found or "$ref" in found else {**found, **ANY_OBJECT}

    def arguments(self, tool: ToolSpec) -> Layout:
        return schema(self.parameters(tool), self.origin(tool))

    def origin(self, tool: ToolSpec, parameter: str | None = None) -> LayoutOrigin:
        """Returns the origin of the layout of one parameter, or of all arguments if `parameter` is None."""
        name = None if parameter is None else parameter.replace("~", "~0").replace("/", "~1")
        return LayoutOrigin(tool.field, "" if name is None else f"/properties/{name}", partial=not tool.strict)


def _has_no_members(schema: Mapping[str, Any]) -> bool:
    """Returns whether a tool with this schema has no parameters: the schema has no keywords, or `properties` is empty.

    `{"type": "object"}` without `properties` allows all parameters.
    """
    keywords = {key for key in schema if not is_annotation(key)}
    if not keywords:
        return True
    is_list = keywords <= _OF_NO_MEMBERS and schema.get("type", "object") == "object"
    return is_list and schema.get("properties") == {} and not schema.get("required")
