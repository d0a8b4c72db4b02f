"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as often as there are calls."""

from __future__ import annotations

from services.gateway.parsers.json_call import JsonCall
from services.gateway.parsers.reading import Outcome, Reading
from services.gateway.parsers.source import Marks, Steps

BEGIN, END = "<tool_call>", "</tool_call>"
_MARKS = Marks(BEGIN, END)


def read(reading: Reading) -> Steps[None]:
    source, writer = reading.source, reading.writer
    while mark := (yield from source.until(_MARKS, writer.text)):
        if mark == END:
            writer.stray(END)
            continue
        outcome = yield from reading.attempt(BEGIN, _call(reading))
        if outcome is Outcome.WHOLE:
            yield from reading.closed_by(END)
        elif outcome is Outcome.BROKEN:
            yield from reading.skip_rest((END,), (BEGIN,))


def _call(reading: Reading) -> Steps[None]:
    yield from reading.source.space()
    yield from JsonCall(reading, marked=True).read()
