"""JSON as it comes: values passed on as they are written, and strings as what they mean.

Only what tells where a value ends is checked: quotes, brackets and their depth. What a model writes between them is its own.
"""

from __future__ import annotations

import re

from services.gateway.parsers.source import Malformed, Sink, Source, Steps, discard
from services.shared.limits import MAX_CALL_DEPTH

_OUTSIDE = re.compile(r'[^"\[\]{}]*')
_INSIDE = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r'[^\s,:"\[\]{}]*')
_CLOSERS = {"{": "}", "[": "]"}
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_UNPAIRED = "\ufffd"
_HEX = frozenset("0123456789abcdefABCDEF")


def verbatim(source: Source, sink: Sink) -> Steps[None]:
    """An object or array. Raises Malformed, also for one that is nested more than MAX_CALL_DEPTH deep."""
    closers: list[str] = []
    while True:
        yield from source.run(_OUTSIDE, sink)
        char = yield from source.take()
        if char in _CLOSERS:
            closers.append(_CLOSERS[char])
        elif char != '"' and char != closers.pop():
            raise Malformed
        if len(closers) > MAX_CALL_DEPTH:
            raise Malformed
        sink(char)
        if char == '"':
            yield from _quoted(source, sink)
        if not closers:
            return


def skip(source: Source) -> Steps[None]:
    """Any value. Raises Malformed."""
    first = yield from source.peek()
    if first and first in _CLOSERS:
        yield from verbatim(source, discard)
    elif first == '"':
        yield from source.take()
        yield from _quoted(source, discard)
    else:
        yield from scalar(source)


def scalar(source: Source) -> Steps[str]:
    """A number or a word. Raises Malformed if there is none."""
    pieces: list[str] = []
    yield from source.run(_SCALAR, pieces.append)
    if not pieces:
        raise Malformed
    return "".join(pieces)


def string(source: Source) -> Steps[str]:
    """A string, decoded. Raises Malformed."""
    pieces: list[str] = []
    yield from source.expect('"')
    yield from decoded(source, pieces.append)
    return "".join(pieces)


def decoded(source: Source, sink: Sink) -> Steps[None]:
    """What a string means, from after its opening quote to its closing one. Raises Malformed."""
    while True:
        yield from source.run(_INSIDE, sink)
        if (yield from source.take()) == '"':
            return
        sink((yield from _escaped(source)))


def _quoted(source: Source, sink: Sink) -> Steps[None]:
    """As it is written, from after the opening quote to the closing one."""
    while True:
        yield from source.run(_INSIDE, sink)
        char = yield from source.take()
        sink(char)
        if char == '"':
            return
        sink((yield from source.take()))


def _escaped(source: Source) -> Steps[str]:
    """The character after a backslash. A surrogate without its other half is U+FFFD, as elsewhere."""
    char = yield from source.take()
    if char != "u":
        if char not in _ESCAPES:
            raise Malformed
        return _ESCAPES[char]
    unpaired = ""
    code = yield from _code(source)
    while 0xD800 <= code < 0xDC00 and (yield from source.choose(("\\u",))):
        low = yield from _code(source)
        if 0xDC00 <= low < 0xE000:
            return unpaired + chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
        unpaired, code = unpaired + _UNPAIRED, low
    return unpaired + (_UNPAIRED if 0xD800 <= code < 0xE000 else chr(code))


def _code(source: Source) -> Steps[int]:
    digits = ""
    while len(digits) < 4:
        char = yield from source.take()
        if char not in _HEX:
            raise Malformed
        digits += char
    return int(digits, 16)
