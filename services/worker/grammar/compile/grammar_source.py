"""From what a client wrote to what xgrammar compiles."""

from __future__ import annotations

import re
from dataclasses import dataclass

import xgrammar

from services.worker.core.contracts.sampling import GrammarKind, GrammarSpec
from services.worker.grammar.schema import json_rules
from services.worker.grammar.schema.json_text import parse_json
from services.worker.grammar.schema.refusal import GrammarRefused
from services.worker.grammar.schema.regex_rules import regex_ebnf
from services.worker.grammar.schema.schema_rules import schema_grammar
from services.worker.grammar.schema.structural_tag import structural_tag

_PLACE = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")  # the compiler's clock and source line


@dataclass(frozen=True, slots=True)
class Prepared:
    """What xgrammar is to compile: EBNF, or a structural tag in its own form."""

    is_tag: bool
    text: str


def prepare(spec: GrammarSpec) -> Prepared:
    """Checks and translates. Raises GrammarRefused. Runs in the compiling process: it may be slow on purpose."""
    if spec.kind is GrammarKind.STRUCTURAL_TAG:
        return Prepared(True, structural_tag(spec.source))
    return Prepared(False, ebnf_of(spec))


def compile_prepared(prepared: Prepared, compiler: xgrammar.GrammarCompiler) -> xgrammar.CompiledGrammar:
    """Releases the interpreter's lock while it works. Raises GrammarRefused with the compiler's reason."""
    try:
        return compiler.compile_structural_tag(prepared.text) if prepared.is_tag else compiler.compile_grammar(prepared.text)
    except RuntimeError as error:
        raise GrammarRefused(compiler_reason(str(error))) from None


def ebnf_of(spec: GrammarSpec) -> str:
    """EBNF text with a rule named root. Raises GrammarRefused."""
    match spec.kind:
        case GrammarKind.JSON_OBJECT:
            return json_rules.finished({}, {}, json_rules.OBJECT).render()
        case GrammarKind.JSON_SCHEMA:
            return schema_grammar(parse_json(spec.source, "json_schema")).render()
        case GrammarKind.REGEX:
            return regex_ebnf(spec.source)
        case GrammarKind.EBNF:
            return spec.source
        case GrammarKind.STRUCTURAL_TAG:
            raise ValueError("a structural tag is no EBNF")


def compiler_reason(message: str) -> str:
    """The compiler's words without its clock, source file and stack."""
    first = message.strip().splitlines()[0] if message.strip() else "the compiler gave no reason"
    return "needs too much memory" if "bad_alloc" in first else _PLACE.sub("", first)


def warning_in(log: str) -> str:
    """What the compiler has dropped in silence, but for its log; empty if nothing."""
    found = re.search(r"Warning: (.*)", log)
    return "" if found is None else found[1]
