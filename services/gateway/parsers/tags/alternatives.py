"""Splits a parameter's schema into its alternatives, for formats that write values without quotes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.parsers.parameter_types import ANY, referred, says, schema_types


@dataclass(frozen=True, slots=True)
class Alternative:
    """A set of values that a schema allows, next to its other alternatives."""

    types: frozenset[str] = ANY  # JSON types; ANY if the schema does not limit them
    values: tuple[Any, ...] = ()  # all allowed values; empty if the schema does not list them
    limited: bool = False  # the schema has keywords besides types and values


def alternatives(schema: Mapping[str, Any]) -> list[Alternative]:
    """Returns at least one alternative of a schema, which must contain the definitions that it refers to.

    A part that cannot be split becomes a limited alternative.
    """
    return _of(schema, schema, set()) or [Alternative(limited=True)]


def _of(schema: Any, root: Mapping[str, Any], followed: set[str]) -> list[Alternative]:
    """Returns the alternatives of a part of `root`. Skips references in `followed`, whose alternatives have been found."""
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
    """Returns the options of anyOf, oneOf or a single allOf. None if the schema has other keywords besides."""
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
