"""Converts Python literals to JSON, character by character and without evaluation.

Accepted literals are strings in single or double quotes, numbers, True, False, None, true, false, null, lists, tuples (which
become arrays), and dicts with string keys. The nesting is at most MAX_CALL_DEPTH deep.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from services.gateway.parsers.json_text import OpenText
from services.gateway.parsers.parameter_types import quoted
from services.gateway.parsers.source import Malformed, Sink, Source, Steps, discard
from services.shared.limits import MAX_CALL_DEPTH

_WORD = re.compile(r"[A-Za-z_0-9]*")
_NUMBER = re.compile(r"[0-9.A-Za-z_+\-]*")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_PYTHON_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_BODY = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_SKIPPED = re.compile(r"""[^"'\\()\[\]{}<\n]*""")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = frozenset("0123456789abcdefABCDEF")


def literal(source: Source, out: OpenText) -> Steps[None]:
    """Writes JSON of one literal. Raises Malformed; the written text can then be closed."""
    first = yield from source.peek()
    if not first or (first in "[({" and len(out.closers) >= MAX_CALL_DEPTH):
        raise Malformed
    if first in _BODY:
        yield from _quoted(source, out)
    elif first in "[(":
        yield from _sequence(source, out)
    elif first == "{":
        yield from _dict(source, out)
    else:
        found = (yield from _word(source)) if first.isalpha() else (yield from _number(source))
        if source.was_cut:
            raise Malformed
        out.show(found)


def skip_brackets(source: Source, depth: int, marks: Sequence[str]) -> Steps[str]:
    """Reads on until `depth` open brackets are closed, and returns the last closing bracket.

    Returns "" if the text ends, or before a mark. A string ends at the end of its line.
    """
    quote = ""
    while True:
        yield from source.run(_SKIPPED, discard)
        if mark := (yield from source.choose(marks)):
            source.give_back(mark)
            return ""
        char = yield from source.peek()
        if not char:
            return ""
        yield from source.take()
        if quote:
            if char == "\\":
                yield from source.choose(("\\", '"', "'"))
            elif char in (quote, "\n"):
                quote = ""
        elif char in _BODY:
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if not depth:
                return char


def _quoted(source: Source, out: OpenText) -> Steps[None]:
    """Writes a string as it comes. An unpaired surrogate waits for the other half."""
    half = ""

    def show(text: str) -> None:
        nonlocal half
        text = half + text
        half = text[-1] if "\ud800" <= text[-1:] < "\udc00" else ""
        if len(text) > len(half):
            out.sink(quoted(_paired(text[: len(text) - len(half)]))[1:-1])

    out.begin_string()
    yield from _text(source, show)
    if half:
        out.sink(_paired(half))
    out.end_string()


def _text(source: Source, sink: Sink) -> Steps[None]:
    """Reads a string from its opening to its closing quote, and passes the decoded text to the sink. Raises Malformed."""
    quote = yield from source.take()
    if quote not in _BODY:
        raise Malformed
    while True:
        yield from source.run(_BODY[quote], sink)
        if (yield from source.take()) == quote:
            return
        sink((yield from _escaped(source)))


def _sequence(source: Source, out: OpenText) -> Steps[None]:
    closer = "]" if (yield from source.take()) == "[" else ")"
    out.open("[", "]")
    while not (yield from _closed(source, closer)):
        yield from literal(source, out)
        yield from _separated(source, closer)
        out.hold(", ")
    out.shut("]")


def _dict(source: Source, out: OpenText) -> Steps[None]:
    yield from source.take()
    out.open("{", "}")
    while not (yield from _closed(source, "}")):
        key: list[str] = []
        yield from _text(source, key.append)
        yield from source.space()
        yield from source.expect(":")
        yield from source.space()
        out.hold(quoted(_paired("".join(key))) + ": ")
        yield from literal(source, out)
        yield from _separated(source, "}")
        out.hold(", ")
    out.shut("}")


def _closed(source: Source, closer: str) -> Steps[bool]:
    yield from source.space()
    return bool((yield from source.choose((closer,))))


def _separated(source: Source, closer: str) -> Steps[None]:
    """Reads a comma. The comma may be missing before the closer, which stays unread. Raises Malformed."""
    yield from source.space()
    if not (yield from source.choose((",",))) and (yield from source.peek()) != closer:
        raise Malformed


def _word(source: Source) -> Steps[str]:
    pieces: list[str] = []
    yield from source.run(_WORD, pieces.append)
    found = _WORDS.get("".join(pieces))
    if found is None:
        raise Malformed
    return found


def _number(source: Source) -> Steps[str]:
    """Reads a number. Returns it unchanged if it is valid JSON, and otherwise converted. Raises Malformed."""
    pieces: list[str] = []
    yield from source.run(_NUMBER, pieces.append)
    written = "".join(pieces)
    value = float(written) if _PYTHON_NUMBER.fullmatch(written) else math.nan
    if not math.isfinite(value):
        raise Malformed
    return written if _JSON_NUMBER.fullmatch(written) else repr(value)


def _escaped(source: Source) -> Steps[str]:
    """Returns the character of the escape after a backslash. An unknown escape keeps its backslash, as in Python."""
    char = yield from source.take()
    if char in _DIGITS:
        return (yield from _code(source, char))
    if char in "\\'\"/":  # "/" is an escape in JSON only; models write JSON values if a grammar enforces a schema
        return char
    return _ESCAPES.get(char, f"\\{char}")


def _code(source: Source, kind: str) -> Steps[str]:
    digits = ""
    while len(digits) < _DIGITS[kind]:
        char = yield from source.peek()
        if not char:
            raise Malformed
        if char not in _HEX:
            return f"\\{kind}{digits}"
        digits += yield from source.take()
    code = int(digits, 16)
    return chr(code) if code <= 0x10FFFF else "\ufffd"


def _paired(text: str) -> str:
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
