"""DeepSeek: calls between marks, in one section. V3 and R1 write a kind, a name and fenced JSON; V3.1 a name and JSON."""

from __future__ import annotations

import re

from services.gateway.parsers import json_text
from services.gateway.parsers.reading import Outcome, Reading
from services.gateway.parsers.source import Malformed, Marks, Steps

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
KIND, FENCE, FENCE_END = "function", "```json", "```"
_MARKS = Marks(SECTION, SECTION_END, CALL, CALL_END, SEPARATOR)
_NAME = re.compile(r"[^\s<`{]*")


def read_fenced(reading: Reading) -> Steps[None]:
    """`function<｜tool▁sep｜>NAME`, and arguments in a fence."""
    yield from _read(reading, fenced=True)


def read_bare(reading: Reading) -> Steps[None]:
    """`NAME<｜tool▁sep｜>` and arguments."""
    yield from _read(reading, fenced=False)


def _read(reading: Reading, fenced: bool) -> Steps[None]:
    source, writer = reading.source, reading.writer
    while mark := (yield from source.until(_MARKS, writer.text)):
        if mark in (SECTION, CALL):
            yield from _call(reading, mark, fenced)
        elif not writer.called:
            writer.stray(mark)


def _call(reading: Reading, mark: str, fenced: bool) -> Steps[None]:
    outcome = yield from reading.attempt(mark, _open(reading, mark, fenced))
    if outcome is Outcome.WHOLE and fenced:
        yield from reading.closed_by(FENCE_END)
    if outcome is Outcome.WHOLE:
        yield from reading.closed_by(CALL_END)
    elif outcome is Outcome.BROKEN:
        yield from reading.skip_rest((CALL_END,), (SECTION_END, CALL))


def _open(reading: Reading, mark: str, fenced: bool) -> Steps[None]:
    source, writer = reading.source, reading.writer
    if mark == SECTION:
        yield from source.space()
        yield from source.expect(CALL)
    name = yield from (_fenced_name(reading) if fenced else _bare_name(reading))
    yield from source.space()
    if not name or (yield from source.peek()) != "{":
        raise Malformed
    reading.begin(name)
    yield from json_text.verbatim(source, writer.arguments)
    writer.end()


def _fenced_name(reading: Reading) -> Steps[str]:
    source = reading.source
    yield from source.expect(KIND)
    yield from source.expect(SEPARATOR)
    name = yield from _name(reading)
    yield from source.space()
    yield from source.expect(FENCE)
    return name


def _bare_name(reading: Reading) -> Steps[str]:
    name = yield from _name(reading)
    yield from reading.source.expect(SEPARATOR)
    return name


def _name(reading: Reading) -> Steps[str]:
    pieces: list[str] = []
    yield from reading.source.space()
    yield from reading.source.run(_NAME, pieces.append)
    yield from reading.source.space()
    return "".join(pieces)
