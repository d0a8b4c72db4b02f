"""A chat's generation once it is known how its model writes: what its output is held to, and how it is read. Pure."""

from __future__ import annotations

from dataclasses import replace

import orjson

from rootstock.v1 import common_pb2 as pb
from services.gateway.api.constraints import structural_tag
from services.gateway.api.openai.tools import ToolUse
from services.gateway.parsers.output_parser import MakeParsing
from services.gateway.parsers.tags.layouts import Layout
from services.gateway.parsers.tags.structural_tags import after_reasoning
from services.gateway.request.errors import bad_request
from services.gateway.request.generation import Generation
from services.shared.output_formats import NONE, OutputFormats


def parsed_generation(generation: Generation, use: ToolUse, formats: OutputFormats, make: MakeParsing) -> Generation:
    """formats: of this prompt. Raises ApiError."""
    constrained = generation.sampling.HasField("grammar")
    calls = use.grammar(formats)
    if calls is not None and constrained:
        raise bad_request(
            generation.grammar_field, f"'{generation.grammar_field}' and calls that are required or strict exclude each other."
        )
    parsing = use.parsing(formats, generation.skip_special_tokens, make)
    if calls is not None:
        generation.sampling.grammar.CopyFrom(calls)
        return replace(generation, parsing=parsing, grammar_field="tools")
    if constrained and formats.reasoning != NONE:
        held = _after_reasoning(generation.sampling.grammar, formats, generation.grammar_field or "response_format")
        if held is not None:
            generation.sampling.grammar.CopyFrom(held)
    return replace(generation, parsing=parsing)


def _after_reasoning(grammar: pb.Grammar, formats: OutputFormats, field: str) -> pb.Grammar | None:
    """None for a structural tag, which says itself what comes when. field: the client's, for a refusal. Raises ApiError."""
    kind = grammar.WhichOneof("kind")
    layout: Layout
    if kind == "json_schema":
        layout = {"type": "json_schema", "json_schema": orjson.loads(grammar.json_schema)}
    elif kind == "json_object":
        layout = {"type": "json_schema", "json_schema": {"type": "object"}}
    elif kind == "regex":
        layout = {"type": "regex", "pattern": grammar.regex}
    elif kind == "ebnf":
        layout = {"type": "grammar", "grammar": grammar.ebnf}
    else:
        return None
    return structural_tag(after_reasoning(formats, layout), field)
