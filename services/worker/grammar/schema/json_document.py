"""Parses JSON from a client after a check of its depth."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from rootstock_llm.services.worker.grammar.schema.refusal import GrammarRefused

MAX_DEPTH = 64  # nested arrays and objects; recursive functions over them stay far below Python's recursion limit
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


def parse_json(source: str, what: str) -> Any:
    """Parses a document. Raises GrammarRefused if it is not JSON or nested too deep; the message begins with `what`."""
    if depth_of(source) > MAX_DEPTH:
        raise GrammarRefused(f"{what}: nested more than {MAX_DEPTH} levels deep")
    try:
        return json.loads(source, parse_constant=_no_constant, parse_float=_finite)
    except ValueError as error:
        raise GrammarRefused(f"{what}: not JSON: {error}") from None


def depth_of(source: str) -> int:
    """Returns the deepest nesting of brackets outside of strings, in one pass without recursion."""
    depth = deepest = 0
    for match in _STRUCTURE.finditer(source):
        mark = match[0]
        if mark in ("[", "{"):
            depth += 1
            deepest = max(deepest, depth)
        elif mark in ("]", "}"):
            depth -= 1
    return deepest


def _finite(literal: str) -> float:
    value = float(literal)
    if math.isinf(value):
        raise ValueError("a number exceeds the range of a double")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
