"""Numbers within bounds, as rules: digit arithmetic that xgrammar's own schema converter does well, taken over as text."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import xgrammar

from services.worker.grammar.schema.refusal import GrammarRefused
from services.worker.grammar.schema.schema_support import Schema, child, number, refuse

_RULE = re.compile(r"^(root\w*) ::= (.*)$", re.MULTILINE)
_NAME = re.compile(r"\broot\w*\b")
MAX_MULTIPLE = 1000
INT64 = 1 << 63


def numeric_keywords(schema: Schema, kind: str, path: str) -> dict[str, float | int]:
    """The schema's bounds as the converter takes them: at most one at each end, whole numbers for integers. {}: no bounds."""
    low, high = _bound(schema, "minimum", max, path), _bound(schema, "maximum", min, path)
    multiple = number(schema, "multipleOf", path)
    if multiple is not None:
        return _multiple(multiple, kind, bool(low or high), path)
    found: dict[str, float | int] = {}
    for side, name in ((low, "minimum"), (high, "maximum")):
        if side is None:
            continue
        value, strict = side
        key = f"exclusive{name.title()}" if strict else name
        found[key] = value if kind == "number" else _whole(value, name, strict)
        if kind == "integer":
            found[name] = found.pop(key)
            if abs(found[name]) >= INT64:
                raise refuse(child(path, key), "outside 64 bits")
    return found


def import_rules(keywords: dict[str, float | int], kind: str, prefix: str, path: str) -> dict[str, str]:
    """EBNF rules, by name; the one named `prefix` is where the number begins."""
    schema = json.dumps({"type": kind, **keywords})
    try:
        text = str(xgrammar.Grammar.from_json_schema(schema))
    except RuntimeError as error:
        raise refuse(path, str(error).split(": ", 1)[-1]) from None
    rules = dict(_RULE.findall(text))
    if not rules:
        raise GrammarRefused(f"json_schema: {path}: these bounds give no grammar")
    renamed = {name: _NAME.sub(lambda found: prefix + found[0][4:], body) for name, body in rules.items()}
    return {prefix + name[4:]: body for name, body in renamed.items()}


def _bound(schema: Schema, name: str, tighter: Any, path: str) -> tuple[float | int, bool] | None:
    """(bound, strict): the tighter of a bound and its exclusive form."""
    plain = number(schema, name, path)
    strict = number(schema, f"exclusive{name.title()}", path)
    if plain is None or strict is None:
        return (plain, False) if plain is not None else (strict, True) if strict is not None else None
    value = tighter(plain, strict)
    return value, value == strict


def _whole(value: float | int, name: str, strict: bool) -> int:
    if name == "minimum":
        return math.floor(value) + 1 if strict else math.ceil(value)
    return math.ceil(value) - 1 if strict else math.floor(value)


def _multiple(value: float | int, kind: str, bounded: bool, path: str) -> dict[str, float | int]:
    where = child(path, "multipleOf")
    if kind != "integer" or bounded:
        raise refuse(where, "supported for type integer without bounds only")
    if value != int(value) or not 1 <= value <= MAX_MULTIPLE:
        raise refuse(where, f"must be a whole number from 1 to {MAX_MULTIPLE}")
    return {"multipleOf": int(value)}
