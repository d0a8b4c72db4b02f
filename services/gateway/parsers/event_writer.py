"""Events of one output as they are found: pieces joined, blanks around calls dropped, calls counted and let through."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from services.gateway.parsers.events import CallArguments, CallDropped, CallEnd, CallStart, Event, Reasoning, Text
from services.gateway.parsers.output_parser import ParserSetup
from services.gateway.parsers.source import Marks

BLANKS = " \t\r\n"
_TAIL_CHARS = 31  # more than the beginning of any mark


class EventLog:
    """Events since they were last taken. Neighbours of a kind become one, in time linear in their length."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._kind: object = None
        self._make: Callable[[str], Event] = Text
        self._pieces: list[str] = []

    def grow(self, kind: object, make: Callable[[str], Event], text: str) -> None:
        """kind: equal for pieces that belong together."""
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
    """Passes text on but for the blanks at its end, which wait for what follows them."""

    def __init__(self) -> None:
        self._held: list[str] = []

    def add(self, text: str) -> str:
        """What can be shown."""
        body = text.rstrip(BLANKS)
        if not body:
            self._held.append(text)
            return ""
        shown = "".join([*self._held, body])
        self._held = [text[len(body) :]]
        return shown

    @property
    def held(self) -> str:
        return "".join(self._held)

    def take(self) -> str:
        """What was held."""
        found, self._held = "".join(self._held), []
        return found


class EventWriter:
    """One output's. A call is open from start to end, or until it is abandoned; no text comes meanwhile.

    marks: of the format. No text shows one.
    """

    def __init__(self, setup: ParserSetup, marks: Marks) -> None:
        self.log = EventLog()
        self._setup = setup
        self._marks = marks
        self._blanks = HeldBlanks()
        self._thought = HeldBlanks()
        self._thinking = False  # whether this thought has shown anything
        self._text_since_call = False
        self._tail = deque[str](maxlen=_TAIL_CHARS)  # the last pieces of the text
        self._at_seam = False  # hidden text follows the tail
        self._seam = ""  # text behind the hidden text; it may complete a mark
        self.begun = 0  # calls, dropped ones included
        self.given = 0  # calls that have an index
        self._open: int | None = None  # index of the open call

    @property
    def wrote_text(self) -> bool:
        """Whether the last call, or the beginning, is followed by more than blanks."""
        return self._text_since_call

    def knows(self, name: str) -> bool:
        return name in self._setup.tools

    def text(self, text: str) -> None:
        if self._at_seam:
            text = self._joined(text)
        shown = self._blanks.add(text)
        if shown:
            self._text_since_call = True
            self._tail.append(shown)
            self.log.grow(Text, Text, shown)

    def stray(self, text: str) -> None:
        """Writes what turned out to be no call as text, without marks."""
        rest = self._marks.without(text)
        self._at_seam = self._at_seam or len(rest) < len(text)
        if rest:
            self.text(rest)

    def _joined(self, text: str) -> str:
        """The next text behind something that is not shown. A blank goes between if both would make a mark together."""
        text, before = self._seam + text, "".join(self._tail)[-_TAIL_CHARS:] + self._blanks.held
        joint, size = before + text, len(before)
        found = self._marks.find(joint, 0, len(joint))
        if not found and self._marks.begun(joint, 0, len(joint)) < size:
            self._seam = text
            return ""
        self._at_seam, self._seam = False, ""
        return f" {text}" if found and found.start() < size else text

    def _end_seam(self) -> None:
        """Writes text that no more text can make a mark of."""
        text, self._at_seam, self._seam = self._seam, False, ""
        if text:
            self.text(text)

    def reasoning(self, text: str) -> None:
        shown = self._thought.add(text if self._thinking else text.lstrip(BLANKS))
        if shown:
            self._thinking = True
            self.log.grow(Reasoning, Reasoning, shown)

    def end_reasoning(self) -> None:
        """Blanks at either end of a thought are the template's."""
        self._thought.take()
        self._thinking = False

    def start(self, name: str) -> None:
        self._end_seam()
        self._blanks.take()
        self._text_since_call, self._at_seam = False, True
        self.begun += 1
        if not self.knows(name) or self.given >= self._setup.max_calls:
            self.log.add(CallDropped(name))
            return
        self._open, self.given = self.given, self.given + 1
        self.log.add(CallStart(self._open, name))

    def arguments(self, fragment: str) -> None:
        if self._open is not None:
            self.log.grow(self._open, partial(CallArguments, self._open), fragment)

    def end(self) -> None:
        if self._open is not None:
            self.log.add(CallEnd(self._open))
        self.abandon()

    def abandon(self) -> None:
        """What has been given of the open call stays."""
        self._open = None

    def finish(self) -> None:
        """Blanks that end a text are its own; those after a call are nobody's."""
        self._end_seam()
        thought, blanks = self._thought.take(), self._blanks.take()
        if thought and self._thinking:
            self.log.grow(Reasoning, Reasoning, thought)
        if blanks and (self._text_since_call or not self.begun):
            self.log.grow(Text, Text, blanks)
