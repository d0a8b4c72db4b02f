"""Translates a client's grammar into the input of xgrammar's compiler."""

from __future__ import annotations

from typing import Any

from services.shared.json_schema import too_large
from services.worker.core.contracts.grammar import GrammarKind, GrammarSpec
from services.worker.grammar.compile.grammar_compiler import Prepared
from services.worker.grammar.schema import json_rules
from services.worker.grammar.schema.json_document import parse_json
from services.worker.grammar.schema.refusal import GrammarRefused
from services.worker.grammar.schema.regex_rules import regex_ebnf
from services.worker.grammar.schema.schema_rules import schema_grammar
from services.worker.grammar.schema.structural_tag import structural_tag


def prepare(spec: GrammarSpec) -> Prepared:
    """Checks and translates a grammar. Runs in the compiling process, because a grammar may be made to be slow.

    Raises:
        GrammarRefused: the grammar is malformed, not supported or too large.
    """
    if spec.kind is GrammarKind.STRUCTURAL_TAG:
        _bounded(parse_json(spec.source, spec.kind), spec.label)
        return Prepared(True, structural_tag(spec.source, spec.parts))
    return Prepared(False, ebnf_of(spec))


def ebnf_of(spec: GrammarSpec) -> str:
    """Returns EBNF text with a rule named root. Raises GrammarRefused."""
    match spec.kind:
        case GrammarKind.JSON_OBJECT:
            return json_rules.finished({}, {}, json_rules.OBJECT).render()
        case GrammarKind.JSON_SCHEMA:
            return schema_grammar(_bounded(parse_json(spec.source, "json_schema"), spec.kind)).render()
        case GrammarKind.REGEX:
            return regex_ebnf(spec.source)
        case GrammarKind.EBNF:
            return spec.source
        case GrammarKind.STRUCTURAL_TAG:
            raise ValueError("a structural tag is no EBNF")


def _bounded(document: Any, kind: str) -> Any:
    """Returns the document itself. Raises GrammarRefused if it is too large."""
    why = too_large(document)
    if why:
        raise GrammarRefused(f"{kind}: {why}")
    return document
