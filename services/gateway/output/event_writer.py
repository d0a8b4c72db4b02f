"""Writes the events of one output: joins pieces of text, drops blanks around calls, numbers calls and drops disallowed calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from rootstock_llm.services.gateway.output.output_parser import (
    CallArguments,
    CallDropped,
    CallEnd,
    CallStart,
    Event,
    ParserSetup,
    Reasoning,
    Text,
)
from rootstock_llm.services.gateway.output.source import Marks

BLANKS = " \t\r\n"
_TAIL_CHARS = 31  # characters; at least the length of the longest incomplete mark


class EventLog:
    """The events since the last take(). Joins consecutive events of the same kind into one, in linear time."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._kind: object = None
        self._make: Callable[[str], Event] = Text
        self._pieces: list[str] = []

    def grow(self, kind: object, make: Callable[[str], Event], text: str) -> None:
        """Adds a piece of text.

        Args:
            kind: Consecutive pieces with an equal kind become one event.
            make: Makes the event of the joined text.
        """
        if kind != self._kind:
            self._settle()
            self._kind, self._make = kind, make
        if text:
            self._pieces.append(text)

    def add(self, event: Event) -> None:
        self._settle()
        self._events.append(event)

    def extend(self, events: Iterable[Event]) -> None:
        for event in events:
            self.add(event)

    def take(self) -> list[Event]:
        self._settle()
        found, self._events = self._events, []
        return found

    def _settle(self) -> None:
        if self._pieces:
            self._events.append(self._make("".join(self._pieces)))
        self._kind, self._pieces = None, []


class HeldBlanks:
    """Passes text on, except for trailing blanks, which it holds until other text follows."""

    def __init__(self) -> None:
        self._held: list[str] = []

    def add(self, text: str) -> str:
        """Returns the text to pass on: the held blanks and the new text without its trailing blanks.

        "" if `text` has only blanks.
        """
        body = text.rstrip(BLANKS)
        if not body:
            self._hold(text)
            return ""
        shown = "".join([*self._held, body])
        self._held = []
        self._hold(text[len(body) :])
        return shown

    def tail(self, size: int) -> str:
        """Returns the last `size` held blanks, or all of them if there are fewer. `size` is at least 1."""
        return "".join(piece[-size:] for piece in self._held[-size:])[-size:]

    def take(self) -> str:
        """Returns the held blanks and drops them."""
        found, self._held = "".join(self._held), []
        return found

    def _hold(self, blanks: str) -> None:
        if blanks:  # tail() relies on pieces of at least one character
            self._held.append(blanks)


class EventWriter:
    """Writes the events of one output.

    A call is open from start() to end() or abandon(). The caller writes no text while a call is open.

    If a mark or a call is removed, the text before it and the text after it join. If the joined texts would form a new mark, the
    writer inserts a blank between them. The position of the removal is the seam.
    """

    def __init__(self, setup: ParserSetup, marks: Marks) -> None:
        """Begins without events.

        Args:
            setup: The request's tools, and the number of calls that the client may get.
            marks: The marks of the format. No text event contains a mark.
        """
        self.log = EventLog()
        self._setup = setup
        self._marks = marks
        self._blanks = HeldBlanks()
        self._thought = HeldBlanks()
        self._thinking = False  # whether the open reasoning has an event
        self._text_since_call = False  # see wrote_text
        self._tail = ""  # the last _TAIL_CHARS characters of the written text
        self._at_seam = False  # whether a mark or call was removed after the written text
        self._seam = ""  # text after the removed part, held because it may form a mark together with the text before the part
        self.begun = 0  # number of started calls, including dropped calls
        self.num_indexed = 0  # number of calls with an index, which the client gets
        self._open: int | None = None  # index of the open call, or None if no call is open, or if the open call is dropped

    @property
    def wrote_text(self) -> bool:
        """Whether text other than blanks was written since the last call, or since the beginning if there is no call."""
        return self._text_since_call

    def has_tool(self, name: str) -> bool:
        return name in self._setup.tools

    def text(self, text: str) -> None:
        if self._at_seam:
            text = self._joined(text)
        shown = self._blanks.add(text)
        if shown:
            self._text_since_call = True
            self._tail = (self._tail + shown[-_TAIL_CHARS:])[-_TAIL_CHARS:]
            self.log.grow(Text, Text, shown)

    def stray(self, text: str) -> None:
        """Writes text without the marks in it: a mark that begins no call, or the text of a failed attempt to read a call."""
        rest = self._marks.without(text)
        self._at_seam = self._at_seam or len(rest) < len(text)
        if rest:
            self.text(rest)

    def _joined(self, text: str) -> str:
        """Joins the text after a removed mark or call to the written text.

        Returns:
            The text to write. It begins with a blank if it would otherwise form a mark with the written text. "" if this
            depends on more text; the text is then held.
        """
        text, before = self._seam + text, (self._tail + self._blanks.tail(_TAIL_CHARS))[-_TAIL_CHARS:]
        joint, size = before + text, len(before)
        found = self._marks.find(joint, 0, len(joint))
        if not found and self._marks.begun(joint, 0, len(joint)) < size:
            self._seam = text
            return ""
        self._at_seam, self._seam = False, ""
        return f" {text}" if found and found.start() < size else text

    def _end_seam(self) -> None:
        """Writes the held text after the seam, because a call or the end of the output follows."""
        text, self._at_seam, self._seam = self._seam, False, ""
        if text:
            self.text(text)

    def reasoning(self, text: str) -> None:
        shown = self._thought.add(text if self._thinking else text.lstrip(BLANKS))
        if shown:
            self._thinking = True
            self.log.grow(Reasoning, Reasoning, shown)

    def end_reasoning(self) -> None:
        """Ends the reasoning. Drops its trailing blanks, because the chat template writes them."""
        self._thought.take()
        self._thinking = False

    def start(self, name: str) -> None:
        self._end_seam()
        self._blanks.take()
        self._text_since_call, self._at_seam = False, True
        self.begun += 1
        if not self.has_tool(name) or self.num_indexed >= self._setup.max_calls:
            self.log.add(CallDropped(name))
            return
        self._open, self.num_indexed = self.num_indexed, self.num_indexed + 1
        self.log.add(CallStart(self._open, name))

    def arguments(self, fragment: str) -> None:
        if self._open is not None:
            self.log.grow(self._open, partial(CallArguments, self._open), fragment)

    def end(self) -> None:
        if self._open is not None:
            self.log.add(CallEnd(self._open))
        self.abandon()

    def abandon(self) -> None:
        """Ends the open call without a CallEnd event, because its arguments are incomplete."""
        self._open = None

    def finish(self) -> None:
        """Writes all held text at the end of the output. Trailing blanks of text are written; blanks after a call are dropped."""
        self._end_seam()
        thought, blanks = self._thought.take(), self._blanks.take()
        if thought and self._thinking:
            self.log.grow(Reasoning, Reasoning, thought)
        if blanks and (self._text_since_call or not self.begun):
            self.log.grow(Text, Text, blanks)
