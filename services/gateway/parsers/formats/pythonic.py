"""Llama's pythonic calls: `[name(key=literal, …), …]`, perhaps between `<|python_start|>` and `<|python_end|>`.

A bracket in the middle of a text begins calls only if a tool's name follows it; at the beginning of an output, or after the
mark, any name does. Calls of unknown tools are held until they are whole, for they may still be text.
"""

from __future__ import annotations

import re

from services.gateway.parsers.parameter_types import quoted
from services.gateway.parsers.python_literal import literal
from services.gateway.parsers.reading import Outcome, Reading
from services.gateway.parsers.source import SPACE, Malformed, Marks, Steps

START, STOP = "<|python_start|>", "<|python_end|>"
_MARKS = Marks(START, STOP, "[")
_NAME = re.compile(r"[\w.\-]*")
_TOOL = re.compile(r"[\w.:\-]*")


def read(reading: Reading) -> Steps[None]:
    source, writer = reading.source, reading.writer
    while mark := (yield from source.until(_MARKS, writer.text)):
        if mark == STOP:
            writer.stray(STOP)
        elif mark == START:
            yield from _marked(reading)
        else:
            yield from _list(reading, "[", not writer.wrote_text)


def _marked(reading: Reading) -> Steps[None]:
    opening = [START]
    yield from reading.source.run(SPACE, opening.append)
    bracket = yield from reading.source.choose(("[",))
    opening.append(bracket)
    if not bracket:
        reading.writer.stray("".join(opening))
        return
    yield from _list(reading, "".join(opening), True)
    yield from reading.closed_by(STOP)


def _list(reading: Reading, opening: str, any_name: bool) -> Steps[None]:
    """From after its bracket. opening: what has been read of it."""
    source = reading.source
    while True:
        outcome = yield from reading.attempt(opening, _call(reading, any_name))
        if outcome is Outcome.BROKEN:
            yield from reading.skip_rest(("]",), (START,))
        if outcome is not Outcome.WHOLE:
            return
        yield from source.space()
        yield from source.choose((",",))
        yield from source.space()
        if (yield from source.choose(("]",))):
            return
        opening, any_name = "", True


def _call(reading: Reading, any_name: bool) -> Steps[None]:
    yield from reading.source.space()
    name = yield from _name(reading, _TOOL)
    yield from reading.source.expect("(")
    if reading.writer.knows(name):
        reading.begin(name)
        yield from _arguments(reading)
    elif any_name:
        yield from _arguments(reading)
        reading.begin(name)
    else:
        raise Malformed
    reading.writer.end()


def _name(reading: Reading, chars: re.Pattern[str]) -> Steps[str]:
    """Raises Malformed if there is none."""
    pieces: list[str] = []
    yield from reading.source.run(chars, pieces.append)
    yield from reading.source.space()
    if not pieces:
        raise Malformed
    return "".join(pieces)


def _arguments(reading: Reading) -> Steps[None]:
    """From after the bracket to the one that closes it. Raises Malformed."""
    source, writer, before = reading.source, reading.writer, "{"
    yield from source.space()
    while not (yield from source.choose((")",))):
        yield from _argument(reading, before)
        before = ", "
        yield from source.choose((",",))
        yield from source.space()
    writer.arguments("{}" if before == "{" else "}")


def _argument(reading: Reading, before: str) -> Steps[None]:
    source, pieces = reading.source, list[str]()
    held = source.recording
    if not held:
        source.record()
    key = yield from _name(reading, _NAME)
    yield from source.expect("=")
    yield from source.space()
    yield from literal(source, pieces.append, 1)
    yield from source.space()
    if (yield from source.peek()) not in (",", ")"):
        raise Malformed
    if not held:
        source.forget()
    reading.writer.arguments("".join([before, quoted(key), ": ", *pieces]))
