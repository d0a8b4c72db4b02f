"""A regular expression for a whole output, as EBNF text."""

from __future__ import annotations

from services.worker.grammar.schema.ebnf import Grammar
from services.worker.grammar.schema.json_rules import raw_chars
from services.worker.grammar.schema.regex_syntax import parse, whole


def regex_ebnf(pattern: str) -> str:
    """The output matches from its first to its last character, with or without `^` and `$`. Raises GrammarRefused."""
    return Grammar({"root": whole(parse(pattern, raw_chars))}).render()
