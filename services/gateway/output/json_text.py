"""Reads the JSON that a model writes, in one pass, and writes valid JSON.

Valid JSON is written unchanged. Invalid JSON is repaired:

- Control characters in a string are escaped. A backslash that begins no escape is doubled.
- A comma without a value is dropped. `True`, `False` and `None` become `true`, `false` and `null`.
- Open strings and brackets are closed if the output ends, or if an outer bracket is closed.
- An invalid value ends the JSON: open brackets are closed, and the rest of the object is skipped.

A comma or a key is written only when its value begins. The written text can therefore be closed at any time.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence

from rootstock_llm.services.gateway.output.parameter_types import quoted
from rootstock_llm.services.gateway.output.source import SPACE, Malformed, Sink, Source, Steps, discard
from rootstock_llm.services.shared.limits import MAX_CALL_DEPTH

_SCALAR = re.compile(r"[-+.0-9A-Za-z_]*")
_SCALAR_CHARS = 400  # maximum characters of a number; every finite float is shorter
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {word: word for word in ("true", "false", "null")} | {"True": "true", "False": "false", "None": "null"}
_CLOSERS = {"{": "}", "[": "]"}
_UNQUOTED = re.compile(r'[^"\\]*')
_BLANKS = frozenset(" \t\r\n")
_BEHIND_STRING = frozenset(" \t\r\n,:}]")  # characters that may follow a closing quote
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_UNPAIRED = "\ufffd"  # replaces an unpaired surrogate
_HEX = frozenset("0123456789abcdefABCDEF")


class Breaks:
    """The marks of a format that end a call. They may end it even inside a string, because a model may omit the closing quote.

    A string may also contain a mark as ordinary text. The reader therefore looks ahead from a mark to the next quote. The mark
    ends the string if no quote follows, or if the character after that quote cannot follow a string.
    """

    def __init__(self, ends: Sequence[str] = (), begins: Sequence[str] = ()) -> None:
        """Compiles the patterns.

        Args:
            ends: Marks that end a call.
            begins: Marks that begin the next call.
        """
        self.marks = (*ends, *begins)
        self._in_strings = (*self.marks, *(f"\n{mark}" for mark in self.marks))
        self.firsts = frozenset(mark[0] for mark in self.marks)
        firsts = re.escape("".join(sorted(self.firsts)))
        self.plain = re.compile(rf'[^"\\\x00-\x1f{firsts}]*')  # run of characters inside a string that is written
        self.quoted = re.compile(rf'[^"\\{firsts}]*')  # run of characters inside a string that is skipped
        self.outside = re.compile(rf'[^"\[\]{{}}{firsts}]*')  # run of characters outside strings that is skipped

    def mark_inside(self, source: Source) -> Steps[str]:
        """Reads and returns the mark that comes next inside a string; "" if no mark comes next.

        Raises Malformed if the mark ends the string.
        """
        mark = yield from source.choose(self._in_strings)
        if mark and (yield from self._ends_string(source)):
            source.give_back(mark)
            raise Malformed
        return mark

    def _ends_string(self, source: Source) -> Steps[bool]:
        """Returns whether the mark that was just read ends the string; see the class. Reads nothing."""
        read: list[str] = []
        while True:
            yield from source.run(_UNQUOTED, read.append)
            char = yield from source.peek()
            if char != "\\":
                break
            read.append((yield from source.take()))
            read.append((yield from source.choose(("\\", '"'))))
        read.append((yield from source.choose(('"',))))
        behind = yield from source.peek()
        source.give_back("".join(read))
        return not char or bool(behind and behind not in _BEHIND_STRING)


NO_BREAKS = Breaks()


class OpenText:
    """Writes JSON text to a sink piece by piece. close() makes the written text valid JSON at any point."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.closers: list[str] = []  # closing bracket of each open bracket, outermost first
        self._held: list[str] = []
        self._in_string = False

    def hold(self, text: str) -> None:
        """Holds text, such as a comma or a key, until the next value is written. If no value follows, the text is dropped."""
        self._held.append(text)

    def show(self, text: str) -> None:
        if self._held:
            text = "".join([*self._held, text])
            self._held = []
        self.sink(text)

    def open(self, bracket: str, closer: str) -> None:
        self.show(bracket)
        self.closers.append(closer)

    def shut(self, closer: str) -> None:
        """Closes open brackets up to and including the innermost one whose closing bracket is `closer`. Drops a held comma."""
        self._held = [text for text in self._held if text not in (",", ", ")]
        while self.closers[-1] != closer:
            self.show(self.closers.pop())
        self.show(self.closers.pop())

    def begin_string(self) -> None:
        self.show('"')
        self._in_string = True

    def end_string(self) -> None:
        self.sink('"')
        self._in_string = False

    def close(self) -> None:
        """Closes the open string and all open brackets. Drops held text."""
        closing = "".join(['"' * self._in_string, *reversed(self.closers)])
        self._held, self.closers, self._in_string = [], [], False
        if closing:
            self.sink(closing)


