"""Converts the text of a parameter to JSON according to its schema, for formats that write strings without quotes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from rootstock_llm.services.gateway.output.output_parser import Schema
from rootstock_llm.services.shared.json_schema import is_annotation

_MAX_REFERENCES = 16  # maximum depth of references and options that are followed in a schema
_MAX_LOOKS = 1024  # maximum number of examined parts of a schema
# JSON words by Python's words, which models learn from chat templates that print Python values.
_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}
_KINDS: Mapping[type, str] = {
    **{bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"},
    type(None): "null",
}
ANY: frozenset[str] = frozenset()  # set of types of a schema that does not limit the types


def parameter_types(tool: Schema | None, name: str) -> frozenset[str]:
    """Returns the JSON types that a tool's parameter may have; ANY if the schema does not limit them."""
    properties = tool.get("properties") if isinstance(tool, Mapping) else None
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return schema_types(schema, tool)


def schema_types(schema: Any, root: Any) -> frozenset[str]:
    """Returns the JSON types that a schema allows; ANY if it does not limit them. References are looked up in `root`."""
    return _Types(root).of(schema, _MAX_REFERENCES)


def keywords_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """Returns the keywords of a schema except annotations. Unknown keywords are included."""
    return frozenset(key for key in schema if not is_annotation(key))


def referred(reference: Any, root: Any) -> Any:
    """Returns the target of a reference within `root`. None if there is no target, or if the reference leads into an array."""
    found = root
    for part in str(reference).removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def as_json(text: str, types: frozenset[str]) -> str:
    """Returns a parameter's text as JSON, by the first rule that matches. Rules 1 and 2 remove surrounding white space.

    1. Text that is JSON of an allowed type stays as it is. Python's True, False and None become JSON.
    2. Text that is JSON of another type stays as it is if strings are not allowed.
    3. All other text becomes a string.
    """
    written = text.strip()
    written = _OF_PYTHON.get(written, written)
    kind = _kind_of(written)
    if kind and (types == ANY or kind in types or (kind == "integer" and "number" in types)):
        return written
    return written if kind and "string" not in types else quoted(text)


def quoted(text: str) -> str:
    return orjson.dumps(text).decode()


def _kind_of(text: str) -> str:
    """Returns the JSON type of a text; "" if the text is not JSON."""
    try:
        return _KINDS[type(orjson.loads(text))]
    except orjson.JSONDecodeError:
        return ""


class _Types:
    """Finds the types that one schema allows. ANY above _MAX_LOOKS parts or _MAX_REFERENCES nested references."""

    def __init__(self, tool: Any) -> None:
        self._tool = tool
        self._looks = 0

    def of(self, schema: Any, references: int) -> frozenset[str]:
        self._looks += 1
        if not isinstance(schema, Mapping) or references < 0 or self._looks > _MAX_LOOKS:
            return ANY
        if "$ref" in schema:
            return self.of(referred(schema["$ref"], self._tool), references - 1)
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                return _union([self.of(option, references - 1) for option in schema[key]])
        if isinstance(schema.get("allOf"), list) and schema["allOf"]:
            return self.of(schema["allOf"][0], references - 1)
        return _declared(schema)


def _declared(schema: Mapping[str, Any]) -> frozenset[str]:
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(name for name in declared if isinstance(name, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset(_KINDS.get(type(value), "") for value in values) if isinstance(values, list) else ANY


def _union(options: list[frozenset[str]]) -> frozenset[str]:
    return frozenset[str]().union(*options) if all(options) else ANY
