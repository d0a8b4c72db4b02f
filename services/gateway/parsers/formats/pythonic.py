"""Reads Llama's pythonic calls: `[name(key=literal, …), …]`, optionally between `<|python_start|>` and `<|python_end|>`.

A bracket within a text begins calls only if the name of a known tool follows. At the beginning of an output and after the mark,
any name begins a call. A call of an unknown tool is held until it is complete, because it may still be text.
"""

from __future__ import annotations

import re

from services.gateway.parsers.json_text import OpenText
from services.gateway.parsers.parameter_types import quoted
from services.gateway.parsers.python_literal import literal, skip_brackets
from services.gateway.parsers.reading import CallFormat, Outcome, OutputReading
from services.gateway.parsers.source import Malformed, Steps

START, STOP = "<|python_start|>", "<|python_end|>"
_MARKS = (START, STOP)
_NAME = re.compile(r"[\w.\-]*")
_TOOL = re.compile(r"[\w.:\-]*")


def _read(reading: OutputReading, mark: str) -> Steps[None]:
    if mark == "[":
        yield from _List(reading).read(mark, not reading.writer.wrote_text)
    else:
        yield from _List(reading).read(mark, True)
        yield from reading.closed_by(STOP)


class _List:
    """The reader of a list of calls, after its bracket or after the mark before it."""

    def __init__(self, reading: OutputReading) -> None:
        self._reading = reading
        self._depth = 0  # open brackets at the point where a call is malformed; 0 if another list begins there

    def read(self, opening: str, any_name: bool) -> Steps[None]:
        """Reads calls until the list ends.

        Args:
            opening: The bracket or mark before the list, which has been read.
            any_name: Whether the name of an unknown tool begins a call too.
        """
        source = self._reading.source
        while True:
            outcome = yield from self._reading.attempt(opening, self._call(opening == START, any_name))
            if outcome is Outcome.NONE:
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
        if reading.writer.knows(name):
            reading.begin(name)
            yield from self._arguments()
        elif any_name:
            yield from self._arguments()
            reading.begin(name)
        else:
            raise Malformed
        reading.writer.end()

    def _arguments(self) -> Steps[None]:
        """Reads the arguments and the closing bracket. Raises Malformed if they break off; the call has then ended."""
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
    """Reads a name and blanks after it. Raises Malformed if no name comes."""
    pieces: list[str] = []
    yield from reading.source.run(chars, pieces.append)
    yield from reading.source.space()
    if not pieces:
        raise Malformed
    return "".join(pieces)


PYTHONIC = CallFormat((START, "["), _MARKS, _read)
