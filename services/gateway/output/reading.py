"""The base of all format parsers.

A format's coroutine reads a Source and writes events. OutputReading undoes its failed attempts to read a call.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rootstock_llm.services.gateway.output.event_writer import EventWriter
from rootstock_llm.services.gateway.output.json_text import Breaks, repaired
from rootstock_llm.services.gateway.output.output_parser import Event, ParserSetup, Schema
from rootstock_llm.services.gateway.output.source import Malformed, Marks, Source, Steps, discard

_BEFORE_END = re.compile(r"[ \t\r\n\]}]*")  # blanks and surplus brackets before a closing mark
MAX_REREAD_CHARS = 128  # maximum characters of a failed attempt that are parsed again; longer than the head of a usual call


class Outcome(enum.Enum):
    """The result of an attempt to read a call."""

    COMPLETE = enum.auto()  # the call was read and written
    BROKEN = enum.auto()  # the call was started, but its arguments are malformed; the rest of the call is unread
    NOT_A_CALL = enum.auto()  # the text is no call; it was written as text or is unread again


class OutputReading:
    """Reads one output from its source and writes its events. The format parsers share these methods."""

    def __init__(self, source: Source, setup: ParserSetup, marks: Marks) -> None:
        """Makes the reading.

        Args:
            setup: The request's tools, and the number of calls that the client may get.
            marks: The marks of the format, which are removed from text.
        """
        self.source = source
        self.writer = EventWriter(setup, marks)
        self._setup = setup
        self._marks = marks
        self.no_end_before = 0  # position in the source; qwen3_coder has found that no value ends before it
        self.failed = False  # whether an attempt has ended as BROKEN or NOT_A_CALL

    def schema(self, name: str) -> Schema | None:
        """Returns the schema of a tool's parameters. None if the tool is unknown or has no schema."""
        return self._setup.tools.get(name)

    def trial(self) -> OutputReading:
        """Returns another reading of the same source. It has its own writer, so its events can be dropped."""
        return OutputReading(self.source, self._setup, self._marks)

    def attempt(self, opening: str, call: Steps[None]) -> Steps[Outcome]:
        """Reads a call with the coroutine `call`.

        If the text is malformed after begin(), the call is abandoned. If it is malformed before begin(), it is no call: the
        opening is written as text without marks. The text after the opening becomes unread again if it has at most
        MAX_REREAD_CHARS, and is otherwise also written without marks.

        Args:
            opening: The opening mark of the call, which has been read.
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
        """Starts the call after its name and the beginning of its arguments have been read.

        From now on, attempt() cannot turn the call into text.
        """
        self.source.forget()
        self.writer.start(name)

    def arguments(self, breaks: Breaks, ends: Sequence[str]) -> Steps[None]:
        """Reads the arguments of the started call and ends the call.

        Arguments are an object, or nothing if one of `ends` comes next.

        Raises:
            Malformed: Other text comes, or the output was cut off.
        """
        if (yield from self.source.peek()) == "{":
            is_whole = yield from repaired(self.source, self.writer.arguments, breaks)
            self.end()
        else:
            is_whole = yield from self.body_comes(ends)
            self.end("{}")
        if not is_whole or self.source.was_cut:
            raise Malformed

    def body_comes(self, ends: Sequence[str]) -> Steps[bool]:
        """Returns whether the next text can be a call's arguments: an object, one of `ends`, or the end of the output.

        Reads nothing.
        """
        if (yield from self.source.peek()) in ("", "{"):
            return True
        end = yield from self.source.choose(ends)
        self.source.give_back(end)
        return bool(end)

    def end(self, closing: str = "") -> None:
        """Writes `closing` as the last arguments and ends the call.

        If the output was cut off, does nothing, so the call stays open.
        """
        if not self.source.was_cut:
            if closing:
                self.writer.arguments(closing)
            self.writer.end()

    def closed_by(self, mark: str) -> Steps[None]:
        """Reads a closing mark, with blanks and surplus brackets before it.

        If the mark does not come, the blanks and brackets become text.
        """
        before: list[str] = []
        yield from self.source.run(_BEFORE_END, before.append)
        if not (yield from self.source.choose((mark,))):
            self.writer.text("".join(before))

    def skip_rest(self, ends: Sequence[str], nexts: Sequence[str]) -> Steps[None]:
        """Skips the rest of a broken call: up to and including one of `ends`, or up to one of `nexts`, which stays unread."""
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
    """The format in which a family of models writes calls."""

    opens: tuple[str, ...]  # texts with which a call may begin; some, such as `{`, are not marks
    marks: tuple[str, ...]  # all marks of the format, which are removed from text
    # Reads one or more calls; its argument is the member of `opens` that has been read.
    read: Callable[[OutputReading, str], Steps[None]]


def _no_call(_reading: OutputReading, mark: str) -> Steps[None]:
    raise AssertionError(f"a format without calls has no opening mark, but {mark} was read")


NO_CALLS = CallFormat((), (), _no_call)


Reader = Callable[[OutputReading], Steps[None]]


class ReadingParser:
    """An OutputParser that runs a format's coroutine, which reads the source to its end."""

    def __init__(self, read: Reader, marks: Sequence[str], setup: ParserSetup) -> None:
        """Starts the coroutine.

        Args:
            read: Makes the coroutine.
            marks: The marks of the format.
            setup: The request's tools, and the number of calls that the client may get.
        """
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
        assert left is True, "a coroutine that reads a closed source ends"
        self._writer.finish()
        return self._writer.log.take()
