"""What the formats share: a coroutine over a source that writes events, and calls that may turn out to be none."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.gateway.parsers.event_writer import EventWriter
from services.gateway.parsers.events import Event
from services.gateway.parsers.json_text import Breaks, mended
from services.gateway.parsers.output_parser import ParserSetup, Schema
from services.gateway.parsers.source import Malformed, Marks, Source, Steps, discard

_BEFORE_END = re.compile(r"[ \t\r\n\]}]*")
MAX_REREAD_CHARS = 128  # of what looked like a call: as long as one's head. Longer text is not looked through again


class Outcome(enum.Enum):
    WHOLE = enum.auto()
    BROKEN = enum.auto()  # it went wrong after its name; the rest of it has not been read
    NONE = enum.auto()  # it was no call, and has become text


class Reading:
    """One output's source and writer.

    Args:
        setup: what the request says of calls.
        marks: of the format. No text shows one.
    """

    def __init__(self, source: Source, setup: ParserSetup, marks: Marks) -> None:
        self.source = source
        self.writer = EventWriter(setup, marks)
        self._setup = setup
        self._marks = marks
        self.failed = False  # a call broke off, or turned out to be text

    def schema(self, name: str) -> Schema | None:
        """Returns the schema of a tool's parameters."""
        return self._setup.tools.get(name)

    def trial(self) -> Reading:
        """Returns another reading of the same source, whose events are its own."""
        return Reading(self.source, self._setup, self._marks)

    def attempt(self, opening: str, call: Steps[None]) -> Steps[Outcome]:
        """Reads a call, of which the opening mark has been taken. Before its name is known, what has been read comes out as
        text if it is none: the mark at once, the rest after another look where it is short."""
        begun = self.writer.begun
        self.source.record()
        try:
            yield from call
        except Malformed:
            return self._undo(opening, self.writer.begun > begun)
        self.source.forget()
        return Outcome.WHOLE

    def begin(self, name: str) -> None:
        """The name is known and the arguments are there: from here on it is a call."""
        self.source.forget()
        self.writer.start(name)

    def arguments(self, breaks: Breaks, ends: Sequence[str]) -> Steps[None]:
        """Reads an object, or nothing before one of the ends, and ends the call. Raises Malformed if something else comes."""
        if (yield from self.source.peek()) == "{":
            is_whole = yield from mended(self.source, self.writer.arguments, breaks)
            self.end()
        else:
            is_whole = yield from self.body_comes(ends)
            self.end("{}")
        if not is_whole or self.source.was_cut:
            raise Malformed

    def body_comes(self, ends: Sequence[str]) -> Steps[bool]:
        """Whether an object comes next, or none and one of the ends of a call, or the end of the output."""
        if (yield from self.source.peek()) in ("", "{"):
            return True
        end = yield from self.source.choose(ends)
        self.source.give_back(end)
        return bool(end)

    def end(self, closing: str = "") -> None:
        """Writes `closing` and ends the call. If the output was cut off, the call stays open."""
        if not self.source.was_cut:
            if closing:
                self.writer.arguments(closing)
            self.writer.end()

    def closed_by(self, mark: str) -> Steps[None]:
        """Takes the mark if it comes next, with blanks and brackets too many before it; before anything else they are text."""
        before: list[str] = []
        yield from self.source.run(_BEFORE_END, before.append)
        if not (yield from self.source.choose((mark,))):
            self.writer.text("".join(before))

    def skip_rest(self, ends: Sequence[str], nexts: Sequence[str]) -> Steps[None]:
        """What is left of a broken call: all up to one of its ends, or to one of the marks after it, which stays."""
        found = yield from self.source.until(Marks(*ends, *nexts), discard)
        if found in nexts:
            self.source.give_back(found)

    def _undo(self, opening: str, is_call: bool) -> Outcome:
        self.failed = True
        read = self.source.forget()
        if is_call:
            self.writer.abandon()
            return Outcome.BROKEN
        self.writer.stray(opening)
        if len(read) <= MAX_REREAD_CHARS:
            self.source.give_back(read)
        else:
            self.writer.stray(read)
        return Outcome.NONE


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The notation in which a family of models writes calls."""

    opens: tuple[str, ...]  # texts that a call may begin with, marks or not
    marks: tuple[str, ...]  # all marks of the format, which no text shows
    read: Callable[[Reading, str], Steps[None]]  # reads the calls behind one of `opens`


def _no_call(_reading: Reading, mark: str) -> Steps[None]:
    raise AssertionError(f"{mark} begins no call")


NO_CALLS = CallFormat((), (), _no_call)


Reader = Callable[[Reading], Steps[None]]


class ReadingParser:
    """An OutputParser of a coroutine that reads until its source ends. marks: of its format."""

    def __init__(self, read: Reader, marks: Sequence[str], setup: ParserSetup) -> None:
        self._source = Source()
        reading = Reading(self._source, setup, Marks(*marks))
        self._writer = reading.writer
        self._steps = read(reading)
        next(self._steps)

    def feed(self, text: str) -> Sequence[Event]:
        self._source.add(text)
        next(self._steps)
        return self._writer.log.take()

    def finish(self, cut: bool = False) -> Sequence[Event]:
        self._source.close(cut)
        left = next(self._steps, True)
        assert left is True, "a reader waits for text that cannot come"
        self._writer.finish()
        return self._writer.log.take()
