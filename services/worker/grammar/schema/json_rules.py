"""The rules of JSON itself: values, strings, numbers, whitespace.

Every JSON parser can read the output: strings are UTF-8 without unpaired surrogates, and control characters are escaped.
Between JSON tokens, the grammar allows no whitespace, one blank, or a line break with an indentation. The length of the
whitespace is limited, so that a model cannot generate whitespace forever.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from rootstock_llm.services.worker.grammar.schema.ebnf import (
    Alternatives,
    Chars,
    Grammar,
    Node,
    Ranges,
    Ref,
    Repeat,
    Seq,
    Text,
    complement,
    references,
    seq,
)
from rootstock_llm.services.worker.grammar.schema.refusal import GrammarRefused

MAX_INDENT = 16  # largest number of blanks or tabs after a line break
MAX_SPELLED = 16  # largest minimum length of strings that may have escapes; each required character then needs a rule
ESCAPED: Ranges = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
SAFE = Chars(complement(ESCAPED))  # characters that need no escape in a JSON string
_HEX = Chars(((0x30, 0x39), (0x41, 0x46), (0x61, 0x66)))

WS = Ref("ws")
STRING = Ref("string")
NUMBER = Ref("number")
INTEGER = Ref("integer")
VALUE = Ref("value")
OBJECT = Ref("object")
ARRAY = Ref("array")
BOOLEAN = Alternatives((Text("true"), Text("false")))
NULL = Text("null")
COMMA = Seq((WS, Text(","), WS))
QUOTE = Text('"')


def base_rules() -> dict[str, Node]:
    """Returns the rules of any JSON value, in a new dict.

    The rule `text` is the rest of a string after its opening quote. It is recursive, because the masks of a repetition take 300
    times as long (100 ms instead of 0.3 ms for 150,000 tokens, xgrammar 0.2.8).
    """
    digits = Repeat(Chars(((0x30, 0x39),)), 1, None)
    natural = Alternatives((Text("0"), Seq((Chars(((0x31, 0x39),)), Repeat(Chars(((0x30, 0x39),)), 0, None)))))
    minus = Repeat(Text("-"), 0, 1)
    power = Repeat(Chars(((0x30, 0x39),)), 1, 2)  # exponent of 1 or 2 digits: a double overflows above 1e308
    exponent = Seq((Chars(((0x45, 0x45), (0x65, 0x65))), Repeat(Chars(((0x2B, 0x2B), (0x2D, 0x2D))), 0, 1), power))
    pair = Seq((STRING, WS, Text(":"), WS, VALUE))
    return {
        "ws": Alternatives((Text(""), Text(" "), Seq((Text("\n"), Repeat(Chars(((0x09, 0x09), (0x20, 0x20))), 0, MAX_INDENT))))),
        "string": Seq((QUOTE, Ref("text"))),
        "text": Alternatives((QUOTE, Seq((SAFE, Ref("text"))), Seq((Text("\\"), Ref("escape"), Ref("text"))))),
        "escape": Alternatives((_short_escapes(), Seq((Text("u"), Ref("unicode"))))),
        "unicode": _unicode_escape(),
        "integer": Alternatives((Text("0"), Seq((minus, Chars(((0x31, 0x39),)), Repeat(Chars(((0x30, 0x39),)), 0, None))))),
        "number": Seq((minus, natural, Repeat(Seq((Text("."), digits)), 0, 1), Repeat(exponent, 0, 1))),
        "value": Alternatives((OBJECT, ARRAY, STRING, NUMBER, BOOLEAN, NULL)),
        "object": seq(Text("{"), WS, Alternatives((Text("}"), Seq((pair, Repeat(Seq((COMMA, pair)), 0, None), WS, Text("}")))))),
        "array": seq(Text("["), WS, Alternatives((Text("]"), Seq((VALUE, Repeat(Seq((COMMA, VALUE)), 0, None), WS, Text("]")))))),
    }


def finished(rules: dict[str, Node], imported: dict[str, str], root: Node) -> Grammar:
    """Returns a grammar with the root node `root` and all rules that are reachable from it.

    Args:
        rules: the schema's rules; they may refer to the base rules.
        imported: rules as EBNF text, see Grammar.imported.
    """
    every = {**base_rules(), **rules, "root": root}
    reached: dict[str, Node] = {}
    waiting = ["root"]
    while waiting:
        name = waiting.pop()
        if name in every and name not in reached:
            reached[name] = every[name]
            waiting.extend(references(every[name]))
    return Grammar(reached, imported)


def string_of(low: int, high: int | None, define: Callable[[Node], Ref]) -> Node:
    """Returns the node of JSON strings of low to high characters.

    If `high` is set or `low` exceeds MAX_SPELLED, the string has no escapes, because masks are slow if each counted character has
    two spellings.

    Args:
        high: largest number of characters; None: unlimited.
        define: turns a node into a rule and returns a reference to it.
    """
    if high is not None or low > MAX_SPELLED:
        return Seq((QUOTE, Repeat(SAFE, low, high), QUOTE))
    rest = Ref("text")
    for _ in range(low):
        rest = define(Alternatives((Seq((SAFE, rest)), Seq((Text("\\"), Ref("escape"), rest)))))
    return Seq((QUOTE, rest))


def literal(value: Any, where: str) -> Text:
    """Returns the only allowed spelling of a constant, which has no whitespace between its JSON tokens.

    Raises:
        GrammarRefused: the constant has an unpaired surrogate.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if any(0xD800 <= ord(char) <= 0xDFFF for char in text):
        raise GrammarRefused(f"{where}: has an unpaired surrogate")
    return Text(text)


def _short_escapes() -> Chars:
    return Chars(tuple((ord(char), ord(char)) for char in '"/\\bfnrt'))


def _unicode_escape() -> Node:
    """Returns the node of the four digits after `\\u`. After a high surrogate, the escape of a low surrogate must follow."""
    first = Chars(((0x30, 0x39), (0x41, 0x43), (0x45, 0x46), (0x61, 0x63), (0x65, 0x66)))
    d = Chars(((0x44, 0x44), (0x64, 0x64)))
    high = Chars(((0x38, 0x39), (0x41, 0x42), (0x61, 0x62)))
    low = Chars(((0x43, 0x46), (0x63, 0x66)))
    pair = Seq((d, high, _HEX, _HEX, Text("\\u"), d, low, _HEX, _HEX))
    return Alternatives((Seq((first, _HEX, _HEX, _HEX)), Seq((d, Chars(((0x30, 0x37),)), _HEX, _HEX)), pair))
