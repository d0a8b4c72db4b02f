"""The supported keywords of JSON Schema. All other keywords are refused with their position in the schema.

If a keyword were ignored silently, outputs could break the client. The keywords are from draft 2020-12, except `definitions`,
which is from older drafts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from rootstock_llm.services.shared.json_schema import is_annotation
from rootstock_llm.services.worker.grammar.schema.refusal import GrammarRefused

Schema = Mapping[str, Any]

KEYWORDS_OF_TYPE: Mapping[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format", "contentEncoding"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems"}),
    "object": frozenset(
        {
            *("properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties"),
            *("propertyNames", "minProperties", "maxProperties"),
        }
    ),
    "boolean": frozenset(),
    "null": frozenset(),
}
TYPES = (*KEYWORDS_OF_TYPE, "integer")
COMBINERS = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
TYPED = frozenset().union(*KEYWORDS_OF_TYPE.values())
_KNOWN = TYPED | {"type", *COMBINERS}
MAX_REFERENCES = 64  # largest number of references that are followed from one schema
MAX_COUNT = (1 << 31) - 1  # largest number of repetitions in a grammar; xgrammar reads 2**32 + 1 as 1


def refuse(path: str, why: str) -> GrammarRefused:
    return GrammarRefused(f"json_schema: {path}: {why}", path, why)


def child(path: str, key: str | int) -> str:
    """Returns the JSON pointer of a member of the value at `path`."""
    return f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}"


def keyword_below(path: str, refused: str) -> str:
    """Returns the keyword of the schema at `path` that contains the pointer `refused`; "" if the pointer is not below `path`."""
    if not refused.startswith(f"{path}/"):
        return ""
    return refused[len(path) + 1 :].partition("/")[0].replace("~1", "/").replace("~0", "~")


def check_keywords(schema: Any, path: str) -> Schema:
    """Returns the schema. Raises GrammarRefused if a keyword is unknown or cannot be combined with another keyword."""
    if not isinstance(schema, dict):
        raise refuse(path, "must be an object, or true" if schema is not False else "the schema false allows no value")
    for key in schema:
        if key not in _KNOWN and not is_annotation(key):
            raise refuse(child(path, key), "this keyword is not supported")
    if "$id" in schema and path != "#":
        raise refuse(child(path, "$id"), "is only supported at the root of the schema")
    combiners = [key for key in COMBINERS if key in schema]
    others = [key for key in schema if key in TYPED or key in COMBINERS or key == "type"]
    if combiners:
        allowed = {combiners[0], "type"} if combiners[0] in ("enum", "const") else {combiners[0]}
        for key in others:
            if key not in allowed:
                raise refuse(child(path, key), f"is not supported together with '{combiners[0]}'")
    return schema


def types_of(schema: Schema, path: str) -> tuple[str, ...]:
    """Returns the allowed types: the types in `type`, or the type to which the schema's keywords belong. Empty: all types."""
    declared = schema.get("type")
    if declared is not None or "type" in schema:
        names = declared if isinstance(declared, list) else [declared]
        if not names or any(not isinstance(name, str) or name not in TYPES for name in names):
            raise refuse(child(path, "type"), f"must be one or more of {', '.join(TYPES)}")
        found = tuple(dict.fromkeys(names))
        return tuple(name for name in found if name != "integer") if "number" in found else found
    implied = [name for name, keywords in KEYWORDS_OF_TYPE.items() if keywords & schema.keys()]
    if len(implied) > 1:
        raise refuse(path, f"needs 'type', because it has keywords of {' and '.join(implied)}")
    return tuple(implied)


def type_of_value(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def is_of(value: Any, types: tuple[str, ...]) -> bool:
    """Returns whether a value has one of the types; empty types allow every value."""
    found = type_of_value(value)
    return not types or found in types or (found == "integer" and "number" in types)


def count(schema: Schema, key: str, path: str, default: int | None) -> int | None:
    """Returns the value of a keyword, a whole number >= 0. Raises GrammarRefused for another value."""
    value = schema.get(key, default)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if key in schema and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise refuse(child(path, key), "must be a whole number, 0 or more")
    found: int | None = value
    return found


def bounds(schema: Schema, low_key: str, high_key: str, path: str) -> tuple[int, int | None]:
    """Returns the values of a lower and an upper bound. An upper bound above MAX_COUNT is no bound: no output is as long."""
    low, high = count(schema, low_key, path, 0) or 0, count(schema, high_key, path, None)
    if high is not None and low > high:
        raise refuse(child(path, low_key), f"is greater than {high_key}")
    if low > MAX_COUNT:
        raise refuse(child(path, low_key), f"must be at most {MAX_COUNT}")
    return low, None if high is None or high > MAX_COUNT else high


def number(schema: Schema, key: str, path: str) -> float | int | None:
    value = schema.get(key)
    if key in schema and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise refuse(child(path, key), "must be a number")
    if value is not None and abs(value) > sys.float_info.max:
        raise refuse(child(path, key), "exceeds the range of a double")
    return value


def text(schema: Schema, key: str, path: str) -> str | None:
    value = schema.get(key)
    if key in schema and not isinstance(value, str):
        raise refuse(child(path, key), "must be a string")
    return value


def mapping(schema: Schema, key: str, path: str) -> Mapping[str, Any]:
    value = schema.get(key, {})
    if not isinstance(value, dict):
        raise refuse(child(path, key), "must be an object")
    return value


def listing(schema: Schema, key: str, path: str) -> list[Any]:
    value = schema.get(key, [])
    if not isinstance(value, list):
        raise refuse(child(path, key), "must be an array")
    return value


def names(schema: Schema, key: str, path: str) -> list[str]:
    value = listing(schema, key, path)
    if any(not isinstance(name, str) for name in value):
        raise refuse(child(path, key), "must be an array of strings")
    return value


def resolve(document: Any, reference: Any, path: str) -> tuple[str, Any]:
    """Returns the pointer and the schema of a local `$ref`. Raises GrammarRefused for another reference."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise refuse(child(path, "$ref"), "only references within the schema, '#' or '#/…', are supported")
    target = document
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        inside = target.get(key) if isinstance(target, dict) else None
        if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
            inside = target[int(key)]
        if inside is None:
            raise refuse(child(path, "$ref"), f"the schema has no '{reference}'")
        target = inside
    return reference, target


def follow(document: Any, schema: Any, path: str) -> Any:
    """Returns the schema to which a chain of references leads. Raises GrammarRefused if the chain is too long."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        path, schema = resolve(document, schema["$ref"], path)
    raise refuse(child(path, "$ref"), "refers to itself")
