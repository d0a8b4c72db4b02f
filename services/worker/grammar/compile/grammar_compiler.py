"""xgrammar's compiler: what it takes, what it makes of that, and what it says where it does not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.worker.grammar.compile.byte_cursor import byte_vocabulary
from services.worker.grammar.compile.compiled import Compiled
from services.worker.grammar.schema.refusal import GrammarRefused

if TYPE_CHECKING:
    import xgrammar

_PLACE = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")  # the compiler's clock and source line


@dataclass(frozen=True, slots=True)
class Prepared:
    """What xgrammar is to compile: EBNF, or a structural tag in its own form."""

    is_tag: bool
    text: str


class GrammarCompiler:
    """info: the model's vocabulary. jumps: whether grammars are compiled for bytes too."""

    def __init__(self, info: xgrammar.TokenizerInfo, jumps: bool) -> None:
        self._compiler = _compiler(info)
        self._byte_compiler = _compiler(byte_vocabulary()) if jumps else None

    def compile(self, prepared: Prepared) -> Compiled:
        """Releases the interpreter's lock while it works. Raises GrammarRefused with the compiler's reason."""
        grammar = _compiled(prepared, self._compiler)
        return Compiled(grammar, None if self._byte_compiler is None else _compiled(prepared, self._byte_compiler))


def compiler_reason(message: str) -> str:
    """The compiler's words without its clock, source file and stack."""
    first = message.strip().splitlines()[0] if message.strip() else "the compiler gave no reason"
    return "needs too much memory" if "bad_alloc" in first else _PLACE.sub("", first)


def warning_in(log: str) -> str:
    """What the compiler has dropped in silence, but for its log; empty if nothing."""
    found = re.search(r"Warning: (.*)", log)
    return "" if found is None else found[1]


def _compiler(info: xgrammar.TokenizerInfo) -> xgrammar.GrammarCompiler:
    import xgrammar  # imported only where it is wanted

    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _compiled(prepared: Prepared, compiler: xgrammar.GrammarCompiler) -> xgrammar.CompiledGrammar:
    try:
        return compiler.compile_structural_tag(prepared.text) if prepared.is_tag else compiler.compile_grammar(prepared.text)
    except RuntimeError as error:
        raise GrammarRefused(compiler_reason(str(error))) from None
