"""Tests of structural tags: texts are drawn under each tag, which is compiled as in a worker, and the parser reads the texts."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import jsonschema
import pytest

from rootstock_llm.services.gateway.output.formats.families import CALL_FORMATS
from rootstock_llm.services.gateway.output.output_parser import ParserSetup, Reasoning
from rootstock_llm.services.gateway.output.tags.demand import CallDemand, TagRefused, ToolSpec
from rootstock_llm.services.gateway.output.tags.layouts import Layout, const, either, regex, schema
from rootstock_llm.services.gateway.output.tags.structural_tags import BUILDERS, after_reasoning, call_tag, calls_or_answer
from rootstock_llm.services.shared.output_formats import REASONING_FORMATS, TOOL_FORMATS, OutputFormats
from rootstock_llm.services.worker.grammar.schema.structural_tag import structural_tag
from tests.services.gateway.output.drawing import Drawer, texts
from tests.services.gateway.output.outputs import calls_of, events, text_of

REFERRING: dict[str, Any] = {
    "type": "object",
    "$defs": {
        "place": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
        "note": {"type": "string"},
    },
    "properties": {"first": {"$ref": "#/$defs/note"}, "at": {"$ref": "#/$defs/place"}, "last": {"enum": ["a", 1, None]}},
    "required": ["at"],
    "additionalProperties": False,
}
ALL_OPTIONAL: dict[str, Any] = {
    "properties": {"a": {"type": ["string", "null"]}, "b": {"type": "boolean"}, "c d": {}, "e": True},
    "additionalProperties": False,
}
PICKING: dict[str, Any] = {
    "type": "object",
    "$defs": {"colour": {"title": "Colour", "enum": ["red", "green"], "type": "string"}},
    "properties": {
        "colour": {"$ref": "#/$defs/colour"},
        "mode": {"anyOf": [{"enum": ["r", "w"], "type": "string"}, {"type": "null"}], "default": None},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["colour", "mode", "more"],
    "additionalProperties": {"type": "integer"},
}
TOOLS = {"refer": REFERRING, "choose": ALL_OPTIONAL, "pick": PICKING, "any": {}, "bare": None}
ANSWERS: dict[str, Layout] = {
    "schema": schema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}),
    "pattern": regex('{"n": [0-9]}'),
    "choice": either(const('{"n": 1}'), const('{"n": 2}')),
}


MARKS = [
    '{"n": ',
    "\n</parameter>",
    "</function>",
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<|end|>",
    "<|channel|>analysis",
]


def drawn(tag: str | None, count: int = 12) -> list[str]:
    assert tag is not None
    return list(texts(Drawer(MARKS), [structural_tag(tag)], count, seed=5))


def demand(*tools: ToolSpec, forced: bool = False) -> CallDemand:
    return CallDemand(tools, forced, True)


def test_every_tool_format_has_a_parser_and_a_tag_builder() -> None:
    assert CALL_FORMATS.keys() - {""} | {"harmony"} == BUILDERS.keys() == TOOL_FORMATS.keys() - {""}


@pytest.mark.parametrize("name", BUILDERS)
def test_calls_drawn_from_a_tag_match_unusual_schemas(name: str) -> None:
    """The cases are references, optional parameters before or without required ones, several types, and no schema."""
    formats = OutputFormats(name, "harmony" if name == "harmony" else "think_open")
    setup = ParserSetup(TOOLS, 100)
    for tool, parameters in TOOLS.items():
        for text in drawn(call_tag(formats, demand(ToolSpec(tool, parameters), forced=True))):
            calls = calls_of(events(formats, [text], setup))
            assert calls and {called for called, _ in calls} == {tool}, text
            for _, arguments in calls:
                jsonschema.validate(arguments, parameters or {"type": "object"})


NO_PARAMETERS: dict[str, Any] = {
    "absent": None,
    "empty": {},
    "an empty list": {"type": "object", "properties": {}},
    "an empty list of required names": {"type": "object", "properties": {}, "required": []},
    "a description": {"description": "Takes nothing."},
}
OPEN_PARAMETERS: dict[str, Any] = {
    "object": {"type": "object"},
    "additional properties": {"type": "object", "additionalProperties": True},
    "additional properties and an empty list": {"type": "object", "properties": {}, "additionalProperties": True},
}


def drawn_arguments(name: str, parameters: Any, strict: bool) -> list[Any]:
    tool = ToolSpec("f", parameters, strict)
    formats, setup = OutputFormats(name), ParserSetup({"f": parameters}, 100)
    if name == "harmony":
        formats = OutputFormats(name, "harmony")
    texts_of = drawn(call_tag(formats, demand(tool, forced=True)), 24)
    return [arguments for text in texts_of for _, arguments in calls_of(events(formats, [text], setup))]


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("strict", [False, True], ids=["loose", "strict"])
def test_forced_call_has_no_arguments_when_the_function_lists_no_parameters(name: str, strict: bool) -> None:
    for case, parameters in NO_PARAMETERS.items():
        found = drawn_arguments(name, parameters, strict)
        assert found and not any(found), case


@pytest.mark.parametrize("name", BUILDERS)
def test_forced_call_may_have_any_arguments_when_the_schema_allows_more_properties(name: str) -> None:
    for case, parameters in OPEN_PARAMETERS.items():
        assert any(drawn_arguments(name, parameters, False)), case


def test_parts_of_a_tag_name_the_request_fields_of_the_tools() -> None:
    tools = (ToolSpec("f", {"type": "object"}, True, "tools[0]"), ToolSpec("g", {"type": "object"}, False, "tools[1]"))
    for name in BUILDERS:
        tag = call_tag(OutputFormats(name), demand(*tools, forced=True))
        assert tag is not None and "origin" not in tag
        strict = {origin.field: not origin.partial for origin in tag.origins.values()}
        assert strict in ({"tools[0]": True, "tools[1]": False}, {}), name


def test_constrained_answer_begins_after_the_reasoning() -> None:
    for reasoning in REASONING_FORMATS:
        formats = OutputFormats("harmony" if reasoning == "harmony" else "", reasoning)
        for kind, answer in ANSWERS.items():
            found = [events(formats, [text]) for text in drawn(after_reasoning(formats, answer), 8)]
            assert all(json.loads(text_of(each)).keys() >= {"n"} for each in found), (reasoning, kind)
            assert any(text_of(each, Reasoning) for each in found) == bool(reasoning), (reasoning, kind)


@pytest.mark.parametrize("name", BUILDERS)
def test_tag_allows_calls_or_an_answer_but_not_both(name: str) -> None:
    """Calls of strict tools follow their schemas."""
    formats = OutputFormats(name, "harmony" if name == "harmony" else "think")
    setup = ParserSetup(TOOLS, 100)
    tools = demand(ToolSpec("refer", REFERRING, True), ToolSpec("any", {"required": ["x"]}))
    kinds = set()
    for kind, answer in ANSWERS.items():
        for text in drawn(calls_or_answer(formats, tools, answer), 16):
            found = events(formats, [text], setup)
            calls = calls_of(found)
            kinds.add(bool(calls))
            assert bool(calls) != bool(text_of(found).strip()), (kind, text)
            for called, arguments in calls:
                jsonschema.validate(arguments, REFERRING if called == "refer" else {"type": "object"})
            assert calls or json.loads(text_of(found)).keys() >= {"n"}, (kind, text)
    assert kinds == {True, False}


def test_definition_in_a_schema_is_read_once_when_many_references_use_the_definition() -> None:
    again = {"anyOf": [{"$ref": "#/$defs/a"}] * 40}
    schemas = ({"$ref": "#/$defs/a"}, {"anyOf": [{"$ref": "#/$defs/a"}, {"enum": ["x"]}]})
    for each in schemas:
        tool = ToolSpec("f", {"$defs": {"a": again}, "properties": {"a": each}}, True)
        with pytest.raises(TagRefused) if each is schemas[0] else nullcontext():
            call_tag(OutputFormats("qwen3_coder"), demand(tool))


def test_tag_restricts_the_arguments_only_for_strict_tools_unless_calls_are_forced() -> None:
    loose, strict = ToolSpec("loose", {"required": ["x"]}), ToolSpec("strict", {"required": ["x"]}, True)
    assert call_tag(OutputFormats("hermes"), demand(loose)) is None
    assert '"strict\\"' in str(call_tag(OutputFormats("hermes"), demand(loose, strict)))
    both = demand(loose, strict)
    assert both.parameters(loose) == {"type": "object"} and "required" in both.parameters(strict)
    assert "required" in demand(loose, forced=True).parameters(loose)


# By case: a format, and parameters of a strict tool that the format cannot express.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "limits of an unquoted string": ("qwen3_coder", {"properties": {"a": {"type": "string", "minLength": 2}}}),
    "unquoted string or number": ("qwen3_coder", {"properties": {"a": {"type": ["string", "number"]}}}),
    "limits behind a reference": (
        "qwen3_coder",
        {"$defs": {"a": {"type": "string", "pattern": "x"}}, "properties": {"a": {"$ref": "#/$defs/a"}}},
    ),
    "limits of one anyOf member": (
        "qwen3_coder",
        {"properties": {"a": {"anyOf": [{"type": "string", "maxLength": 1}, {"type": "null"}]}}},
    ),
    "limits and enum": ("qwen3_coder", {"properties": {"a": {"enum": ["x", "yy"], "minLength": 2}}}),
    "limits of any type": ("qwen3_coder", {"properties": {"a": {"minimum": 1}}}),
    "a reference to itself": ("qwen3_coder", {"properties": {"a": {"$ref": "#/properties/a"}}}),
    "limits of the object": ("pythonic", {"properties": {"a": {}}, "minProperties": 1}),
    "names of properties": ("qwen3_coder", {"propertyNames": {"pattern": "a"}}),
    "no list of parameters": ("qwen3_coder", {"anyOf": [{"properties": {}}]}),
    "no keyword": ("pythonic", {"properties": {"a b": {}}, "required": ["a b"]}),
}


def test_tag_is_refused_when_a_format_cannot_express_the_schema() -> None:
    for case, (name, parameters) in REFUSED.items():
        with pytest.raises(TagRefused):
            print(case, call_tag(OutputFormats(name), demand(ToolSpec("f", parameters, True))))
