"""Defines the interface of output parsers, the events that a parser returns, and the parts of a request that a parser needs.

The events are in the order of the model's text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rootstock_llm.services.shared.output_formats import OutputFormats


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the output's text. It is never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning. It is never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of a tool call."""

    index: int  # index of the call in the output, from 0; dropped calls have no index
    name: str  # name of one of the request's tools


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments.

    If a CallEnd follows, the joined pieces are a JSON object. Otherwise, they are the beginning of a JSON object.
    """

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call with complete arguments. There is no CallEnd if a token limit cuts off the output within the call."""

    index: int


@dataclass(frozen=True, slots=True)
class CallDropped:
    """A call that the client does not get: its tool is not in the request, or the maximum number of calls is reached."""

    name: str


Event = Text | Reasoning | CallStart | CallArguments | CallEnd | CallDropped


Schema = Mapping[str, Any] | bool


class OutputParser(Protocol):
    """Parses the output of one choice. One thread calls it.

    The methods raise no exception for any text of a model. If the same text arrives in different pieces, the events differ only
    in the number of pieces of text, reasoning and arguments.
    """

    def feed(self, text: str) -> Sequence[Event]:
        """Returns the events of the next piece of output.

        Holds text that may begin a mark, and blanks that are dropped if a mark follows.
        """

    def finish(self, cut: bool = False) -> Sequence[Event]:
        """Returns the events of the held text. The caller calls it once, after the last feed().

        Args:
            cut: Whether a token limit cut off the output. The arguments of an open call then stay incomplete. Otherwise, they are
                completed to a JSON object.
        """


@dataclass(frozen=True, slots=True)
class ParserSetup:
    """The tools of a request, and the number of calls that the client may get."""

    # JSON schema of each tool's parameters, by the tool's name, or None for a tool without a schema.
    tools: Mapping[str, Schema | None]
    max_calls: int  # calls that the client gets; further calls are dropped


class PlainText:
    """The parser for models without calls and reasoning. The whole output is text."""

    def feed(self, text: str) -> Sequence[Event]:
        return [Text(text)] if text else []

    def finish(self, cut: bool = False) -> Sequence[Event]:
        return []


MakeParser = Callable[[OutputFormats, ParserSetup], OutputParser]


@dataclass(frozen=True, slots=True)
class Parsing:
    """The parser settings of one request. Each choice gets a parser of its own."""

    formats: OutputFormats
    setup: ParserSetup
    make: MakeParser
    dropped: Callable[[], None]  # called for each CallDropped event
    reasoning_marks: Sequence[int] = ()  # token ids of the opening and the closing mark; empty if unknown

    def reasoning_tokens(self, ids: Sequence[int]) -> int | None:
        """Returns the number of reasoning tokens of an output, including the marks. None if the ids of the marks are unknown."""
        if len(self.reasoning_marks) != 2:
            return None
        begin, end = self.reasoning_marks
        if not ids or (self.formats.reasoning != "think_open" and ids[0] != begin):
            return 0
        return next((at + 1 for at, token in enumerate(ids) if token == end), len(ids))

    @property
    def kept_tokens(self) -> Sequence[str]:
        """Texts of the special tokens that the detokenizer must leave in the text."""
        return self.formats.kept

    def parser(self) -> OutputParser:
        """Returns a parser for one output."""
        return self.make(self.formats, self.setup)


MakeParsing = Callable[[OutputFormats, ParserSetup], Parsing]
