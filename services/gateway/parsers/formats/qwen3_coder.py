"""Qwen3-Coder: a function and its parameters between XML's marks, each value as bare text on lines of its own.

Texts are passed on as they come; a value of another type is passed on when it is whole.
"""

from __future__ import annotations

import re

from services.gateway.parsers import json_text
from services.gateway.parsers.parameter_types import as_json, parameter_types, quoted
from services.gateway.parsers.reading import Outcome, Reading
from services.gateway.parsers.source import Malformed, Marks, Sink, Steps, discard

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_MARKS = Marks(BEGIN, END, FUNCTION, FUNCTION_END)
_PARTS = Marks(PARAMETER, FUNCTION_END, END)
_VALUE_ENDS = Marks(f"\n{PARAMETER_END}", PARAMETER_END)
_NAME = re.compile(r"[^<>\n]*")
_STRING = frozenset({"string"})


def read(reading: Reading) -> Steps[None]:
    """Some of the models leave `<tool_call>` out: a function alone is a call too."""
    source, writer = reading.source, reading.writer
    while mark := (yield from source.until(_MARKS, writer.text)):
        if mark not in (BEGIN, FUNCTION):
            writer.stray(mark)
            continue
        outcome = yield from reading.attempt(mark, _call(reading, mark))
        if outcome is Outcome.WHOLE:
            yield from reading.closed_by(END)
        elif outcome is Outcome.BROKEN:
            yield from reading.skip_rest((END,), (BEGIN,))


def _call(reading: Reading, mark: str) -> Steps[None]:
    if mark == BEGIN:
        yield from reading.source.space()
        yield from reading.source.expect(FUNCTION)
    name = yield from _name(reading)
    reading.begin(name)
    yield from _Parameters(reading, name).read()
    reading.writer.end()


def _name(reading: Reading) -> Steps[str]:
    """Of a function or a parameter, and the bracket after it. Raises Malformed if there is none."""
    pieces: list[str] = []
    yield from reading.source.run(_NAME, pieces.append)
    yield from reading.source.expect(">")
    name = "".join(pieces).strip()
    if not name:
        raise Malformed
    return name


class _Parameters:
    """Of one call; what is written of them is one JSON object."""

    def __init__(self, reading: Reading, function: str) -> None:
        self._reading = reading
        self._schema = reading.schemas.get(function)
        self._before = "{"  # what stands before the next one

    def read(self) -> Steps[None]:
        source = self._reading.source
        while (part := (yield from source.until(_PARTS, discard))) == PARAMETER:
            source.record()
            key = yield from _name(self._reading)
            source.forget()
            yield from source.choose(("\n",))
            yield from self._parameter(key)
        if not part:
            raise Malformed
        if part == END:
            source.give_back(END)
        self._reading.writer.arguments("{}" if self._before == "{" else "}")

    def _parameter(self, key: str) -> Steps[None]:
        types = parameter_types(self._schema, key)
        begun = f"{self._before}{quoted(key)}: "
        self._before = ", "
        yield from (self._text(begun) if types == _STRING else self._value(begun, types))

    def _text(self, begun: str) -> Steps[None]:
        writer = self._reading.writer
        writer.arguments(f'{begun}"')
        yield from self._until_end(lambda piece: writer.arguments(quoted(piece)[1:-1]))
        writer.arguments('"')

    def _value(self, begun: str, types: frozenset[str]) -> Steps[None]:
        pieces: list[str] = []
        self._reading.source.record()
        if types and "string" not in types:
            yield from self._brackets(pieces.append)
        yield from self._until_end(pieces.append)
        self._reading.source.forget()
        self._reading.writer.arguments(begun + as_json("".join(pieces), types))

    def _brackets(self, sink: Sink) -> Steps[None]:
        """An object or array, if there is one: texts inside it may hold the marks that end a value."""
        yield from self._reading.source.space()
        if (yield from self._reading.source.peek()) in ("{", "["):
            yield from json_text.verbatim(self._reading.source, sink)

    def _until_end(self, sink: Sink) -> Steps[None]:
        if not (yield from self._reading.source.until(_VALUE_ENDS, sink)):
            raise Malformed
