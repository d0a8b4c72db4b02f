"""A chat's generation once it is known how its model writes: what its output is held to, and how it is read. Pure."""

from __future__ import annotations

from dataclasses import replace

import orjson

from rootstock.v1 import common_pb2 as pb
from services.gateway.api.openai.tools import ToolUse, held
from services.gateway.parsers.output_parser import MakeParsing
from services.gateway.parsers.tags.layouts import ORIGIN, Layout, Origin, regex, schema
from services.gateway.parsers.tags.structural_tags import after_reasoning
from services.gateway.request.errors import bad_request
from services.gateway.request.generation import Generation
from services.shared.output_formats import NONE, OutputFormats


def parsed_generation(generation: Generation, use: ToolUse, formats: OutputFormats, make: MakeParsing) -> Generation:
    """formats: of this prompt. Raises ApiError."""
    parsing = use.parsing(formats, make)
    field = generation.grammar_field or "response_format"
    answer = _answer(generation.sampling.grammar, Origin(field))
    if answer is not None and not use.forced:
        found = use.or_answer(formats, answer, field)
        if found is None and formats.reasoning != NONE:
            found = held(after_reasoning(formats, answer), field)
        if found is None:
            return replace(generation, parsing=parsing)
        generation.sampling.grammar.CopyFrom(found.grammar)
        return replace(generation, parsing=parsing, grammar_fields=found.fields)
    calls = use.grammar(formats)
    if calls is not None:
        if generation.sampling.HasField("grammar"):
            kind = "required" if use.forced else "strict"
            message = f"'{generation.grammar_field}' and calls that are {kind} exclude each other."
            raise bad_request(generation.grammar_field, message)
        generation.sampling.grammar.CopyFrom(calls.grammar)
        return replace(generation, parsing=parsing, grammar_field="tools", grammar_fields=calls.fields)
    return generation if parsing is generation.parsing else replace(generation, parsing=parsing)


def _answer(grammar: pb.Grammar, origin: Origin) -> Layout | None:
    """Of a structural tag, which says itself what comes when, and of no grammar there is none."""
    kind = grammar.WhichOneof("kind")
    if kind == "json_schema":
        return schema(orjson.loads(grammar.json_schema), origin)
    if kind == "json_object":
        return schema({"type": "object"}, origin)
    if kind == "regex":
        return {**regex(grammar.regex), ORIGIN: origin}
    return {"type": "grammar", "grammar": grammar.ebnf, ORIGIN: origin} if kind == "ebnf" else None
