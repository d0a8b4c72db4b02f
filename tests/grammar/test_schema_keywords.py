"""Tests the texts that each supported keyword allows and refuses, and the refusals of unsupported keywords by their path."""

# ruff: noqa: E501 (one case a line)
from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from rootstock_llm.services.worker.core.contracts.grammar import GrammarKind, GrammarSpec
from rootstock_llm.services.worker.grammar.schema.refusal import GrammarRefused
from tests.grammar import model

OBJ = {"type": "object"}
A_INT = {"a": {"type": "integer"}}
TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
            "required": ["v"],
        }
    },
}
TAGGED = {
    "oneOf": [
        {"type": "object", "properties": {"k": {"const": "a"}, "n": {"type": "integer"}}, "required": ["k", "n"]},
        {"type": "object", "properties": {"k": {"const": "b"}, "s": {"type": "string"}}, "required": ["k"]},
    ]
}
MANY = {"enum": [*range(200), *(f"item {at}" for at in range(40)), "item", *([at] for at in range(20))]}

# (name, schema, texts that pass, texts that do not)
SUPPORTED: list[tuple[str, Any, list[str], list[str]]] = [
    ("true", True, ["1", '"x"', "[]", "{}", "null", '{"a": [1, {"b": null}]}'], ["", "{", "nul", "[1,]", "{'a': 1}"]),
    ("empty schema", {}, ["-0.5e+10", "[[], {}]"], ["01", "+1", ".5", "1."]),
    ("type string", {"type": "string"}, ['""', '"世界 🌱"', '"\\n\\u00e9\\ud83c\\udf31"'], ["1", '"\n"', '"\\x"', '"\\ud83c"']),
    ("type integer", {"type": "integer"}, ["0", "-7", "12345678901234567890"], ["1.5", "1e3", "01", "-0", '"1"']),
    ("type number", {"type": "number"}, ["0", "-0", "1.50", "1e-7"], ["01", "NaN", "Infinity", "0x1"]),
    ("type boolean", {"type": "boolean"}, ["true", "false"], ["True", "0", "null"]),
    ("type null", {"type": "null"}, ["null"], ["None", '""']),
    ("type list", {"type": ["string", "null"], "maxLength": 1}, ["null", '"a"'], ['"ab"', "1"]),
    ("minimum", {"type": "integer", "minimum": -3}, ["-3", "0", "99"], ["-4", "-10"]),
    ("maximum", {"type": "number", "maximum": 2.5}, ["2.5", "-100", "2.49"], ["2.51", "3", "10"]),
    ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0}, ["0.1", "1"], ["0", "0.0", "-1"]),
    ("exclusiveMaximum", {"type": "integer", "exclusiveMaximum": 10}, ["9", "-50"], ["10", "11"]),
    ("both minima", {"type": "number", "minimum": 1, "exclusiveMinimum": 1}, ["1.5"], ["1", "1.0"]),
    ("minimum, the tighter", {"type": "integer", "minimum": 3, "exclusiveMinimum": 1}, ["3"], ["2"]),
    ("exclusiveMinimum, the tighter", {"type": "integer", "minimum": 1, "exclusiveMinimum": 3}, ["4"], ["2", "3"]),
    ("fractions bound integers", {"type": "integer", "minimum": 1.5, "exclusiveMaximum": 3.5}, ["2", "3"], ["1", "4"]),
    ("number, bounds of many digits", {"type": "number", "minimum": 0, "maximum": (1 << 63) - 1}, ["0.5", "9223372036854774784"], ["9223372036854775808"]),
    ("number, exclusive bound of many digits", {"type": "number", "exclusiveMinimum": 193944137238}, ["193944137239"], ["193944137238.000001"]),
    ("multipleOf", {"type": "integer", "multipleOf": 7}, ["0", "14", "-21", "70000000000007"], ["1", "8", "-6"]),
    ("multipleOf, bounds", {"type": "integer", "multipleOf": 5, "minimum": -5, "exclusiveMaximum": 100}, ["-5", "0", "95"],
     ["-10", "100", "7", "05", "-0"]),
    ("multipleOf, safe integers", {"type": "integer", "multipleOf": 7, "minimum": -9007199254740991, "maximum": 9007199254740991},
     ["0", "-14", "70000000000007"], ["1", "-8", "7.0"]),
    ("multipleOf, a fraction", {"type": "number", "multipleOf": 0.25, "minimum": 0.6, "maximum": 12}, ["0.75", "3", "12.00"],
     ["0.50", "12.25", "3.10", "00.75", "1.", "3.0"]),
    ("multipleOf, numbers", {"type": "number", "multipleOf": 1.5}, ["1.5", "-3", "0", "3.0"], ["1", "2.5", "-0"]),
    ("minLength", {"type": "string", "minLength": 2}, ['"ab"', '"世界"'], ['""', '"a"', '"世"']),
    ("maxLength", {"type": "string", "maxLength": 2}, ['""', '"世🌱"'], ['"abc"', '"a\tb"']),
    ("pattern is sought anywhere", {"type": "string", "pattern": "b+"}, ['"b"', '"abba"'], ['"a"', '""']),
    ("pattern with anchors", {"type": "string", "pattern": "^a|b$"}, ['"ax"', '"xb"'], ['"xa"', '"bx"']),
    ("pattern in JSON's spelling", {"type": "string", "pattern": '^["\\\\]\\n$'}, ['"\\"\\n"', '"\\\\\\n"'], ['"""', '"\\n"']),
    ("pattern, lengths", {"type": "string", "pattern": "b", "minLength": 2, "maxLength": 3}, ['"ab"', '"cbc"'], ['"b"', '"abcd"']),
    ("pattern, a length implied", {"type": "string", "pattern": "^a{3}$", "minLength": 2, "maxLength": 9}, ['"aaa"'], ['"aa"']),
    ("pattern, format", {"type": "string", "pattern": "^1", "format": "ipv4"}, ['"1.2.3.4"'], ['"2.2.3.4"', '"1.2.3"', '"1"']),
    ("pattern, unknown format", {"type": "string", "pattern": "^a$", "format": "slug"}, ['"a"'], ['"b"']),
    ("pattern, contentEncoding", {"type": "string", "pattern": "^a$", "contentEncoding": "base64"}, ['"a"'], ['"b"']),
    ("contentEncoding", {"type": "string", "contentEncoding": "base64"}, ['""', '"AAAA"', '"AA=="'], ['"A"', '"A==="']),
    ("lookahead", {"type": "string", "pattern": "^(?=.*[0-9])(?=.*[a-z])[a-z0-9]{2,4}$"}, ['"a1"', '"00z0"'], ['"ab"', '"1"']),
    ("negative lookahead", {"type": "string", "pattern": "^(?!no)[a-z]+$"}, ['"on"', '"n"'], ['"no"', '"nothing"']),
    ("lookahead in a loop", {"type": "string", "pattern": "^(?:(?!--)[a-z-])+$"}, ['"a-b"', '"-"'], ['"a--b"', '""']),
    ("lookahead within", {"type": "string", "pattern": "^a(?=b|$)b?c?$"}, ['"a"', '"ab"', '"abc"'], ['"ac"']),
    ("lookahead for a class", {"type": "string", "pattern": "^(?!\\d).$"}, ['"a"', '"é"'], ['"1"', '"٣"']),
    ("anchors within", {"type": "string", "pattern": "^(?:a$|b)"}, ['"a"', '"bc"'], ['"ac"']),
    ("format binary", {"type": "string", "format": "binary"}, ['"a\\n"'], ["1"]),
    ("format uuid4", {"type": "string", "format": "uuid4"}, ['"00000000-0000-4000-8000-00000000abcd"'], ['"00000000-0000-1000-8000-00000000abcd"']),
    ("format date in a leap year", {"type": "string", "format": "date"}, ['"2024-02-29"', '"2000-02-29"'], ['"2023-02-29"', '"1900-02-29"']),
    ("format date", {"type": "string", "format": "date"}, ['"2024-02-28"'], ['"2024-02-30"', '"2024-13-01"', '"x"']),
    ("format uuid", {"type": "string", "format": "uuid"}, ['"00000000-0000-4000-8000-00000000abcd"'], ['"0000"']),
    ("format ipv6", {"type": "string", "format": "ipv6"}, ['"::"', '"::1"', '"fe80::1:2"'], ['"::1::"', '"1:2"', '"g::"']),
    ("many values that begin alike", MANY, ["0", "1", "17", "171", '"item 3"', '"item 30"', '"item"', "[3]"], ["200", '"item 4x"', '"item "', '"ite"', "[30]"]),
    ("enum", {"enum": ["a", 1, None, [True]]}, ['"a"', "1", "null", "[true]"], ['"b"', "2", "[]"]),
    ("enum with type", {"type": "string", "enum": ["a", 1]}, ['"a"'], ["1"]),
    ("const", {"const": {"a": [1, '"\n']}}, ['{"a":[1,"\\"\\n"]}'], ['{"a":[1]}', "1"]),
    ("items", {"type": "array", "items": {"type": "integer"}}, ["[]", "[1, 2]", "[\n  1,\n  2\n]"], ['["a"]', "[1,]", "[,]"]),
    ("items false", {"type": "array", "items": False}, ["[]"], ["[1]"]),
    ("minItems", {"type": "array", "minItems": 2}, ['[1, "a"]', "[1, 2, 3]"], ["[]", "[1]"]),
    ("maxItems", {"type": "array", "maxItems": 1}, ["[]", "[1]"], ["[1, 2]"]),
    ("minItems and maxItems", {"items": {"type": "null"}, "minItems": 1, "maxItems": 2}, ["[null]"], ["[]", "[null,null,null]"]),
    ("prefixItems", {"prefixItems": [{"type": "integer"}, {"type": "null"}]}, ["[]", "[1]", "[1,null]"], ["[null]", "[1,null,1]"]),
    ("prefixItems, items", {"prefixItems": [{"type": "integer"}], "items": {"type": "null"}}, ["[1,null,null]"], ["[1,1]"]),
    ("prefixItems, minItems", {"prefixItems": [{"type": "integer"}], "minItems": 2}, ['[1,"x"]', "[1,2,3]"], ["[1]", "[]"]),
    ("prefixItems, maxItems", {"prefixItems": [{"type": "null"}] * 3, "maxItems": 1}, ["[]", "[null]"], ["[null,null]"]),
    ("properties", {**OBJ, "properties": A_INT}, ["{}", '{"a": 1}', '{"a":1}', '{\n  "a": 1\n}'], ['{"a": "x"}', '{"b": 1}']),
    ("required", {**OBJ, "properties": {**A_INT, "b": {}}, "required": ["b"]}, ['{"b": 0}', '{"a": 1, "b": 0}'], ['{"a": 1}', "{}"]),
    ("required, undeclared", {**OBJ, "required": ["z"]}, ['{"z": null}'], ["{}", '{"a": 1}']),
    ("maxLength of 33 bits", {"type": "string", "maxLength": 1 << 32}, ['""', '"abc"'], ["1"]),
    ("maxItems of 33 bits", {"type": "array", "maxItems": (1 << 32) + 1}, ["[]", "[1, 2]"], ["1"]),
    ("no properties", {**OBJ, "properties": {}}, ["{}", "{ }"], ['{"a": 1}', '{"": "Lima"}']),
    ("propertyNames of any string", {**OBJ, "propertyNames": {"type": "string"}}, ["{}", '{"a": 1}'], ["1"]),
    ("propertyNames, required", {**OBJ, "propertyNames": {"enum": ["a", "b"]}, "required": ["b"], "additionalProperties": {"type": "null"}},
     ['{"b": null}', '{"a": null, "b": null}'], ["{}", '{"a": null}', '{"b": 1}', '{"b": null, "c": null}']),
    ("propertyNames by format", {**OBJ, "propertyNames": {"format": "date"}}, ['{"2024-01-01": 1}'], ['{"a": 1}']),
    ("additionalProperties", {**OBJ, "properties": A_INT, "additionalProperties": True}, ['{"b": 1}', '{"a": 1, "b": "x"}'],
     ['{"a": "x"}', '{"a": 1, "a": "x"}', '{"a": 1, "\\u0061": "x"}']),
    ("additionalProperties schema", {**OBJ, "additionalProperties": {"type": "null"}}, ["{}", '{"x": null}'], ['{"x": 1}']),
    ("additionalProperties false", {**OBJ, "additionalProperties": False}, ["{}"], ['{"x": 1}']),
    ("unevaluatedProperties", {**OBJ, "properties": A_INT, "unevaluatedProperties": {"type": "null"}}, ['{"b": null}'], ['{"b": 1}']),
    ("patternProperties", {**OBJ, "patternProperties": {"^x_": {"type": "integer"}}}, ["{}", '{"x_a": 1}'], ['{"x_a": "s"}', '{"y": 1}']),
    ("propertyNames", {**OBJ, "propertyNames": {"pattern": "^[ab]+$"}}, ['{"ab": 1}'], ['{"c": 1}']),
    ("propertyNames enum", {**OBJ, "propertyNames": {"enum": ["on", "off"]}}, ['{"on": 1}'], ['{"c": 1}']),
    ("propertyNames length", {**OBJ, "propertyNames": {"maxLength": 2}}, ['{"ab": 1}'], ['{"abc": 1}']),
    ("minProperties", {**OBJ, "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2}, ['{"a":1,"c":1}'], ["{}", '{"b":1}']),
    ("maxProperties", {**OBJ, "properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 1}, ["{}", '{"c":1}'], ['{"a":1,"b":1}']),
    ("minProperties, open", {**OBJ, "minProperties": 1}, ['{"x": 1}'], ["{}"]),
    ("anyOf", {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 1}]}, ["null", '"a"'], ['"ab"', "1"]),
    ("oneOf by type", {"oneOf": [{"type": "null"}, {"type": "integer"}]}, ["null", "3"], ['"a"', "true"]),
    ("oneOf by constant", TAGGED, ['{"k": "a", "n": 1}', '{"k": "b"}'], ['{"k": "a"}', '{"k": "c"}', '{"k": "b", "n": 1}']),
    ("allOf of one", {"allOf": [{"type": "integer"}]}, ["1"], ['"a"']),
    ("$ref", {"type": "array", "items": {"$ref": "#/definitions/a~1b"}, "definitions": {"a/b": {"type": "null"}}}, ["[null]"], ["[1]"]),
    ("$ref to itself", TREE, ['{"v": 1}', '{"v": 1, "kids": [{"v": 2, "kids": []}]}'], ['{"kids": []}', '{"v": 1, "kids": [1]}']),
    ("annotations", {"title": "t", "description": "d", "default": 1, "examples": [1], "x-own": 1, "type": "null"}, ["null"], ["1"]),
]  # fmt: skip


@pytest.mark.by_day(one_in=2, seed=44)
@pytest.mark.parametrize("name, schema, passing, stopped", SUPPORTED, ids=[case[0] for case in SUPPORTED])
def test_schema_keyword_allows_valid_texts_and_refuses_invalid_texts(
    name: str, schema: Any, passing: list[str], stopped: list[str]
) -> None:
    grammar = model.compiled(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    validator = jsonschema.Draft202012Validator(schema)
    for text in passing:
        assert validator.is_valid(json.loads(text)), f"jsonschema refuses {text}"
        assert model.accepts(grammar, text), f"{text} should pass"
    for text in stopped:
        assert not model.accepts(grammar, text), f"{text} should not pass"


# (schema, JSON pointer of the refused keyword)
UNSUPPORTED: list[tuple[Any, str]] = [
    (False, "#"),
    ([], "#"),
    ({"not": {}}, "#/not"),
    ({"type": "array", "uniqueItems": True}, "#/uniqueItems"),
    ({"type": "array", "items": [{}]}, "#/items"),
    ({"type": "array", "unevaluatedItems": False}, "#/unevaluatedItems"),
    ({"type": "number", "multipleOf": 0.1}, "#/multipleOf"),
    ({"type": "integer", "multipleOf": 3, "minimum": 1, "maximum": 2}, "#"),
    ({"type": "integer", "multipleOf": 0}, "#/multipleOf"),
    ({**OBJ, "dependentRequired": {"a": ["b"]}}, "#/dependentRequired"),
    ({**OBJ, "additionalProperties": True, "minProperties": 2}, "#/minProperties"),
    ({**OBJ, "patternProperties": {"a": {}, "b": {}}}, "#/patternProperties"),
    ({**OBJ, "patternProperties": {"^a": {}}, "properties": A_INT}, "#/patternProperties/^a"),
    ({**OBJ, "patternProperties": {"^a": {}}, "additionalProperties": {}}, "#/additionalProperties"),
    ({**OBJ, "propertyNames": {"maxLength": 1}, "properties": A_INT}, "#/propertyNames"),
    ({"type": "string", "pattern": "^a{4}$", "maxLength": 3}, "#/pattern"),
    ({"type": "string", "pattern": "(?:a|b){1000}a.{12}b", "maxLength": 9000}, "#/pattern"),
    ({"type": "string", "pattern": "(?<=a)b"}, "#/pattern"),
    ({"type": "string", "pattern": "\\p{L}"}, "#/pattern"),
    ({"type": "string", "format": "uri", "maxLength": 2083}, "#/format"),
    ({"type": "string", "format": "ipv4", "pattern": "^a"}, "#/pattern"),
    ({"type": "string", "contentEncoding": "7bit"}, "#/contentEncoding"),
    ({**OBJ, "propertyNames": {"enum": ["a"]}, "required": ["b"]}, "#/required"),
    ({**OBJ, "propertyNames": {"enum": [1]}}, "#/propertyNames"),
    ({**OBJ, "properties": {"a": {"propertyNames": {"type": "integer"}}}}, "#/properties/a/propertyNames"),
    ({**OBJ, "propertyNames": False}, "#/propertyNames"),
    ({**OBJ, "propertyNames": None}, "#/propertyNames"),
    ({**OBJ, "propertyNames": False, "properties": A_INT}, "#/propertyNames"),
    ({**OBJ, "propertyNames": {"enum": ["a"], "type": "integer"}}, "#/propertyNames"),
    ({**OBJ, "patternProperties": None}, "#/patternProperties"),
    ({**OBJ, "additionalProperties": None}, "#/additionalProperties"),
    ({**OBJ, "propertyNames": {"maxLength": 1}, "properties": A_INT, "additionalProperties": False}, "#/propertyNames"),
    ({"type": "array", "minItems": (1 << 32) + 1}, "#/minItems"),
    ({"type": "string", "minLength": (1 << 32) + 1}, "#/minLength"),
    ({"type": "integer", "minimum": 10**400}, "#/minimum"),
    ({"type": "number", "multipleOf": 10**400}, "#/multipleOf"),
    ({"oneOf": [{"const": {"a": [1]}}, {"const": {"a": [1.0]}}]}, "#/oneOf"),
    ({"type": "string", "pattern": "(?=a)b"}, "#/pattern"),
    ({"type": "string", "format": "iri"}, "#/format"),
    ({"type": "strnig"}, "#/type"),
    ({"type": []}, "#/type"),
    ({"minlength": 1}, "#/minlength"),
    ({"minLength": 1, "minimum": 1}, "#"),
    ({"type": "string", "minLength": 3, "maxLength": 1}, "#/minLength"),
    ({"type": "string", "minLength": -1}, "#/minLength"),
    ({"type": "integer", "minimum": True}, "#/minimum"),
    ({"enum": []}, "#/enum"),
    ({"enum": [1], "type": "string"}, "#/enum"),
    ({"enum": ["a"], "minLength": 1}, "#/minLength"),
    ({"anyOf": []}, "#/anyOf"),
    ({"anyOf": [{}], "type": "string"}, "#/type"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf"),
    ({"oneOf": [{"properties": A_INT}, {"properties": {"b": {}}}]}, "#/oneOf"),
    ({"allOf": [{}, {}]}, "#/allOf"),
    ({"$ref": "#/$defs/a", "minimum": 1, "$defs": {"a": {}}}, "#/minimum"),
    ({"$ref": "#name"}, "#/$ref"),
    ({"$ref": "#/$defs/none"}, "#/$ref"),
    ({"$ref": "#"}, "#"),
    ({**OBJ, "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#"),
    ({**OBJ, "properties": {"a/b": {"items": {"not": {}}}}}, "#/properties/a~1b/items/not"),
    ({"anyOf": [{}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"not": {}}}}, "#/$defs/x/not"),
    ({"type": "number", "minimum": 1e-8, "maximum": 1e-7}, "#"),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-7}, "#"),
    ({"type": "string", "pattern": "\\t(?=b)\\s$"}, "#/pattern"),
]


@pytest.mark.by_day(one_in=5, seed=19)
@pytest.mark.parametrize("schema, pointer", UNSUPPORTED, ids=[json.dumps(case[0])[:60] for case in UNSUPPORTED])
def test_unsupported_keyword_is_refused_with_a_json_pointer(schema: Any, pointer: str) -> None:
    with pytest.raises(GrammarRefused, match=r"^json_schema: ") as refusal:
        model.compiled(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    assert str(refusal.value).split(": ")[1] == pointer
    assert "\n" not in str(refusal.value)


def test_schema_is_refused_when_a_number_exceeds_the_range_of_a_double() -> None:
    with pytest.raises(GrammarRefused, match="a number exceeds the range of a double"):
        model.compiled(GrammarSpec(GrammarKind.JSON_SCHEMA, '{"const": -1e999}'))
