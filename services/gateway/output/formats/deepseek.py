"""Reads DeepSeek's calls, which are in one section of the output.

V3 and R1 write the kind `function`, a name and fenced JSON. V3.1 writes a name and JSON.
"""

from __future__ import annotations

import re

from rootstock_llm.services.gateway.output.json_text import Breaks
from rootstock_llm.services.gateway.output.reading import CallFormat, Outcome, OutputReading
from rootstock_llm.services.gateway.output.source import Malformed, Steps

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
KIND, FENCE, FENCE_END = "function", "```json", "```"
_MARKS = (SECTION, SECTION_END, CALL, CALL_END, SEPARATOR)
_BREAKS = Breaks((f"{FENCE_END}{CALL_END}", CALL_END, SECTION_END), (SECTION, CALL))
_ENDS = (FENCE_END, CALL_END, SECTION_END, SECTION, CALL)  # texts that may follow a call without arguments
_NAME = re.compile(r"[^\s<`{]*")


def _read(reading: OutputReading, mark: str) -> Steps[None]:
    """Reads a call after its mark, or the section's first call after the section's mark."""
    outcome = yield from reading.attempt(mark, _call(reading, mark))
    if outcome is Outcome.COMPLETE:
        yield from reading.closed_by(FENCE_END)
        yield from reading.closed_by(CALL_END)
    elif outcome is Outcome.BROKEN:
        yield from reading.skip_rest((CALL_END,), (SECTION_END, SECTION, CALL))


def _call(reading: OutputReading, mark: str) -> Steps[None]:
    """Reads `function<｜tool▁sep｜>NAME` and arguments in a fence, or `NAME<｜tool▁sep｜>` and arguments.

    The separator may be missing after the name of a known tool. It is required if the output was cut off, because the name may
    then be incomplete.
    """
    source = reading.source
    if mark == SECTION:
        yield from source.space()
        yield from source.expect(CALL)
    name = yield from _name(reading)
    is_separated = bool((yield from source.choose((SEPARATOR,))))
    if not is_separated and (source.was_cut or not reading.writer.has_tool(name)):
        raise Malformed
    if is_separated and name == KIND:
        name = (yield from _name(reading)) or name
    yield from source.space()
    yield from source.choose((FENCE,))
    yield from source.space()
    has_body = yield from reading.body_comes(_ENDS)
    if not name or not (has_body or reading.writer.has_tool(name)):
        raise Malformed
    reading.begin(name)
    yield from reading.arguments(_BREAKS, _ENDS)


def _name(reading: OutputReading) -> Steps[str]:
    pieces: list[str] = []
    yield from reading.source.space()
    yield from reading.source.run(_NAME, pieces.append)
    yield from reading.source.space()
    return "".join(pieces)


DEEPSEEK = CallFormat((SECTION, CALL), _MARKS, _read)