def repaired(source: Source, sink: Sink, breaks: Breaks = NO_BREAKS) -> Steps[bool]:
    """Reads the object or array that comes next, and writes it as valid JSON to the sink.

    Returns:
        True if its closing bracket was read. False if the text ends, or a mark of `breaks` comes, before the closing bracket.
    """
    return (yield from _JsonRepairer(source, sink, breaks).read())


def repaired_text(text: str) -> str | None:
    """Returns the object or array in `text` as valid JSON. None if a value cannot be repaired, or if more text follows."""
    source, pieces = Source(), list[str]()
    source.add(text.strip())
    source.close()
    repairer = _JsonRepairer(source, pieces.append, NO_BREAKS)
    assert next(repairer.read(), True) is True, "reading a closed source never waits for more text"
    return None if repairer.lost or source.unread else "".join(pieces)


class _JsonRepairer:
    """Repairs one object or array."""

    def __init__(self, source: Source, sink: Sink, breaks: Breaks) -> None:
        self._source = source
        self._breaks = breaks
        self._out = OpenText(sink)
        self._after_value = False
        self.lost = False  # whether a value could not be repaired and was dropped

    def read(self) -> Steps[bool]:
        try:
            yield from self._bracket()
            while self._out.closers:
                yield from self._next()
            return True
        except Malformed:
            if self._source.was_cut:
                return False
        closers = list(self._out.closers)
        self._out.close()
        if not (yield from self._source.peek()):
            return False
        self.lost = True
        return (yield from self._skip(closers))

    def _next(self) -> Steps[None]:
        """Reads the next element: a closing bracket, a comma, or a value (in an object, with its key)."""
        source, out = self._source, self._out
        char = yield from source.peek()
        if char in _BLANKS:
            yield from source.run(SPACE, out.hold)
            char = yield from source.peek()
        if char and char in "]}":
            yield from source.take()
            if char not in out.closers:
                raise Malformed
            out.shut(char)
            self._after_value = True
        elif char == ",":
            yield from source.take()
            if self._after_value:
                out.hold(",")
                self._after_value = False
        elif self._after_value:
            raise Malformed
        else:
            if out.closers[-1] == "}":
                yield from self._key()
            yield from self._value()

    def _key(self) -> Steps[None]:
        source, out = self._source, self._out
        yield from source.expect('"')
        out.hold('"')
        yield from self._chars(out.hold)
        out.hold('"')
        if not (yield from source.choose((":",))):
            yield from source.run(SPACE, out.hold)
            yield from source.expect(":")
        out.hold(":")
        yield from source.run(SPACE, out.hold)

    def _value(self) -> Steps[None]:
        source, out = self._source, self._out
        char = yield from source.peek()
        if char == '"':
            yield from source.take()
            out.begin_string()
            yield from self._chars(out.sink)
            out.end_string()
            self._after_value = True
        elif char and char in _CLOSERS:
            yield from self._bracket()
        else:
            out.show((yield from self._scalar()))
            self._after_value = True

    def _bracket(self) -> Steps[None]:
        if len(self._out.closers) >= MAX_CALL_DEPTH:
            raise Malformed
        bracket = yield from self._source.take()
        self._out.open(bracket, _CLOSERS[bracket])
        self._after_value = False

    def _scalar(self) -> Steps[str]:
        """Reads a number or a word and returns it as JSON.

        Raises Malformed if it is invalid, or if the output was cut off within it.
        """
        word = yield from scalar(self._source, _SCALAR)
        if word in _WORDS and not self._source.was_cut:
            return _WORDS[word]
        if self._source.was_cut or len(word) > _SCALAR_CHARS or not _NUMBER.fullmatch(word) or not math.isfinite(float(word)):
            self.lost = True
            raise Malformed
        return word

    def _chars(self, sink: Sink) -> Steps[None]:
        yield from _chars(self._source, sink, self._breaks, _valid_escape, _escaped)

    def _skip(self, closers: list[str]) -> Steps[bool]:
        """Skips text until all open brackets are closed, or up to a mark, which stays unread.

        A closing bracket that matches no open bracket is ignored.

        Args:
            closers: The closing brackets of the open brackets, outermost first.

        Returns:
            Whether the outermost bracket was closed.
        """
        source, breaks, in_string = self._source, self._breaks, False
        num_open = Counter(closers)
        while closers:
            yield from source.run(breaks.quoted if in_string else breaks.outside, discard)
            char = yield from source.peek()
            if not char:
                return False
            if char in breaks.firsts and (mark := (yield from source.choose(breaks.marks))):
                source.give_back(mark)
                return False
            yield from source.take()
            if char == '"':
                in_string = not in_string
            elif in_string:
                if char == "\\":
                    yield from source.choose(('"', "\\"))
            elif char in _CLOSERS:
                closers.append(_CLOSERS[char])
                num_open[_CLOSERS[char]] += 1
            elif num_open[char]:
                closed = ""
                while closed != char:
                    closed = closers.pop()
                    num_open[closed] -= 1
        return True


