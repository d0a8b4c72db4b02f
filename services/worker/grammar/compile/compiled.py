"""Grammars as xgrammar has compiled them, for the model's vocabulary and, where jumps are wanted, for single bytes."""

from __future__ import annotations

from dataclasses import dataclass

import xgrammar

from services.worker.grammar.compile.byte_cursor import byte_vocabulary
from services.worker.grammar.compile.grammar_source import Prepared, compile_prepared


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


class GrammarCompiler:
    """info: the model's vocabulary. jumps: whether grammars are compiled for bytes too."""

    def __init__(self, info: xgrammar.TokenizerInfo, jumps: bool) -> None:
        self._compiler = _compiler(info)
        self._byte_compiler = _compiler(byte_vocabulary()) if jumps else None

    def compile(self, prepared: Prepared) -> Compiled:
        """Releases the interpreter's lock while it works. Raises GrammarRefused with the compiler's reason."""
        grammar = compile_prepared(prepared, self._compiler)
        return Compiled(grammar, None if self._byte_compiler is None else compile_prepared(prepared, self._byte_compiler))


def _compiler(info: xgrammar.TokenizerInfo) -> xgrammar.GrammarCompiler:
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
