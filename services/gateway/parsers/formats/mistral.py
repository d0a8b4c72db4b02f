"""Reads Mistral's calls: `[TOOL_CALLS]` before a list of `{"name": …, "arguments": {…}}`, or before each `NAME[ARGS]{…}`.

Some models write `[CALL_ID]` and an id between name and arguments. The id is skipped.
"""

from __future__ import annotations

import re

from services.gateway.parsers.json_call import JsonCall
from services.gateway.parsers.json_text import Breaks
from services.gateway.parsers.reading import CallFormat, Outcome, OutputReading
from services.gateway.parsers.source import Malformed, Marks, Steps, discard

BEGIN, ARGUMENTS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_MARKS = (BEGIN, ARGUMENTS, ID)
_ENDS = (BEGIN,)  # texts that may follow a call without arguments
_AFTER_ID = Marks(ARGUMENTS, BEGIN, "{")
_BREAKS = Breaks((), (BEGIN,))
_NAME = re.compile(r"[^\s\[\]{}\"]*")


def _read(reading: OutputReading, mark: str) -> Steps[None]:
    yield from _Calls(reading).read(mark)


class _Calls:
    """The calls after one mark."""

    def __init__(self, reading: OutputReading) -> None:
        self._reading = reading
        self._in_list = False

    def read(self, mark: str) -> Steps[None]:
        outcome = yield from self._reading.attempt(mark, self._first())
        while self._in_list and outcome is Outcome.WHOLE and (yield from self._another()):
            outcome = yield from self._reading.attempt("", self._object())
        if outcome is Outcome.BROKEN:
            yield from self._reading.skip_rest(("]",) if self._in_list else (), (BEGIN,))

    def _first(self) -> Steps[None]:
        source = self._reading.source
        yield from source.space()
        if (yield from source.choose(_MARKS)):
            raise Malformed
        self._in_list = bool((yield from source.choose(("[",))))
        yield from source.space()
        is_object = self._in_list or (yield from source.peek()) == "{"
        yield from (self._object() if is_object else _named(self._reading))

    def _another(self) -> Steps[bool]:
        """Reads the text between two objects of a list. Returns False if no object follows."""
        source = self._reading.source
        yield from source.space()
        yield from source.choose((",",))
        yield from source.space()
        return not (yield from source.choose(("]",))) and (yield from source.peek()) == "{"

    def _object(self) -> Steps[None]:
        yield from JsonCall(self._reading, True, _BREAKS).read()


def _named(reading: OutputReading) -> Steps[None]:
    """Reads a name and arguments. Raises Malformed if they are no call.

    The name must be a tool's if no object follows, or if neither a mark nor an object follows directly.
    """
    source, pieces = reading.source, list[str]()
    yield from source.run(_NAME, pieces.append)
    yield from source.space()
    name, mark = "".join(pieces), (yield from source.choose((ID, ARGUMENTS)))
    if mark == ID:
        mark = yield from source.until(_AFTER_ID, discard)
        if mark != ARGUMENTS:
            source.give_back(mark)
    yield from source.space()
    has_body, is_known = (yield from reading.body_comes(_ENDS)), reading.writer.knows(name)
    if not name or not (has_body or (mark and is_known)) or not (mark or is_known or (yield from source.peek()) == "{"):
        raise Malformed
    reading.begin(name)
    yield from reading.arguments(_BREAKS, _ENDS)


MISTRAL = CallFormat((BEGIN,), _MARKS, _read)