def skip(source: Source, breaks: Breaks = NO_BREAKS) -> Steps[None]:
    """Reads one JSON value and drops it. Raises Malformed if it is invalid."""
    first = yield from source.peek()
    if first and first in _CLOSERS:
        if not (yield from repaired(source, discard, breaks)):
            raise Malformed
    elif first == '"':
        yield from string(source, breaks)
    else:
        yield from scalar(source)


_ANY_SCALAR = re.compile(r'[^\s,:"\[\]{}]*')


def scalar(source: Source, chars: re.Pattern[str] = _ANY_SCALAR) -> Steps[str]:
    """Reads a number or a word: a run of `chars`. Raises Malformed if the run is empty."""
    pieces: list[str] = []
    yield from source.run(chars, pieces.append)
    if not pieces:
        raise Malformed
    return "".join(pieces)


def string(source: Source, breaks: Breaks = NO_BREAKS) -> Steps[str]:
    """Reads a string and returns its decoded text. Raises Malformed."""
    pieces: list[str] = []
    yield from source.expect('"')
    yield from decoded(source, pieces.append, breaks)
    return "".join(pieces)


def decoded(source: Source, sink: Sink, breaks: Breaks = NO_BREAKS) -> Steps[None]:
    """Reads the rest of a string after its opening quote, and passes the decoded text to the sink. Raises Malformed."""
    yield from _chars(source, sink, breaks, _decoded_escape, str)


def _chars(
    source: Source, sink: Sink, breaks: Breaks, escape: Callable[[Source], Steps[str]], raw: Callable[[str], str]
) -> Steps[None]:
    """Reads the characters of a string up to and including its closing quote. Raises Malformed.

    Args:
        escape: Reads the characters of an escape after its backslash, and returns the text for the sink.
        raw: Converts a control character or a mark to the text for the sink.
    """
    while True:
        yield from source.run(breaks.plain, sink)
        char = yield from source.peek()
        if (char in breaks.firsts or char == "\n") and (mark := (yield from breaks.mark_inside(source))):
            sink(raw(mark))
            breaks = NO_BREAKS  # mark_inside() has found that the next quote closes the string, so marks before it are text
            continue
        yield from source.take()
        if char == '"':
            return
        sink((yield from escape(source)) if char == "\\" else raw(char))


def _escaped(text: str) -> str:
    return quoted(text)[1:-1]


def _valid_escape(source: Source) -> Steps[str]:
    """Reads an escape after its backslash and returns a valid JSON escape.

    The backslash of an unknown escape is doubled. An unpaired surrogate becomes U+FFFD.
    """
    char = yield from source.take()
    if char != "u":
        return f"\\{char}" if char in _ESCAPES else f"\\\\{_escaped(char)}"
    out, code = "", (yield from _code(source))
    while _is_high(code) and (yield from source.choose(("\\u",))):
        low = yield from _code(source)
        if _is_low(low):
            return f"{out}\\u{code}\\u{low}"
        out, code = out + r"\ufffd", low
    if len(code) < 4:
        return f"{out}\\\\u{code}"
    return out + (r"\ufffd" if _is_high(code) or _is_low(code) else f"\\u{code}")


def _decoded_escape(source: Source) -> Steps[str]:
    """Reads an escape after its backslash and returns its character. An unpaired surrogate becomes U+FFFD."""
    char = yield from source.take()
    if char != "u":
        return _ESCAPES.get(char, f"\\{char}")
    out, code = "", (yield from _code(source))
    while _is_high(code) and (yield from source.choose(("\\u",))):
        low = yield from _code(source)
        if _is_low(low):
            return out + chr(0x10000 + ((int(code, 16) - 0xD800) << 10) + (int(low, 16) - 0xDC00))
        out, code = out + _UNPAIRED, low
    if len(code) < 4:
        return f"{out}\\u{code}"
    return out + (_UNPAIRED if _is_high(code) or _is_low(code) else chr(int(code, 16)))


def _is_high(code: str) -> bool:
    return len(code) == 4 and 0xD800 <= int(code, 16) < 0xDC00


def _is_low(code: str) -> bool:
    return len(code) == 4 and 0xDC00 <= int(code, 16) < 0xE000


def _code(source: Source) -> Steps[str]:
    """Reads up to four hexadecimal digits. Raises Malformed if the text ends before the fourth."""
    digits = ""
    while len(digits) < 4:
        char = yield from source.peek()
        if not char:
            raise Malformed
        if char not in _HEX:
            break
        digits += yield from source.take()
    return digits
