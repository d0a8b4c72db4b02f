"""Calls xgrammar's compiler for the model's vocabulary and, if jumps are enabled, for single bytes.

Errors and warnings of the compiler become messages for the client.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rootstock_llm.services.worker.grammar.compile.byte_cursor import byte_vocabulary
from rootstock_llm.services.worker.grammar.schema.refusal import GrammarRefused

if TYPE_CHECKING:
    import xgrammar

_LOG_PREFIX = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")  # time and source line at the start of the compiler's messages


@dataclass(frozen=True, slots=True)
class Prepared:
    """The input of xgrammar's compiler."""

    is_tag: bool  # whether the text is a structural tag in xgrammar's form; otherwise it is EBNF
    text: str


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled grammar, immutable and shared by all its matchers."""

    grammar: xgrammar.CompiledGrammar
    by_bytes: xgrammar.CompiledGrammar | None  # the grammar compiled for single bytes, or None if jumps are disabled

    @property
    def size(self) -> int:
        """Approximate size in bytes, at least 1."""
        by_bytes = 0 if self.by_bytes is None else self.by_bytes.memory_size_bytes
        return max(self.grammar.memory_size_bytes + by_bytes, 1)


class GrammarCompiler:
    """Compiles grammars for a model's vocabulary and, if jumps are enabled, for bytes."""

    def __init__(self, info: xgrammar.TokenizerInfo, jumps: bool) -> None:
        self._compiler = _compiler(info)
        self._byte_compiler = _compiler(byte_vocabulary()) if jumps else None

    def compile(self, prepared: Prepared) -> Compiled:
        """Compiles a grammar. Releases the interpreter's lock. Raises GrammarRefused with the compiler's reason."""
        grammar = _compiled(prepared, self._compiler)
        return Compiled(grammar, None if self._byte_compiler is None else _compiled(prepared, self._byte_compiler))


def compiler_reason(message: str) -> str:
    """Returns the first line of the compiler's message, without the time and the C++ source line at its start."""
    first = message.strip().splitlines()[0] if message.strip() else "the compiler gave no reason"
    return "needs too much memory" if "bad_alloc" in first else _LOG_PREFIX.sub("", first)


def warning_in(log: str) -> str:
    """Returns the first warning in the compiler's log, or "". A warning means that the compiler ignores a part of the grammar."""
    found = re.search(r"Warning: (.*)", log)
    return "" if found is None else found[1]


def _compiler(info: xgrammar.TokenizerInfo) -> xgrammar.GrammarCompiler:
    import xgrammar  # imported at first use, because it takes seconds

    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _compiled(prepared: Prepared, compiler: xgrammar.GrammarCompiler) -> xgrammar.CompiledGrammar:
    try:
        return compiler.compile_structural_tag(prepared.text) if prepared.is_tag else compiler.compile_grammar(prepared.text)
    except RuntimeError as error:
        raise GrammarRefused(compiler_reason(str(error))) from None
