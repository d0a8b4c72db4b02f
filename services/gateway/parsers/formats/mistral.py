"""Mistral: `[TOOL_CALLS]` and either a list of `{"name": …, "arguments": {…}}`, or `NAME[ARGS]{…}`, the mark before each.

Between name and arguments some of the models write `[CALL_ID]` and an id, which nobody asks for.
"""

from __future__ import annotations

import re

from services.gateway.parsers import json_text
from services.gateway.parsers.json_call import JsonCall
from services.gateway.parsers.reading import Outcome, Reading
from services.gateway.parsers.source import SPACE, Malformed, Marks, Steps, discard

BEGIN, ARGUMENTS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_MARKS = Marks(BEGIN, ARGUMENTS, ID)
_NAME = re.compile(r"[^\s\[\]{}\"]*")


def read(reading: Reading) -> Steps[None]:
    source, writer = reading.source, reading.writer
    mark = yield from source.until(_MARKS, writer.text)
    while mark:
        opening, another = [mark], ""
        if mark == BEGIN:
            yield from source.run(SPACE, opening.append)
            another = yield from source.choose((BEGIN, ARGUMENTS, ID))
        if mark != BEGIN or another:
            writer.stray("".join(opening))
        elif (yield from source.choose(("[",))):
            yield from _list(reading, "".join([*opening, "["]))
        else:
            yield from _alone(reading, "".join(opening))
        mark = another or (yield from source.until(_MARKS, writer.text))


def _list(reading: Reading, opening: str) -> Steps[None]:
    """From after its bracket. opening: what has been read of it."""
    source = reading.source
    while True:
        outcome = yield from reading.attempt(opening, _element(reading))
        if outcome is Outcome.BROKEN:
            yield from reading.skip_rest(("]",), (BEGIN,))
        if outcome is not Outcome.WHOLE:
            return
        yield from source.space()
        if not (yield from source.choose((",",))):
            yield from source.choose(("]",))
            return
        opening = ""


def _element(reading: Reading) -> Steps[None]:
    yield from reading.source.space()
    yield from JsonCall(reading, marked=True).read()


def _alone(reading: Reading, opening: str) -> Steps[None]:
    first = yield from reading.source.peek()
    call = JsonCall(reading, marked=True).read() if first == "{" else _named(reading)
    if (yield from reading.attempt(opening, call)) is Outcome.BROKEN:
        yield from reading.skip_rest((), (BEGIN,))


def _named(reading: Reading) -> Steps[None]:
    source, writer, name = reading.source, reading.writer, list[str]()
    yield from source.run(_NAME, name.append)
    yield from source.space()
    if (yield from source.choose((ID, ARGUMENTS))) == ID:
        yield from source.until(Marks(ARGUMENTS), discard)
    yield from source.space()
    if not name or (yield from source.peek()) != "{":
        raise Malformed
    reading.begin("".join(name))
    yield from json_text.verbatim(source, writer.arguments)
    writer.end()
