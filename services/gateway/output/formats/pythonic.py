"""Reads Llama's pythonic calls: `[name(key=literal, …), …]`, optionally between `<|python_start|>` and `<|python_end|>`.

Within a text, a bracket begins calls only if the name of a known tool follows. At the beginning of an output and after the
mark, any name begins a call. A call of an unknown tool is held until it is complete, because it may still turn out to be text.

Values are Python literals, which are converted to JSON character by character and without evaluation: strings in single or double
quotes, numbers, True, False, None, true, false, null, lists, tuples (which become arrays), and dicts with string keys. They are
nested at most MAX_CALL_DEPTH deep.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from rootstock_llm.services.gateway.output.json_text import OpenText
from rootstock_llm.services.gateway.output.parameter_types import quoted
from rootstock_llm.services.gateway.output.reading import CallFormat, Outcome, OutputReading
from rootstock_llm.services.gateway.output.source import Malformed, Sink, Source, Steps, discard
from rootstock_llm.services.shared.limits import MAX_CALL_DEPTH

START, STOP = "<|python_start|>", "<|python_end|>"
_MARKS = (START, STOP)
_NAME = re.compile(r"[\w.\-]*")
_TOOL = re.compile(r"[\w.:\-]*")
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


def _read(reading: OutputReading, mark: str) -> Steps[None]:
    if mark == "[":
        yield from _List(reading).read(mark, not reading.writer.wrote_text)
    else:
        yield from _List(reading).read(mark, True)
        yield from reading.closed_by(STOP)


class _List:
    """Reads a list of calls, after its opening bracket or after the mark before the bracket."""

    def __init__(self, reading: OutputReading) -> None:
        self._reading = reading
        self._depth = 0  # number of open brackets where a call was malformed; 0 if another list begins there

    def read(self, opening: str, any_name: bool) -> Steps[None]:
        """Reads calls until the list ends.

        Args:
            opening: The bracket or mark before the list, which has been read.
            any_name: Whether the name of an unknown tool also begins a call.
        """
        source = self._reading.source
        while True:
            outcome = yield from self._reading.attempt(opening, self._call(opening == START, any_name))
            if outcome is Outcome.NOT_A_CALL:
                return
            if outcome is Outcome.BROKEN and (not self._depth or (yield from skip_brackets(source, self._depth, _MARKS)) != ")"):
                return
            yield from source.space()
            yield from source.choose((",",))
            yield from source.space()
            if (yield from source.choose(("]",))) or (yield from source.choose(_MARKS)):
                return
            opening, any_name = "", True

    def _call(self, bracket_first: bool, any_name: bool) -> Steps[None]:
        reading = self._reading
        if bracket_first:
            yield from reading.source.space()
            yield from reading.source.expect("[")
        yield from reading.source.space()
        name = yield from _name(reading, _TOOL)
        yield from reading.source.expect("(")
        if reading.writer.has_tool(name):
            reading.begin(name)
            yield from self._arguments()
        elif any_name:
            yield from self._arguments()
            reading.begin(name)
        else:
            raise Malformed
        reading.writer.end()

    def _arguments(self) -> Steps[None]:
        """Reads the arguments and the closing bracket. Raises Malformed if the arguments are invalid or incomplete.

        Before it raises, it ends the call with the arguments read so far, unless a token limit cut off the output.
        """
        source, writer = self._reading.source, self._reading.writer
        out = OpenText(writer.arguments)
        out.open("{", "}")
        try:
            yield from source.space()
            while not (yield from source.choose((")",))):
                yield from self._argument(out)
                out.hold(", ")
                yield from source.choose((",",))
                yield from source.space()
        except Malformed:
            depth = len(out.closers)
            self._depth = 0 if depth == 1 and (yield from source.peek()) == "[" else depth
            if not source.was_cut:
                out.close()
                writer.end()
            raise
        out.shut("}")

    def _argument(self, out: OpenText) -> Steps[None]:
        source = self._reading.source
        key = yield from _name(self._reading, _NAME)
        yield from source.expect("=")
        yield from source.space()
        out.hold(f"{quoted(key)}: ")
        yield from literal(source, out)
        yield from source.space()
        if (yield from source.peek()) not in (",", ")"):
            raise Malformed


def _name(reading: OutputReading, chars: re.Pattern[str]) -> Steps[str]:
    """Reads a name and the blanks after it. Raises Malformed if no name comes."""
    pieces: list[str] = []
    yield from reading.source.run(chars, pieces.append)
    yield from reading.source.space()
    if not pieces:
        raise Malformed
    return "".join(pieces)


def literal(source: Source, out: OpenText) -> Steps[None]:
    """Reads one Python literal and writes it as JSON. After it raises Malformed, out.close() completes the written JSON."""
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
    """Skips text until `depth` open brackets are closed, and returns the last closing bracket.

    Returns "" if the text ends or a mark comes first. A line end closes an open string.
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
    """Reads a string and writes it as JSON piece by piece.

    Holds the first half of a surrogate pair until the second half is read.
    """
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
    """Reads the comma after an element. If `closer` comes instead, it stays unread. Raises Malformed if neither comes."""
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
    """Reads a number and returns it as JSON. A number that is valid JSON is unchanged. Raises Malformed."""
    pieces: list[str] = []
    yield from source.run(_NUMBER, pieces.append)
    written = "".join(pieces)
    value = float(written) if _PYTHON_NUMBER.fullmatch(written) else math.nan
    if not math.isfinite(value):
        raise Malformed
    return written if _JSON_NUMBER.fullmatch(written) else repr(value)


def _escaped(source: Source) -> Steps[str]:
    """Reads an escape after its backslash and returns its character. An unknown escape keeps its backslash, as in Python."""
    char = yield from source.take()
    if char in _DIGITS:
        return (yield from _code(source, char))
    if char in "\\'\"/":  # "/" is an escape only in JSON, which models write here if a grammar enforces a schema
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


PYTHONIC = CallFormat((START, "["), _MARKS, _read)
