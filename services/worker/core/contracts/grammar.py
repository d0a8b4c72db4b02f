"""Structured output: the grammars of requests, and matchers that other packages make. The core compiles no grammar.

A request with a grammar waits in GATED until it has a matcher; the loop reports it by Scheduler.grammar_ready.
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

    pointer: str  # JSON pointer into the tag, such as #/format/tags/0
    within: str = ""  # position of the part's schema in the client's schema, as a JSON pointer without the #
    partial: bool = False  # whether unsupported keywords of the schema are left out


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """The rule for a request's output. Equal specs share one compiled grammar."""

    kind: GrammarKind
    source: str  # the schema, pattern or grammar as text
    parts: tuple[GrammarPart, ...] = ()  # parts of a structural tag that a gateway has made and the client has not seen

    @property
    def label(self) -> str:
        """The name of the grammar in a refusal. The client knows the kind unless a gateway has made the structural tag."""
        return "the grammar" if self.parts else self.kind


class Reason(str):
    """The reason for refusing a grammar, for the client."""

    part: int | None  # index in GrammarSpec.parts, or None if the reason concerns the whole grammar

    def __new__(cls, text: str, part: int | None = None) -> Reason:
        reason = super().__new__(cls, text)
        reason.part = part
        return reason


class Matcher(Protocol):
    """The position of one request in its grammar. Only accept() and forced() change it.

    The request owns its matcher, also while it is retracted.
    """

    @property
    def terminated(self) -> bool:
        """Whether the output is complete and no token may follow."""
        ...

    @property
    def fault(self) -> str:
        """The reason, for the client, why the matcher accepts no further token; empty without a fault."""
        ...

    def accept(self, token: int) -> bool:
        """Advances by one sampled token. Returns False if the grammar does not allow it here, or after a fault."""
        ...

    def take_cost(self) -> float:
        """Returns the seconds of CPU time that the matcher has used since the last call."""
        ...

    def forced(self) -> Sequence[int]:
        """Accepts and returns the next tokens that the grammar determines; empty if the next token is not determined."""
        ...


class GrammarBook(Protocol):
    """The compiled grammars of a worker. Only the loop's thread calls it, and no call blocks."""

    def open(self, spec: GrammarSpec, tenant: bytes = b"") -> Matcher | None:
        """Returns a new matcher, or None if the grammar is not compiled.

        If it returns None, it starts the compilation. A message grammar_ready or grammar_failed follows. The compiler is shared
        fairly between tenants.
        """
        ...
