"""Lists the public names of a JSON schema: the paths of its fields, and the permitted strings of a field.

A path looks like `choices[].message.content`: `[]` is an item of a list, and `*` is a value under any key. A permitted string
looks like `finish_reason = stop`. Names of types are not listed, because renaming a type does not affect users.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

# Keyword in the schema of the Helm values. It marks a key of another vendor's chart. The templates refuse this key and name our
# key, so the marked key is not a public name.
FOREIGN = "x-foreign-key"
_ALTERNATIVES = ("allOf", "anyOf", "oneOf")


def names_of(schema: Schema, definitions: Mapping[str, Schema]) -> set[str]:
    """Returns the paths of all fields, and their permitted strings.

    Args:
        definitions: schemas that a `$ref` refers to, by the last part of the reference.
    """
    return set(_names(schema, definitions, "", ()))


def _names(schema: Any, definitions: Mapping[str, Schema], path: str, within: tuple[str, ...]) -> Iterator[str]:
    """Yields the names below a path.

    Args:
        within: references that lead to this schema. They are not followed again, so a type that contains itself is listed once.
    """
    if not isinstance(schema, dict):
        return
    reference = schema.get("$ref", "").rpartition("/")[2]
    if reference and reference not in within:
        yield from _names(definitions[reference], definitions, path, (*within, reference))
    for part in (part for word in _ALTERNATIVES for part in schema.get(word, ())):
        yield from _names(part, definitions, path, within)
    for name, part in schema.get("properties", {}).items():
        if isinstance(part, dict) and FOREIGN in part:
            continue
        below = f"{path}.{name}" if path else name
        yield below
        yield from _names(part, definitions, below, within)
    for item in (schema.get("items"), *schema.get("prefixItems", ())):
        yield from _names(item, definitions, f"{path}[]", within)
    yield from _names(schema.get("additionalProperties"), definitions, f"{path}.*" if path else "*", within)
    allowed = (*schema.get("enum", ()), schema.get("const"))
    yield from (f"{path} = {value}" for value in allowed if isinstance(value, str))
