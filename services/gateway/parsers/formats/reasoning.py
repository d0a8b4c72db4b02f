"""Reasoning between two marks at the beginning of an output, taken off what another parser then reads."""

from __future__ import annotations

import re

from services.gateway.parsers.output_parser import OutputParser, ParserSetup
from services.gateway.parsers.reading import Reading
from services.gateway.parsers.source import SPACE, Marks, Steps

_ALL = re.compile(r"[\s\S]*")


class ReasoningReader:
    """What comes before another parser's output, whose events stand behind its own. opened: the prompt ends with the opening
    mark. One for one output."""

    def __init__(self, marks: tuple[str, str], opened: bool, inner: OutputParser, setup: ParserSetup) -> None:
        self._begin, self._end = marks
        self._opened = opened
        self._inner = inner
        self._strays = [mark for mark in marks if mark in setup.hidden]

    def read(self, reading: Reading) -> Steps[None]:
        self._source, self._writer = reading.source, reading.writer
        blanks: list[str] = []
        yield from self._source.run(SPACE, blanks.append)
        begun = yield from self._source.choose((self._begin,))
        if begun or self._opened:
            yield from self._reasoning()
        else:
            self._pass("".join(blanks))
        yield from self._rest()
        self._writer.finish()
        self._writer.log.extend(self._inner.finish())

    def _reasoning(self) -> Steps[None]:
        if (yield from self._source.until(Marks(self._end), self._writer.reasoning)):
            self._writer.end_reasoning()
            yield from self._source.space()

    def _rest(self) -> Steps[None]:
        """All that follows, without marks that no text may show."""
        if not self._strays:
            yield from self._source.run(_ALL, self._pass)
            return
        while (yield from self._source.until(Marks(*self._strays), self._pass)):
            pass

    def _pass(self, text: str) -> None:
        self._writer.log.extend(self._inner.feed(text))
