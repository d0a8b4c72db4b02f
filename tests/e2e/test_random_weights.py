"""A model with random weights under random schemas: each output at temperature 1 is JSON that satisfies its schema.

Each schema limits the length of its output, so each output must also end by itself.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.e2e.system import DEMO, System
from tests.night import NIGHTLY

NUM_SCHEMAS = 200 if NIGHTLY else 60
IN_FLIGHT = 32
MAX_TOKENS = 3500  # far more than any likely output under these schemas has
DEPTH = 3  # largest nesting depth of a schema
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
NAMES = ["a", "b", "name", "naïve 世界", 'quo"te', "a\\b", "line\nend", "x_1", "$ref", "🙂"]
PATTERNS = ["^[a-z]{1,6}$", r"^\d{2,4}-[A-F]{1,3}$", '^["\\\\/\\n]{1,3}$', "^.{3,5}$", r"^(?:on|off)\s?$", "^é{2,4}[^a-z]?$"]
CONSTANTS: list[Any] = [1, -2.5, "x", 'q"\\\n', None, True, [1, [2]], {"k": {"世": None}}, "", {}]

Maker = Callable[[random.Random, int], dict[str, Any]]


def make_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    makers: list[Maker] = [_string, _number, _constant, _plain]
    if depth > 0:
        makers += [_object, _object, _object, _array, _union, _tagged]
    return rng.choice(makers)(rng, depth)


def _plain(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice([{"type": "boolean"}, {"type": "null"}, {"type": ["null", "boolean"]}, {"$ref": "#/$defs/leaf"}])


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(4)
    limits: list[dict[str, Any]] = [{"maxLength": low + 6, "minLength": low}, {"pattern": rng.choice(PATTERNS)}]
    limits.append({"format": rng.choice(["date", "time", "ipv4", "uuid"])})
    return {"type": "string", **rng.choice(limits)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(-200, 200)
    kind = rng.choice(["integer", "integer", "number"])
    return {"type": kind, "minimum": low, rng.choice(["maximum", "exclusiveMaximum"]): low + rng.randrange(1, 500)}


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice([{"const": rng.choice(CONSTANTS)}, {"enum": rng.sample(CONSTANTS, 3)}])


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randrange(1, 5))
    return {
        "type": "object",
        "properties": {name: make_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        **rng.choice([{}, {"additionalProperties": False}]),
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(3)
    prefix = {"prefixItems": [make_schema(rng, 0)]} if rng.random() < 0.3 else {}
    return {
        "type": "array",
        "items": make_schema(rng, depth - 1),
        "minItems": low,
        "maxItems": low + rng.randrange(1, 3),
        **prefix,
    }


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [make_schema(rng, depth - 1) for _ in range(rng.randrange(2, 4))]}


def _tagged(rng: random.Random, depth: int) -> dict[str, Any]:
    """Returns a union of two object schemas with different constants in one property."""
    bodies = [{"kind": {"const": kind}, "value": make_schema(rng, depth - 1)} for kind in ("a", "b")]
    return {"oneOf": [{"type": "object", "properties": body, "required": ["kind", "value"]} for body in bodies]}


def schemas() -> list[dict[str, Any]]:
    rng = random.Random(11)
    leaf = {"type": "integer", "minimum": 0, "maximum": 9}
    return [{"$defs": {"leaf": leaf}, "anyOf": [make_schema(rng, DEPTH)]} for _ in range(NUM_SCHEMAS)]


def write_random_model(folder: Path) -> Path:
    """Writes a model with the demo model's shape and tokenizer and with untrained weights."""
    torch.manual_seed(5)
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM
    model.from_config(AutoConfig.from_pretrained(DEMO)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("random")
    with System(folder / "logs", model=str(write_random_model(folder / "senseless"))) as running:
        yield running


class Interviewer:
    """Sends one request per schema, every second one streamed. Limits the number of concurrent requests."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client
        self._limit = asyncio.Semaphore(IN_FLIGHT)

    async def answer(self, index: int, schema: dict[str, Any]) -> tuple[str, str | None]:
        """Returns the text and the finish reason of a response."""
        options: dict[str, Any] = {
            "model": "senseless",
            "messages": [{"role": "user", "content": f"Question {index}"}],
            "max_tokens": MAX_TOKENS,
            "temperature": 1,
            "seed": index,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}},
        }
        async with self._limit:
            if index % 2:
                return await self._streamed(options)
            choice = (await self._client.chat.completions.create(**options)).choices[0]
            return choice.message.content or "", choice.finish_reason

    async def _streamed(self, options: dict[str, Any]) -> tuple[str, str | None]:
        text, reason = "", None
        async for chunk in await self._client.chat.completions.create(**options, stream=True):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
        return text, reason


async def answers(system: System) -> list[tuple[str, str | None]]:
    async with openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0, timeout=200) as client:
        interviewer = Interviewer(client)
        return await asyncio.gather(*(interviewer.answer(index, schema) for index, schema in enumerate(schemas())))


def test_outputs_end_and_satisfy_random_schemas(system: System) -> None:
    given = asyncio.run(answers(system))
    assert Counter(reason for _, reason in given) == {"stop": NUM_SCHEMAS}
    for (text, _), schema in zip(given, schemas(), strict=True):
        validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
        errors = [error.message for error in validator.iter_errors(json.loads(text))]
        assert not errors, f"the output {text} breaks the schema {json.dumps(schema)}: {errors[0]}"
    assert len({text for text, _ in given}) > NUM_SCHEMAS / 2, "different schemas must give different outputs"


def test_random_model_writes_no_json_without_a_schema(system: System) -> None:
    """The random model writes no JSON by itself.

    The JSON in test_outputs_end_and_satisfy_random_schemas therefore comes from the grammar.
    """
    body = {"model": "senseless", "prompt": "JSON", "max_tokens": 50, "temperature": 1, "seed": 1, "n": 8}
    status, answer = system.post("/v1/completions", body)
    assert status == 200
    for choice in answer["choices"]:
        with pytest.raises(json.JSONDecodeError):
            json.loads(choice["text"])


NUM_CALLERS = 24


def _tools(index: int) -> list[dict[str, Any]]:
    """Returns two tools with random parameters, each with its own $defs."""
    rng = random.Random(100 + index)
    leaf = {"leaf": {"type": "integer", "minimum": 0, "maximum": 9}}
    parameters = [{"$defs": leaf, **_object(rng, 2), "additionalProperties": False} for _ in range(2)]
    return [{"type": "function", "function": {"name": f"tool_{n}", "parameters": each}} for n, each in enumerate(parameters)]


def test_forced_tool_calls_have_valid_arguments(system: System) -> None:
    """The untrained model gets required, named and non-parallel calls, whole and streamed."""
    found = asyncio.run(_calls(system))
    for index, (calls, reason) in enumerate(found):
        assert reason == "tool_calls" and calls and (index % 3 or len(calls) == 1)
        schemas_of = {tool["function"]["name"]: tool["function"]["parameters"] for tool in _tools(index)}
        for name, arguments in calls:
            assert name == "tool_1" or index % 3 != 1
            errors = list(jsonschema.Draft202012Validator(schemas_of[name]).iter_errors(json.loads(arguments)))
            assert not errors, f"the arguments {arguments} break the schema {schemas_of[name]}: {errors[0].message}"
    assert len({json.dumps(calls) for calls, _ in found}) > NUM_CALLERS / 2


async def _calls(system: System) -> list[tuple[list[tuple[str, str]], str | None]]:
    async with openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0, timeout=200) as client:
        return await asyncio.gather(*(_call(client, index) for index in range(NUM_CALLERS)))


async def _call(client: openai.AsyncOpenAI, index: int) -> tuple[list[tuple[str, str]], str | None]:
    named = {"type": "function", "function": {"name": "tool_1"}}
    options: dict[str, Any] = {
        "model": "senseless",
        "messages": [{"role": "user", "content": f"Question {index}"}],
        "max_tokens": MAX_TOKENS,
        "temperature": 1,
        "seed": index,
        "tools": _tools(index),
        "tool_choice": named if index % 3 == 1 else "required",
        "parallel_tool_calls": index % 3 != 0,
    }
    if index % 2:
        async with client.chat.completions.stream(**options) as stream:
            async for _ in stream:
                pass
            choice: Any = (await stream.get_final_completion()).choices[0]
    else:
        choice = (await client.chat.completions.create(**options)).choices[0]
    calls = choice.message.tool_calls or []
    return [(call.function.name, call.function.arguments) for call in calls], choice.finish_reason
