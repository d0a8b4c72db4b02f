"""What a parameter's schema allows, one way beside the other, for formats that write values without quotes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.parsers.parameter_types import ANY, referred, says, schema_types


@dataclass(frozen=True, slots=True)
class Alternative:
    """types: of JSON, ANY where the schema does not say. values: all that there are, where it names them. limited: it says more
    than that."""

    types: frozenset[str] = ANY
    values: tuple[Any, ...] = ()
    limited: bool = False


def alternatives(schema: Mapping[str, Any]) -> list[Alternative]:
    """schema: with the definitions that it refers to. One that is limited at least where it cannot be taken apart."""
    return _of(schema, schema, set()) or [Alternative(limited=True)]


def _of(schema: Any, root: Mapping[str, Any], followed: set[str]) -> list[Alternative]:
    """followed: references whose ways are among those that were found before."""
    if schema is True:
        return [Alternative()]
    if not isinstance(schema, Mapping):
        return [Alternative(limited=True)]
    keywords = says(schema)
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
    """None where it is one by itself, or says more than its options do."""
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
