"""Reads the calls of Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` for each call."""

from __future__ import annotations

from services.gateway.parsers.json_call import JsonCall
from services.gateway.parsers.json_text import Breaks
from services.gateway.parsers.reading import CallFormat, Outcome, OutputReading
from services.gateway.parsers.source import Steps

BEGIN, END = "<tool_call>", "</tool_call>"
_BREAKS = Breaks((END,), (BEGIN,))


def _read(reading: OutputReading, mark: str) -> Steps[None]:
    outcome = yield from reading.attempt(mark, _call(reading))
    if outcome is Outcome.WHOLE:
        yield from reading.closed_by(END)
    elif outcome is Outcome.BROKEN:
        yield from reading.skip_rest((END,), (BEGIN,))


def _call(reading: OutputReading) -> Steps[None]:
    yield from reading.source.space()
    yield from JsonCall(reading, True, _BREAKS).read()


HERMES = CallFormat((BEGIN,), (BEGIN, END), _read)
