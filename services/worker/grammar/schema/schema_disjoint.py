"""Decides whether two schemas exclude each other, by types, constants and required properties.

`oneOf` means that exactly one schema is satisfied. If the schemas exclude each other, the grammar may treat it like `anyOf`.
"""

from __future__ import annotations

import json
from typing import Any

from rootstock_llm.services.worker.grammar.schema.schema_support import follow, is_of, type_of_value, types_of


def disjoint(document: Any, left: Any, right: Any, path: str) -> bool:
    """Returns whether no value satisfies both schemas. False if this is not certain.

    Args:
        document: the whole schema, to which references refer.
        path: JSON pointer for errors.
    """
    left, right = follow(document, left, path), follow(document, right, path)
    if not isinstance(left, dict) or not isinstance(right, dict):
        return False
    found_left, found_right = _values(left), _values(right)
    if found_left is not None and found_right is not None:
        return not _keys(found_left) & _keys(found_right)
    types_left, types_right = _types(left, path), _types(right, path)
    if not types_left or not types_right:
        return False
    if found_left is not None or found_right is not None:
        values, types = (found_left, types_right) if found_left is not None else (found_right or [], types_left)
        return not any(is_of(value, types) for value in values)
    shared = [name for name in types_left if _overlaps(name, types_right)]
    return all(name == "object" and _differ_by_constant(document, left, right, path) for name in shared)


def _differ_by_constant(document: Any, left: dict[str, Any], right: dict[str, Any], path: str) -> bool:
    """Returns whether both schemas require the same property, with constants that have no value in common."""
    first, second = _required(left), _required(right)
    for name in first.keys() & second.keys():
        values = [_values(follow(document, side[name], path)) for side in (first, second)]
        if values[0] is not None and values[1] is not None and not _keys(values[0]) & _keys(values[1]):
            return True
    return False


def _required(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schemas of the properties that are both declared and required."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    return {name: properties[name] for name in required if isinstance(name, str) and name in properties}


def _values(schema: Any) -> list[Any] | None:
    """Returns the values of `const` or `enum`, or None if the schema has neither."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    enum = schema.get("enum")
    return enum if isinstance(enum, list) else None


def _types(schema: dict[str, Any], path: str) -> tuple[str, ...]:
    """Returns the types in `type`. Empty if it is missing, because then values of any type may satisfy the schema."""
    return types_of(schema, path) if "type" in schema else ()


def _overlaps(name: str, others: tuple[str, ...]) -> bool:
    return name in others or (name == "integer" and "number" in others) or (name == "number" and "integer" in others)


def _keys(values: list[Any]) -> set[tuple[str, str]]:
    return {_key(value) for value in values}


def _key(value: Any) -> tuple[str, str]:
    """Returns a hashable value that is equal for values that JSON Schema treats as equal, such as [1] and [1.0]."""
    return type_of_value(value), json.dumps(_with_whole_numbers(value), sort_keys=True)


def _with_whole_numbers(value: Any) -> Any:
    """Returns a value whose whole numbers are all of the type int. parse_json() limits the depth of the recursion."""
    if isinstance(value, list):
        return [_with_whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_whole_numbers(member) for key, member in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
