"""What a parser makes of an output, in the order in which the model wrote it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Part of the answer itself; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Part of what the model thought before it answered; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """index: counts the calls of an output from 0, without gaps. name: one of the request's tools."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a JSON object's text. The pieces of an index together are a JSON object where its CallEnd has come, and else the
    beginning of one."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call's arguments are complete. Only a call that the output's limit of tokens cuts off has none."""

    index: int


@dataclass(frozen=True, slots=True)
class CallDropped:
    """A call of a tool that the request does not have, or one more than it allows. It has no index."""

    name: str


Event = Text | Reasoning | CallStart | CallArguments | CallEnd | CallDropped
