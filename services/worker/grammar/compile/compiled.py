"""A grammar as xgrammar has compiled it, for the model's vocabulary and, where jumps are wanted, for single bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xgrammar


@dataclass(frozen=True, slots=True)
class Compiled:
    """Immutable, and shared by all its matchers. by_bytes: None where jumps are off."""

    grammar: xgrammar.CompiledGrammar
    by_bytes: xgrammar.CompiledGrammar | None

    @property
    def size(self) -> int:
        """Bytes, about."""
        by_bytes = 0 if self.by_bytes is None else self.by_bytes.memory_size_bytes
        return max(self.grammar.memory_size_bytes + by_bytes, 1)
