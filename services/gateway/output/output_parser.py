"""The interface of output parsers: the events into which a parser splits an output, and the parts of a request that it needs.

The events have the order of the model's text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rootstock_llm.services.shared.output_formats import OutputFormats


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the completion's content; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of a tool call."""

    index: int  # counts the calls of an output from 0, without gaps
    name: str  # one of the request's tools


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments.

    The joined pieces are a JSON object if the CallEnd follows; otherwise they are the beginning of a JSON object.
    """

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call whose arguments are complete. Missing only if a token limit cuts off the output within the call."""

    index: int


@dataclass(frozen=True, slots=True)
class CallDropped:
    """A call without an index that the client does not see: of a tool that the request lacks, or beyond the allowed number."""

    name: str


Event = Text | Reasoning | CallStart | CallArguments | CallEnd | CallDropped


Schema = Mapping[str, Any] | bool


class OutputParser(Protocol):
    """Parses the output of one choice. Used by one thread.

    The methods do not raise, whatever the model writes. The split of the text into pieces changes only the number of pieces in
    which text, reasoning and arguments are returned.
    """

    def feed(self, text: str) -> Sequence[Event]:
        """Returns the events of the next text. Holds text that may begin a mark, and blanks that a following mark would drop."""

    def finish(self, cut: bool = False) -> Sequence[Event]:
        """Returns the events of held text. Called once, after the last feed.

        Args:
            cut: Whether the output has reached its token limit. The arguments of an open call then stay incomplete;
                otherwise they are completed to a JSON object.
        """


@dataclass(frozen=True, slots=True)
class ParserSetup:
    """The tools of a request."""

    tools: Mapping[str, Schema | None]  # JSON schema of the parameters by tool name; None if the request has no schema
    max_calls: int  # calls that the client gets; further calls are dropped


class PlainText:
    """The parser of models without formats: everything is text."""

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
    dropped: Callable[[], None]  # called for each dropped call
    reasoning_marks: Sequence[int] = ()  # token ids of the opening and the closing mark; empty if unknown

    def reasoning_tokens(self, ids: Sequence[int]) -> int | None:
        """Returns the number of reasoning tokens of an output, including the marks in it. None if the marks' ids are unknown."""
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
