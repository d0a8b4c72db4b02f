"""Tests partial schemas of structural tags: unsupported keywords are left out, and all other keywords hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rootstock_llm.services.worker.core.contracts.grammar import GrammarKind, GrammarPart, GrammarSpec
from rootstock_llm.services.worker.grammar.compile.grammar_compiler import Compiled
from rootstock_llm.services.worker.grammar.schema.refusal import GrammarRefused
from tests.grammar import model

INT = {"type": "integer"}
OBJ = {"type": "object"}
WHOLE = GrammarPart("#/format", partial=True)

# (schema, texts that pass, texts that do not)
PARTIAL: dict[str, tuple[Any, list[str], list[str]]] = {
    "uniqueItems": ({"type": "array", "items": INT, "uniqueItems": True}, ["[1, 1]"], ['["a"]']),
    "nullable": ({"type": "string", "nullable": True, "maxLength": 2}, ['"ab"'], ['"abc"', "1"]),
    "pattern": ({"type": "string", "pattern": r"^(\w)\1$"}, ['"x"'], ["1"]),
    "format": ({"type": "string", "format": "iri", "maxLength": 1}, ['"x"'], ['"xy"']),
    "one member of many": (
        {**OBJ, "properties": {"a": {"not": {}}, "b": INT}, "required": ["a", "b"]},
        ['{"a": null, "b": 1}'],
        ['{"b": 1}', '{"a": 1, "b": "x"}'],
    ),
    "oneOf with overlapping members": ({"oneOf": [INT, {"type": "number"}]}, ["1", "1.5"], ['"a"']),
    "anyOf of required names": (
        {**OBJ, "properties": {"a": INT}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ["{}", '{"a": 1}'],
        ["[]", '{"a": "x"}'],
    ),
    "type with anyOf": ({**OBJ, "anyOf": [{**OBJ, "properties": {"a": INT}, "required": ["a"]}]}, ['{"a": 1}'], ["{}", "1"]),
    "allOf of several": ({**OBJ, "allOf": [{"properties": {"a": INT}}, {"properties": {"b": INT}}]}, ["{}", '{"c": 1}'], ["[]"]),
    "enum with limits": ({"enum": ["a", "b"], "minLength": 1}, ['"a"'], ['"c"']),
    "reference to nowhere": ({"$ref": "#/$defs/none"}, ["1", "{}"], ["nul"]),
    "unknown type": ({"type": "strnig"}, ["1"], ["{"]),
    "no finite value": ({**OBJ, "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, ["{}"], ["[]"]),
    "definitions": (
        {"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"type": "array", "items": INT, "contains": INT}}},
        ["[[1]]"],
        ["[1]", '[["a"]]'],
    ),
}


def tag(schema: Any, *parts: GrammarPart) -> Compiled:
    document = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    return model.compiled(GrammarSpec(GrammarKind.STRUCTURAL_TAG, json.dumps(document), parts))


@pytest.mark.parametrize("name", PARTIAL)
def test_partial_schema_leaves_out_unsupported_keywords(name: str) -> None:
    schema, passing, stopped = PARTIAL[name]
    grammar = tag(schema, WHOLE)
    for text in passing:
        assert model.accepts(grammar, text), f"{text} should pass"
    for text in stopped:
        assert not model.accepts(grammar, text), f"{text} should not pass"


def test_schema_is_refused_when_only_another_part_may_be_partial() -> None:
    with pytest.raises(GrammarRefused, match=r"^structural_tag: #/format: json_schema: #/uniqueItems: ") as refusal:
        tag(PARTIAL["uniqueItems"][0], GrammarPart("#/format/content", partial=True))
    assert refusal.value.part is None


@pytest.mark.parametrize(
    ("schema", "path"),
    [({"items": {"not": {}}}, "#/properties/a/items/not"), ({"$ref": "#/$defs/x", "$defs": {"x": {"not": {}}}}, "#/$defs/x/not")],
    ids=["subschema", "definition"],
)
def test_refusal_names_the_part_and_the_path_in_the_clients_schema(schema: Any, path: str) -> None:
    with pytest.raises(GrammarRefused) as refusal:
        tag(schema, GrammarPart("#/format/content"), GrammarPart("#/format", "/properties/a"))
    assert (str(refusal.value), refusal.value.part) == (f"{path}: this keyword is not supported", 1)


def test_partial_schema_is_built_once_when_every_level_has_an_unsupported_keyword() -> None:
    schema: Any = {"uniqueItems": True}
    for _ in range(25):
        schema = {"type": "array", "items": schema, "uniqueItems": True, "contains": {}, "unevaluatedItems": False}
    assert model.accepts(tag(schema, WHOLE), "[]")
