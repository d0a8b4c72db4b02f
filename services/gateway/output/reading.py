"""The base of all format parsers: coroutines that read a source and write events, and attempts to read a call."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rootstock_llm.services.gateway.output.event_writer import EventWriter
from rootstock_llm.services.gateway.output.json_text import Breaks, mended
from rootstock_llm.services.gateway.output.output_parser import Event, ParserSetup, Schema
from rootstock_llm.services.gateway.output.source import Malformed, Marks, Source, Steps, discard

_BEFORE_END = re.compile(r"[ \t\r\n\]}]*")  # blanks and extra brackets before a closing mark
MAX_REREAD_CHARS = 128  # longest text of a failed attempt that is parsed again; the head of a call is about as long


class Outcome(enum.Enum):
    """The result of an attempt to read a call."""

    COMPLETE = enum.auto()  # the call was read and written
    BROKEN = enum.auto()  # the call is malformed after its name; the rest of the call has not been read
    NOT_A_CALL = enum.auto()  # the text was no call and was written as text


class OutputReading:
    """The source and the writer of one output."""

    def __init__(self, source: Source, setup: ParserSetup, marks: Marks) -> None:
        """Starts a reading.

        Args:
            setup: The request's tools and number of calls.
            marks: The marks of the format, which are removed from text.
        """
        self.source = source
        self.writer = EventWriter(setup, marks)
        self._setup = setup
        self._marks = marks
        self.failed = False  # an attempt has ended as BROKEN or NOT_A_CALL

    def schema(self, name: str) -> Schema | None:
        """Returns the schema of a tool's parameters."""
        return self._setup.tools.get(name)

    def trial(self) -> OutputReading:
        """Returns another reading of the same source with a writer of its own."""
        return OutputReading(self.source, self._setup, self._marks)

    def attempt(self, opening: str, call: Steps[None]) -> Steps[Outcome]:
        """Reads a call after its opening mark.

        If the text is malformed before begin(), it is no call. The opening is then written as text without marks. The text after
        it is parsed again; if it is longer than MAX_REREAD_CHARS, it is also written as text without marks.
        """
        begun = self.writer.begun
        self.source.record()
        try:
            yield from call
        except Malformed:
            return self._undo(opening, self.writer.begun > begun)
        self.source.forget()
        return Outcome.COMPLETE

    def begin(self, name: str) -> None:
        """Starts the call after its name and the beginning of its arguments. From then on, the call cannot become text."""
        self.source.forget()
        self.writer.start(name)

    def arguments(self, breaks: Breaks, ends: Sequence[str]) -> Steps[None]:
        """Reads the arguments and ends the call. Arguments are an object, or are empty before one of `ends`.

        Raises:
            Malformed: Other text comes, or the output was cut off.
        """
        if (yield from self.source.peek()) == "{":
            is_whole = yield from mended(self.source, self.writer.arguments, breaks)
            self.end()
        else:
            is_whole = yield from self.body_comes(ends)
            self.end("{}")
        if not is_whole or self.source.was_cut:
            raise Malformed

    def body_comes(self, ends: Sequence[str]) -> Steps[bool]:
        """Returns whether an object, one of `ends` or the end of the output comes next. Reads nothing."""
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
        """Reads the mark if it comes next, with blanks and extra brackets before it. Without the mark, these become text."""
        before: list[str] = []
        yield from self.source.run(_BEFORE_END, before.append)
        if not (yield from self.source.choose((mark,))):
            self.writer.text("".join(before))

    def skip_rest(self, ends: Sequence[str], nexts: Sequence[str]) -> Steps[None]:
        """Skips the rest of a broken call: up to and with one of `ends`, or up to one of `nexts`, which stays unread."""
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
        return Outcome.NOT_A_CALL


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The notation in which a family of models writes calls."""

    opens: tuple[str, ...]  # texts with which a call may begin; not all are marks
    marks: tuple[str, ...]  # all marks of the format, which are removed from text
    read: Callable[[OutputReading, str], Steps[None]]  # reads calls after one of `opens`, which has been read


def _no_call(_reading: OutputReading, mark: str) -> Steps[None]:
    raise AssertionError(f"{mark} begins no call")


NO_CALLS = CallFormat((), (), _no_call)


Reader = Callable[[OutputReading], Steps[None]]


class ReadingParser:
    """An OutputParser that runs a coroutine. The coroutine reads its source until the source ends."""

    def __init__(self, read: Reader, marks: Sequence[str], setup: ParserSetup) -> None:
        """Starts the coroutine `read`. `marks` are the marks of its format."""
        self._source = Source()
        reading = OutputReading(self._source, setup, Marks(*marks))
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
        assert left is True, "a reader ends when its source is closed"
        self._writer.finish()
        return self._writer.log.take()
