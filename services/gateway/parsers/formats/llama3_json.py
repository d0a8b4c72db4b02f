"""Reads Llama 3's calls: `{"name": …, "parameters": {…}}`, optionally after `<|python_tag|>`.

Several calls are separated by semicolons or form a list. Without the mark, any `{` may begin a call. The object is text if it has
a member that calls do not have.
"""

from __future__ import annotations

from services.gateway.parsers.json_call import JsonCall
from services.gateway.parsers.json_text import Breaks
from services.gateway.parsers.reading import CallFormat, Outcome, OutputReading
from services.gateway.parsers.source import Malformed, Steps

MARK = "<|python_tag|>"
_BREAKS = Breaks((), (MARK,))
_KEYS = tuple(f'"{key}"' for key in JsonCall.MEMBERS)


def _read(reading: OutputReading, mark: str) -> Steps[None]:
    outcome = yield from reading.attempt(mark, _call(reading) if mark == "{" else _behind_mark(reading, mark))
    if outcome is not Outcome.WHOLE:
        return
    if mark != "[":
        yield from reading.closed_by(";")
        return
    while (yield from _another(reading)):
        if (yield from reading.attempt("{", _call(reading))) is not Outcome.WHOLE:
            return


def _another(reading: OutputReading) -> Steps[bool]:
    """Reads the text between two objects of a list, with the brace of the second. Returns False if no object follows."""
    source = reading.source
    yield from source.space()
    yield from source.choose((",",))
    yield from source.space()
    return (yield from source.choose(("{", "]"))) == "{"


def _behind_mark(reading: OutputReading, mark: str) -> Steps[None]:
    yield from reading.source.space()
    yield from reading.source.expect("{")
    yield from _call(reading, mark == MARK)


def _call(reading: OutputReading, marked: bool = False) -> Steps[None]:
    """Reads a call after its brace. A call after a mark may have no parameters."""
    yield from reading.source.space()
    key = yield from reading.source.choose(_KEYS)
    if not key:
        raise Malformed
    yield from JsonCall(reading, marked, _BREAKS).members(key.strip('"'))


LLAMA3_JSON = CallFormat((MARK, "{", "["), (MARK,), _read)
