"""Tests of constraints on the output: every form of a request, and the grammar that the worker receives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pydantic
import pytest
import xgrammar

from rootstock_llm.protos import common_pb2 as pb
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.system import System, chat_body

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}, "required": ["b"]}
TEXT = orjson.dumps(SCHEMA).decode()
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
TAG_OF_STRUCTURES = {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f>"]}


def json_schema_format(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, **fields}}}


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "json_object": ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    "json_object with a schema": ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json_schema": TEXT}),
    "json_schema": (json_schema_format(), {"json_schema": TEXT}),
    "strict json_schema": (json_schema_format(strict=True, description="x"), {"json_schema": TEXT}),
    "structural tag": ({"response_format": TAG}, {"structural_tag": orjson.dumps(TAG).decode()}),
    "structural tag with structures": (
        {"response_format": TAG_OF_STRUCTURES},
        {"structural_tag": orjson.dumps(TAG_OF_STRUCTURES).decode()},
    ),
    "guided_json": ({"guided_json": SCHEMA}, {"json_schema": TEXT}),
    "guided_json as text": ({"guided_json": orjson.dumps(SCHEMA, option=orjson.OPT_INDENT_2).decode()}, {"json_schema": TEXT}),
    "guided_regex": ({"guided_regex": "a+"}, {"regex": "a+"}),
    "guided_grammar": ({"guided_grammar": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
    "guided_choice": ({"guided_choice": ["yes", "no", "yes"]}, {"ebnf": 'root ::= "yes" | "no"'}),
    "structured json": ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": TEXT}),
    "structured regex": ({"structured_outputs": {"regex": "a+", "json": None}}, {"regex": "a+"}),
    "structured choice": ({"structured_outputs": {"choice": ["a"]}}, {"ebnf": 'root ::= "a"'}),
    "structured grammar": ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"ebnf": 'root ::= "a"'}),
    "structured json_object": ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    "structured tag": ({"structured_outputs": {"structural_tag": TAG}}, {"structural_tag": orjson.dumps(TAG).decode()}),
    "SGLang's json_schema": ({"json_schema": TEXT}, {"json_schema": TEXT}),
    "SGLang's regex": ({"regex": "a+"}, {"regex": "a+"}),
    "SGLang's ebnf": ({"ebnf": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
    "beside response_format text": ({"regex": "a", "response_format": {"type": "text"}}, {"regex": "a"}),
}


@pytest.mark.parametrize(("body", "grammar"), FORMS.values(), ids=FORMS.keys())
def test_constraint_reaches_the_worker(shared: System, body: dict[str, Any], grammar: dict[str, Any]) -> None:
    answer = shared.post("/v1/chat/completions", {"model": MODEL, **chat_body(), **body})
    assert answer.status_code == 200, answer.text
    assert shared.worker.submits[-1].sampling.grammar == pb.Grammar(**grammar)


@pytest.mark.parametrize("form", ["json_schema", "structured tag"])
def test_completions_accept_constraints(shared: System, form: str) -> None:
    """Chats and completions declare the same fields; test_bad_input.py checks this."""
    body, grammar = FORMS[form]
    answer = shared.post("/v1/completions", {"model": MODEL, "prompt": "Hi", **body})
    assert answer.status_code == 200, answer.text
    assert shared.worker.submits[-1].sampling.grammar == pb.Grammar(**grammar)


NEUTRAL = [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"structured_outputs": {"json_object": False}}]


@pytest.mark.parametrize("body", NEUTRAL, ids=["nothing", "text", "empty", "json_object false"])
def test_neutral_value_sets_no_constraint(shared: System, body: dict[str, Any]) -> None:
    assert shared.chat(**body).status_code == 200
    assert not shared.worker.submits[-1].sampling.HasField("grammar")


def test_error_names_both_constraints_when_a_request_has_two(shared: System) -> None:
    error = shared.chat(guided_json={}, response_format={"type": "json_object"}).json()["error"]
    assert "'response_format'" in error["message"] and "'guided_json'" in error["message"]


TEXTS = ['a"b', "back\\slash", "line\nbreak\ttab", "é 漢 🙂", "\x01a\x7fb\x1bcafe", '::= | "', "[a-z]+"]


def test_guided_choice_allows_only_the_listed_texts(shared: System) -> None:
    """The grammar accepts only the listed texts, in the compiler that workers use."""
    for text in TEXTS:
        assert shared.chat(guided_choice=[text, "other"]).status_code == 200
        source = shared.worker.submits[-1].sampling.grammar.ebnf
        vocabulary = [bytes([byte]) for byte in range(256)]
        info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[0])
        compiled = xgrammar.GrammarCompiler(info, cache_enabled=False).compile_grammar(source)
        for candidate, fits in ((text, True), ("other", True), (text + "x", False), ("x" + text, False)):
            matcher = xgrammar.GrammarMatcher(compiled)
            assert (matcher.accept_string(candidate) and matcher.is_completed()) is fits, (text, candidate)


REFUSALS = [
    ({"response_format": {"type": "json_object"}}, "its compilation took too long", "response_format"),
    ({"guided_json": {}}, "json_schema: $.not is not supported", "guided_json"),
    ({"structured_outputs": {"regex": "("}}, "pattern, position 1: missing )", "structured_outputs.regex"),
    ({"ebnf": "root ::= ("}, "ebnf: EBNF lexer error at line 1", "ebnf"),
]


@pytest.mark.parametrize(
    ("body", "reason", "param", "stream"),
    [(*case, stream) for case, stream in zip(REFUSALS, (True, False) * 2, strict=True)],
    ids=[param for *_, param in REFUSALS],
)
def test_request_with_a_refused_grammar_gets_400_with_the_reason_of_the_worker(
    shared: System, body: dict[str, Any], reason: str, param: str, stream: bool
) -> None:
    shared.do(lambda: shared.worker.refuse.append((pb.ERROR_CODE_INVALID_ARGUMENT, f"grammar: {reason}", "grammar")))
    answer = shared.chat(stream=stream, **body)
    assert answer.status_code == 400 and answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert (error["message"], error["param"]) == (reason, param)


class City(pydantic.BaseModel):
    name: str
    people: int


MESSAGES: Any = [{"role": "user", "content": "Hi"}]
BERN = City(name="Bern", people=134000)


@pytest.fixture
def bern(shared: System) -> Iterator[System]:
    shared.worker.answer = lambda submit: BERN.model_dump_json()
    yield shared
    shared.worker.answer = lambda submit: "Hello, world!"


class TestOpenAIClient:
    def test_client_parses_a_completion_into_a_pydantic_model(self, bern: System) -> None:
        answer = bern.openai().chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=City, n=2)
        assert [choice.message.parsed for choice in answer.choices] == [BERN, BERN]
        schema = orjson.loads(bern.worker.submits[-1].sampling.grammar.json_schema)
        assert set(schema["properties"]) == {"name", "people"}

    def test_client_parses_a_stream_with_logprobs_into_a_pydantic_model(self, bern: System) -> None:
        with bern.openai().chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=City, logprobs=True) as stream:
            kinds = {event.type for event in stream}
            choice = stream.get_final_completion().choices[0]
        assert choice.message.parsed == BERN
        assert {"chunk", "content.delta", "logprobs.content.delta", "content.done", "logprobs.content.done"} <= kinds
        assert "".join(entry.token for entry in choice.logprobs.content[:-1]) == BERN.model_dump_json()
