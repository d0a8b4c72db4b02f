"""Llama 3: `{"name": …, "parameters": {…}}`, perhaps after `<|python_tag|>`, several with semicolons between them.

Where no mark says that an object is a call, its members do: any `{` may be one until something comes that a call has not.
"""

from __future__ import annotations

from services.gateway.parsers.json_call import JsonCall
from services.gateway.parsers.reading import Outcome, Reading
from services.gateway.parsers.source import Malformed, Marks, Steps

MARK = "<|python_tag|>"
_MARKS = Marks(MARK, "{")
_KEYS = tuple(f'"{key}"' for key in JsonCall.MEMBERS)


def read(reading: Reading) -> Steps[None]:
    source, writer = reading.source, reading.writer
    while mark := (yield from source.until(_MARKS, writer.text)):
        outcome = yield from reading.attempt(mark, _marked(reading) if mark == MARK else _call(reading))
        if outcome is Outcome.WHOLE:
            yield from reading.closed_by(";")


def _marked(reading: Reading) -> Steps[None]:
    yield from reading.source.space()
    yield from reading.source.expect("{")
    yield from _call(reading)


def _call(reading: Reading) -> Steps[None]:
    """From after the brace."""
    yield from reading.source.space()
    key = yield from reading.source.choose(_KEYS)
    if not key:
        raise Malformed
    yield from JsonCall(reading, marked=False).members(key.strip('"'))
