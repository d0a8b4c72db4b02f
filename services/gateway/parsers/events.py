"""The events into which a parser splits an output, in the order of the model's text."""

from __future__ import annotations

from dataclasses import dataclass


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
