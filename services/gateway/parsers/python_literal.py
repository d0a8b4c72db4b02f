"""A literal of Python turned into JSON's text, read character by character. Nothing is evaluated.

Taken: texts in either quotes, numbers, True, False and None (JSON's words too), lists, tuples (as arrays), and dicts whose keys
are texts. Depth is bounded by MAX_CALL_DEPTH, length by the source's record.
"""

from __future__ import annotations

import math
import re

from services.gateway.parsers.parameter_types import quoted
from services.gateway.parsers.source import Malformed, Sink, Source, Steps
from services.shared.limits import MAX_CALL_DEPTH

_WORD = re.compile(r"[A-Za-z_]*")
_NUMBER = re.compile(r"[0-9.eE+\-]*")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_PYTHON_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_BODY = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = frozenset("0123456789abcdefABCDEF")


def literal(source: Source, sink: Sink, depth: int) -> Steps[None]:
    """Passes JSON of one literal to the sink. depth: of what is around it. Raises Malformed."""
    first = yield from source.peek()
    if not first or (first in "[({" and depth >= MAX_CALL_DEPTH):
        raise Malformed
    if first in _BODY:
        sink(quoted((yield from text(source))))
    elif first in "[(":
        yield from _sequence(source, sink, depth)
    elif first == "{":
        yield from _dict(source, sink, depth)
    else:
        sink((yield from _word(source)) if first.isalpha() else (yield from _number(source)))


def text(source: Source) -> Steps[str]:
    """A text, decoded, from its opening quote. Raises Malformed. A lone surrogate is U+FFFD."""
    quote = yield from source.take()
    if quote not in _BODY:
        raise Malformed
    pieces: list[str] = []
    while True:
        yield from source.run(_BODY[quote], pieces.append)
        if (yield from source.take()) == quote:
            return _paired("".join(pieces))
        pieces.append((yield from _escaped(source)))


def _sequence(source: Source, sink: Sink, depth: int) -> Steps[None]:
    closer = "]" if (yield from source.take()) == "[" else ")"
    separator = "["
    while not (yield from _closed(source, closer)):
        sink(separator)
        yield from literal(source, sink, depth + 1)
        yield from _separated(source, closer)
        separator = ", "
    sink("[]" if separator == "[" else "]")


def _dict(source: Source, sink: Sink, depth: int) -> Steps[None]:
    yield from source.take()
    separator = "{"
    while not (yield from _closed(source, "}")):
        sink(separator + quoted((yield from text(source))))
        yield from source.space()
        yield from source.expect(":")
        sink(": ")
        yield from source.space()
        yield from literal(source, sink, depth + 1)
        yield from _separated(source, "}")
        separator = ", "
    sink("{}" if separator == "{" else "}")


def _closed(source: Source, closer: str) -> Steps[bool]:
    yield from source.space()
    return bool((yield from source.choose((closer,))))


def _separated(source: Source, closer: str) -> Steps[None]:
    """A comma, or nothing before the closer, which stays. Raises Malformed."""
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
    """As it stands where JSON writes it so too."""
    pieces: list[str] = []
    yield from source.run(_NUMBER, pieces.append)
    written = "".join(pieces)
    if _JSON_NUMBER.fullmatch(written):
        return written
    value = float(written) if _PYTHON_NUMBER.fullmatch(written) else math.nan
    if not math.isfinite(value):
        raise Malformed
    return repr(value)


def _escaped(source: Source) -> Steps[str]:
    """What follows a backslash; one that is no escape stands for itself, with its backslash, as in Python."""
    char = yield from source.take()
    if char in _DIGITS:
        return (yield from _code(source, _DIGITS[char]))
    if char in "\\'\"/":  # the last one as in JSON, which is what calls that are held to a schema are written in
        return char
    return _ESCAPES.get(char, f"\\{char}")


def _code(source: Source, count: int) -> Steps[str]:
    digits = ""
    while len(digits) < count:
        char = yield from source.take()
        if char not in _HEX:
            raise Malformed
        digits += char
    if int(digits, 16) > 0x10FFFF:
        raise Malformed
    return chr(int(digits, 16))


def _paired(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
