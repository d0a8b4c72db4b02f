"""The port to a parser of one choice's output, and what all of them are told of the request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.gateway.parsers.events import Event, Text
from services.shared.output_formats import OutputFormats

Schema = Mapping[str, Any] | bool


class OutputParser(Protocol):
    """One output, in one thread. Neither method raises, whatever the model writes; where text is cut makes no difference but
    in how many pieces a text, a thought or arguments come."""

    def feed(self, text: str) -> Sequence[Event]:
        """text: what comes next. Holds back what may be the beginning of a mark, and blanks that a mark would drop."""

    def finish(self, cut: bool = False) -> Sequence[Event]:
        """Returns the events of held text. Called once, after the last feed.

        Args:
            cut: the output has reached its limit of tokens. The arguments of a call then end where they stand; else they are
                closed, and are a JSON object.
        """


@dataclass(frozen=True, slots=True)
class ParserSetup:
    """tools: the JSON schema of each tool's parameters by its name; None where the request gives none.
    max_calls: how many calls are let through."""

    tools: Mapping[str, Schema | None]
    max_calls: int


class PlainText:
    """Without a format, all is text."""

    def feed(self, text: str) -> Sequence[Event]:
        return [Text(text)] if text else []

    def finish(self, cut: bool = False) -> Sequence[Event]:
        return []


MakeParser = Callable[[OutputFormats, ParserSetup], OutputParser]


@dataclass(frozen=True, slots=True)
class Parsing:
    """How the outputs of one request are read: a parser for each, all of the same make. dropped: called for each call of which
    the client sees nothing."""

    formats: OutputFormats
    setup: ParserSetup
    make: MakeParser
    dropped: Callable[[], None]
    reasoning_marks: Sequence[int] = ()  # ids of the opening and the closing one; empty where they are not known

    def reasoning_tokens(self, ids: Sequence[int]) -> int | None:
        """How many of an output's ids are reasoning, its marks included; None where that is not known."""
        if len(self.reasoning_marks) != 2:
            return None
        begin, end = self.reasoning_marks
        if not ids or (self.formats.reasoning != "think_open" and ids[0] != begin):
            return 0
        return next((at + 1 for at, token in enumerate(ids) if token == end), len(ids))

    @property
    def kept_tokens(self) -> Sequence[str]:
        """Special tokens that the text must have, by their text."""
        return self.formats.kept

    def parser(self) -> OutputParser:
        """For one output."""
        return self.make(self.formats, self.setup)


MakeParsing = Callable[[OutputFormats, ParserSetup], Parsing]
