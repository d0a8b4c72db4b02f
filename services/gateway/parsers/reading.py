"""What the formats share: a coroutine over a source that writes events, and calls that may turn out to be none."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence

from services.gateway.parsers.event_writer import EventWriter
from services.gateway.parsers.events import Event
from services.gateway.parsers.output_parser import ParserSetup, Schema
from services.gateway.parsers.source import SPACE, Malformed, Marks, Source, Steps, discard

MAX_REREAD_CHARS = 128  # of what looked like a call: as long as one's head. Longer text is not looked through again


class Outcome(enum.Enum):
    WHOLE = enum.auto()
    BROKEN = enum.auto()  # it went wrong after its name; the rest of it has not been read
    NONE = enum.auto()  # it was no call, and has become text


class Reading:
    """One output's source and writer. schemas: of the tools' parameters, by name."""

    def __init__(self, source: Source, writer: EventWriter, schemas: Mapping[str, Schema | None]) -> None:
        self.source = source
        self.writer = writer
        self.schemas = schemas

    def attempt(self, opening: str, call: Steps[None]) -> Steps[Outcome]:
        """Reads a call, of which the opening mark has been taken. Before its name is known, what has been read comes out as
        text if it is none: the mark at once, the rest after another look where it is short."""
        self.source.record()
        try:
            yield from call
        except Malformed:
            return self._undo(opening)
        self.source.forget()
        return Outcome.WHOLE

    def begin(self, name: str) -> None:
        """The name is known and the arguments are there: from here on it is a call."""
        self.source.forget()
        self.writer.start(name)

    def closed_by(self, mark: str) -> Steps[None]:
        """Takes the mark if it comes next, and the blanks before it; blanks before anything else are text."""
        blanks: list[str] = []
        yield from self.source.run(SPACE, blanks.append)
        if not (yield from self.source.choose((mark,))):
            self.writer.text("".join(blanks))

    def skip_rest(self, ends: Sequence[str], nexts: Sequence[str]) -> Steps[None]:
        """What is left of a broken call: all up to one of its ends, or to one of the marks after it, which stays."""
        found = yield from self.source.until(Marks(*ends, *nexts), discard)
        if found in nexts:
            self.source.give_back(found)

    def _undo(self, opening: str) -> Outcome:
        read = self.source.forget()
        if self.writer.calling:
            self.writer.abandon()
            return Outcome.BROKEN
        self.writer.stray(opening)
        if len(read) <= MAX_REREAD_CHARS:
            self.source.give_back(read)
        else:
            self.writer.stray(read)
        return Outcome.NONE


Reader = Callable[[Reading], Steps[None]]


class ReadingParser:
    """An OutputParser of a coroutine that reads until its source ends."""

    def __init__(self, read: Reader, setup: ParserSetup) -> None:
        self._source = Source()
        self._writer = EventWriter(setup)
        self._steps = read(Reading(self._source, self._writer, setup.tools))
        next(self._steps)

    def feed(self, text: str) -> Sequence[Event]:
        self._source.add(text)
        next(self._steps)
        return self._writer.log.take()

    def finish(self) -> Sequence[Event]:
        self._source.close()
        left = next(self._steps, True)
        assert left is True, "a reader waits for text that cannot come"
        self._writer.finish()
        return self._writer.log.take()
