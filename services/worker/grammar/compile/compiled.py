"""A grammar that xgrammar has compiled, for the model's vocabulary and, if jumps are enabled, for single bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xgrammar


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled grammar, immutable and shared by all its matchers."""

    grammar: xgrammar.CompiledGrammar
    by_bytes: xgrammar.CompiledGrammar | None  # for single bytes, or None if jumps are disabled

    @property
    def size(self) -> int:
        """Approximate size in bytes, at least 1."""
        by_bytes = 0 if self.by_bytes is None else self.by_bytes.memory_size_bytes
        return max(self.grammar.memory_size_bytes + by_bytes, 1)
