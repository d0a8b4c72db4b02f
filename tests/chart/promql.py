"""Finds the selectors of PromQL expressions. Prometheus itself checks whether expressions are valid."""

from __future__ import annotations

import re

_WORDS = frozenset(("and", "or", "unless", "offset", "bool", "inf", "nan"))
_GROUPING = re.compile(r"\b(by|on|without|ignoring|group_left|group_right)\s*\([^)]*\)")
_SELECTOR = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)?\s*(?P<labels>\{(?:[^}\"]|\"(?:[^\"\\]|\\.)*\")*\})?")
_STRING = re.compile(r"\"(?:[^\"\\]|\\.)*\"")
_RANGE = re.compile(r"\[[^\]]*\]|\boffset\s+\w+")


def selectors(expression: str) -> set[str]:
    """Returns each `name{matchers}` of an expression, without range and offset."""
    text = _RANGE.sub(" ", _GROUPING.sub(" ", expression))
    found, at = set(), 0
    while at < len(text):
        if string := _STRING.match(text, at):
            at = string.end()
            continue
        match = _SELECTOR.match(text, at)
        name, labels = (match["name"], match["labels"]) if match else (None, None)
        if match is None or not (name or labels) or (at and text[at - 1].isdigit()):
            at += 1
            continue
        at = match.end()
        is_function = labels is None and text[at:].lstrip().startswith("(")
        if not is_function and (name or "").lower() not in _WORDS:
            found.add(f"{name or ''}{labels or ''}")
    return found


def names(expression: str) -> set[str]:
    """Returns the names of the series in an expression."""
    return {selector.split("{")[0] for selector in selectors(expression)} - {""}
