"""Lists the parameters of a tool, for formats that write each parameter by itself and not as a JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rootstock_llm.services.gateway.output.parameter_types import keywords_of
from rootstock_llm.services.gateway.output.tags.demand import CallDemand, TagRefused, ToolSpec

_DEFINITIONS = ("$defs", "definitions")
# Keywords of a schema that a list of parameters can express.
_OF_A_LIST = {"type", "properties", "required", "additionalProperties"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a tool."""

    name: str
    schema: Mapping[str, Any] | bool  # JSON schema of the value, with the definitions that it may refer to
    required: bool


def parameters(demand: CallDemand, tool: ToolSpec) -> list[Parameter] | None:
    """Returns the tool's parameters in the schema's order, then the required names without a schema.

    None if the schema names no parameters, so that any name is allowed.

    Raises:
        TagRefused: The schema of a strict tool has keywords that a list of parameters cannot express.
    """
    schema = demand.parameters(tool)
    if tool.strict and not keywords_of(schema) <= _OF_A_LIST:
        why = "in this model's call format, a strict tool's schema may only have type, properties, required, additionalProperties"
        raise TagRefused(tool.field, why)
    properties, required = schema.get("properties"), schema.get("required")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    rest = schema.get("additionalProperties", True)
    if not isinstance(properties, Mapping) or (not properties and rest is not False):
        if not names:
            return None
        properties = {}
    found = {**properties, **{name: rest for name in names if name not in properties}}
    return [Parameter(name, _whole(each, schema), name in names) for name, each in found.items()]


def _whole(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any] | bool:
    if not isinstance(schema, Mapping):
        return schema is not False
    return {**schema, **{key: root[key] for key in _DEFINITIONS if key in root}}
