"""Structured output: the grammars of requests, and the interface of their matchers. The core compiles no grammar.

A request with a grammar waits in the phase GATED until its grammar is compiled. The loop then calls
Scheduler.grammar_ready().
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class GrammarKind(enum.StrEnum):
    JSON_OBJECT = "json_object"  # any JSON object; GrammarSpec.source is empty
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """A part of a structural tag that a gateway has made from a schema or pattern of the client."""

    pointer: str  # JSON pointer to this part in the structural tag, such as #/format/tags/0
    # JSON pointer, without the #, to the part's schema in the schema that the client sent; empty if it is that whole schema.
    within: str = ""
    partial: bool = False  # whether the grammar ignores keywords of the schema that grammars cannot express


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """The grammar of a request's output, not compiled. Equal specs share one compiled grammar."""

    kind: GrammarKind
    source: str  # the schema, pattern or grammar as text
    # Parts of a structural tag that a gateway made; the client knows their schemas and not the tag. Empty for other grammars.
    parts: tuple[GrammarPart, ...] = ()

    @property
    def label(self) -> str:
        """The name of the grammar in errors for the client. It hides the kind if a gateway made the structural tag."""
        return "the grammar" if self.parts else self.kind


class Reason(str):
    """The message that tells a client why its grammar is refused."""

    part: int | None  # index in GrammarSpec.parts, or None if the reason concerns the whole grammar

    def __new__(cls, text: str, part: int | None = None) -> Reason:
        reason = super().__new__(cls, text)
        reason.part = part
        return reason


class Matcher(Protocol):
    """The position of one request in its grammar. Only accept() and forced() change the position.

    A retracted request keeps its matcher.
    """

    @property
    def terminated(self) -> bool:
        """Whether the output is complete, so that no token may follow."""
        ...

    @property
    def fault(self) -> str:
        """The message for the client if the matcher has failed and accepts no further token; empty otherwise."""
        ...

    def accept(self, token: int) -> bool:
        """Advances by one sampled token. Returns False if the grammar does not allow the token here, or if `fault` is set."""
        ...

    def take_cost(self) -> float:
        """Returns the seconds of CPU time that the matcher has used since the last call."""
        ...

    def forced(self) -> Sequence[int]:
        """Accepts and returns the next tokens if the grammar allows no others; empty if it allows several next tokens."""
        ...


class GrammarBook(Protocol):
    """The compiled grammars of a worker. Only the scheduler loop's thread calls it, and no call blocks."""

    def open(self, spec: GrammarSpec, tenant: bytes = b"") -> Matcher | None:
        """Returns a new matcher, or None if the grammar is not compiled yet or is refused.

        After None, the loop calls Scheduler.grammar_ready() or grammar_failed() with the result. If the grammar is not being
        compiled yet, the call starts the compilation. Tenants get equal shares of the compiler.
        """
        ...
