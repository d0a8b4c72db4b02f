"""Tests random schemas: all random output under their masks parses and validates."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from rootstock_llm.services.worker.core.contracts.grammar import GrammarKind, GrammarSpec
from rootstock_llm.services.worker.grammar.schema.formats import PATTERNS
from tests.grammar import model
from tests.night import NIGHTLY

BLOCKS, SCHEMAS = (10, 200) if NIGHTLY else (6, 20)  # test cases, and schemas per test case
WRITES = 5 if NIGHTLY else 2  # outputs per schema
NAMES = ["a", "b", "name", "naïve 世界", 'quo"te', "a\\b", "", "line\nend", "x_1", "x"]
TEXT_PATTERNS = [
    "^[a-z]+$",
    "b",
    "^a|z$",
    r"^\d{2,4}-\w+$",
    '^["\\\\/\\n]{1,3}$',
    "^.{3,5}$",
    r"^(?:on|off)\s?$",
    "^[^a-z]*$",
    "é+",
]
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


def make_schema(chooser: random.Random, depth: int) -> Any:
    makers: list[Callable[[random.Random, int], Any]] = [_string, _number, _constant, _plain]
    if depth > 0:
        makers += [_object, _object, _array, _union, _reference]
    return chooser.choice(makers)(chooser, depth)


def _plain(chooser: random.Random, depth: int) -> Any:
    return chooser.choice([{"type": "boolean"}, {"type": "null"}, {"type": ["null", "integer"]}, {"type": "string"}, {}, True])


def _string(chooser: random.Random, depth: int) -> Any:
    low = chooser.randrange(4)
    return {
        "type": "string",
        **chooser.choice(
            [
                {"minLength": low},
                {"maxLength": low + 2, "minLength": low},
                {"pattern": chooser.choice(TEXT_PATTERNS)},
                {"format": chooser.choice([*PATTERNS])},
            ]
        ),
    }


def _number(chooser: random.Random, depth: int) -> Any:
    low = round(chooser.uniform(-200, 200), chooser.randrange(4))
    high = low + round(chooser.uniform(1, 500), 2)
    kind = chooser.choice(["integer", "number"])
    limits = [{"minimum": low}, {"maximum": low}, {"minimum": low, "exclusiveMaximum": high}, {"exclusiveMinimum": low}]
    return {"type": kind, **chooser.choice([*limits, {}])} if chooser.random() < 0.8 else {"type": "integer", "multipleOf": 6}


def _constant(chooser: random.Random, depth: int) -> Any:
    values = [1, -2.5, "x", 'q"\\\n', None, True, [1, [2]], {"k": {"世": None}}]
    return chooser.choice([{"const": chooser.choice(values)}, {"enum": chooser.sample(values, 3)}])


def _object(chooser: random.Random, depth: int) -> Any:
    names = chooser.sample(NAMES, chooser.randrange(1, 5))
    required = [name for name in names if chooser.random() < 0.5]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: make_schema(chooser, depth - 1) for name in names},
        "required": required,
    }
    if chooser.random() < 0.3:
        schema["additionalProperties"] = chooser.choice([True, False, {"type": "integer"}])
    elif chooser.random() < 0.3:
        schema["minProperties"] = chooser.randrange(len(names) + 1)
    if chooser.random() < 0.2:
        schema["maxProperties"] = max(len(names), 1)
    if chooser.random() < 0.1:
        return {"type": "object", "propertyNames": {"pattern": "^[a-c]{1,3}$"}, "additionalProperties": make_schema(chooser, 0)}
    return schema


def _array(chooser: random.Random, depth: int) -> Any:
    low = chooser.randrange(3)
    schema: dict[str, Any] = {"type": "array", "minItems": low}
    if chooser.random() < 0.7:
        schema["items"] = make_schema(chooser, depth - 1)
    if chooser.random() < 0.4:
        schema["prefixItems"] = [make_schema(chooser, 0) for _ in range(chooser.randrange(1, 3))]
    if chooser.random() < 0.6:
        schema["maxItems"] = low + chooser.randrange(3)
    return schema


def _union(chooser: random.Random, depth: int) -> Any:
    if chooser.random() < 0.7:
        return {"anyOf": [make_schema(chooser, depth - 1) for _ in range(chooser.randrange(1, 4))]}
    kinds = [
        {"type": "object", "properties": {"kind": {"const": kind}, "v": make_schema(chooser, 0)}, "required": ["kind"]}
        for kind in ("a", "b")
    ]
    return {"oneOf": [*kinds, {"type": "string"}]}


def _reference(chooser: random.Random, depth: int) -> Any:
    return {"$ref": chooser.choice(["#/$defs/leaf", "#/$defs/list"])}


def with_definitions(schema: Any) -> Any:
    definitions = {
        "leaf": {"type": "integer", "minimum": 0, "maximum": 9},
        "list": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/list"}]}, "maxItems": 2},
    }
    return {"$defs": definitions, "anyOf": [schema]}


@pytest.mark.parametrize("block", range(BLOCKS))
def test_output_is_valid_for_the_generated_schema(block: int) -> None:
    chooser = random.Random(block)
    ended = written = 0
    for _ in range(SCHEMAS):
        schema = with_definitions(make_schema(chooser, 3))
        grammar = model.compiled(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
        validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
        for _ in range(WRITES):
            text = model.write(grammar, chooser, free_tokens=chooser.choice([5, 30, 100]))
            written += 1
            if text is not None:
                ended += 1
                errors = [error.message for error in validator.iter_errors(json.loads(text))]
                assert not errors, f"{json.dumps(schema)} allowed {text}: {errors[:1]}"
    assert ended >= 0.9 * written, f"{written - ended} of {written} did not end"
