"""Regular expressions as rules: for a whole output, and for a JSON string, where a character may have to be escaped."""

from __future__ import annotations

import json

from services.worker.grammar.schema.ebnf import Chars, Grammar, Node, Ranges, Seq, Text, choice, intersection
from services.worker.grammar.schema.json_rules import ESCAPED, QUOTE, SAFE
from services.worker.grammar.schema.refusal import GrammarRefused
from services.worker.grammar.schema.regex_syntax import anywhere, parse, whole


def regex_ebnf(pattern: str) -> str:
    """The output matches from its first to its last character, with or without `^` and `$`. Raises GrammarRefused."""
    return Grammar({"root": whole(parse(pattern, _raw_chars))}).render()


def string_matching(pattern: str) -> Node:
    """A JSON string in which the pattern is found. Raises GrammarRefused."""
    return Seq((QUOTE, anywhere(parse(pattern, _json_chars), SAFE), QUOTE))


def _json_chars(ranges: Ranges, vague: bool) -> Node:
    """One character as JSON writes it, with one spelling each. vague: none that would need escaping."""
    plain = intersection(ranges, SAFE.ranges)
    options: list[Node] = [Chars(plain)] if plain else []
    if not vague:
        codes = [code for low, high in intersection(ranges, ESCAPED) for code in range(low, high + 1)]
        options += [Text(json.dumps(chr(code))[1:-1]) for code in codes]
    if not options:
        raise GrammarRefused("pattern: a character class without any character that JSON text can show")
    return choice(options)


def _raw_chars(ranges: Ranges, vague: bool) -> Node:
    """One character of plain text."""
    if not ranges:
        raise GrammarRefused("pattern: a character class without characters")
    return Chars(ranges)
