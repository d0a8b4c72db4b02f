"""What the core needs of structured output: matchers made elsewhere, asked by method. No grammar is compiled here.

A request with a grammar waits in GATED until a matcher exists; the shell says so by message (Scheduler.grammar_ready).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.worker.core.contracts.sampling import GrammarSpec


class Reason(str):
    """Why a grammar is refused, for the client."""

    part: int | None  # index in GrammarSpec.parts; None for the whole grammar

    def __new__(cls, text: str, part: int | None = None) -> Reason:
        reason = super().__new__(cls, text)
        reason.part = part
        return reason


class Matcher(Protocol):
    """One request's place in its grammar. Owned by the request from the moment it is given out; the caller of `accept`
    is its only writer. Survives retraction, as the output does."""

    @property
    def terminated(self) -> bool:
        """The output is complete and nothing may follow."""
        ...

    @property
    def fault(self) -> str:
        """Why it accepts nothing any more, for the client; empty while all is well."""
        ...

    def accept(self, token: int) -> bool:
        """Advances by one sampled token. False: the grammar does not allow it here, or there is a fault."""
        ...

    def take_cost(self) -> float:
        """Seconds of CPU time spent here since this was last asked."""
        ...

    def forced(self) -> Sequence[int]:
        """Tokens that the grammar leaves no choice about from here on, perhaps none; already accepted on return."""
        ...


class GrammarBook(Protocol):
    """Compiled grammars. Called on the loop's thread; never blocks."""

    def open(self, spec: GrammarSpec, tenant: bytes = b"") -> Matcher | None:
        """A fresh matcher, or None while the grammar is being compiled: compilation has begun on return, and
        grammar_ready or grammar_failed follows by message. tenant: whose turn at the compiler it takes."""
        ...
