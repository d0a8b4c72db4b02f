"""Tests of invalid requests: each gets a 4xx response that names the field, repeats no input and reaches no worker."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import orjson
import pytest
from pydantic import ValidationError

from rootstock_llm.services.gateway.api.anthropic.types import MessagesRequest
from rootstock_llm.services.gateway.api.openai.types import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
from rootstock_llm.services.gateway.api.responses.types import ResponsesRequest
from rootstock_llm.services.gateway.api.sglang.types import (
    NativeGenerateRequest,
    NativeSampling,
    OpenSessionRequest,
    ScoreRequest,
)
from rootstock_llm.services.gateway.api.texts.types import ParseCallRequest
from rootstock_llm.services.gateway.generation.body_fields import Body
from rootstock_llm.services.shared import limits
from tests.services.gateway.fakes import CONTEXT_LEN, EMBEDDING_SIZE, MODEL, VOCAB_SIZE
from tests.services.gateway.system import System, chat_body

SECRET = "s3cr3t-input"
USER = [{"role": "user", "content": SECRET}]

CHAT: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": None}, "messages"),
    "messages empty": ({"messages": []}, "messages"),
    "messages a string": ({"messages": SECRET}, "messages"),
    "message a string": ({"messages": [SECRET]}, "messages[0]"),
    "message without role": ({"messages": [{"content": SECRET}]}, "messages[0].role"),
    "unknown role": ({"messages": [*USER, {"role": SECRET, "content": "x"}]}, "messages[1].role"),
    "content missing": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "content a number": ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    "content part a string": ({"messages": [{"role": "user", "content": [SECRET]}]}, "messages[0].content[0]"),
    "image part": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    "text part without text": ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    "prompt over the context": ({"messages": [{"role": "user", "content": "x" * CONTEXT_LEN}]}, "messages"),
    "max_completion_tokens 0": ({"max_completion_tokens": 0}, "max_completion_tokens"),
    "tools of strings": ({"tools": [SECRET]}, "tools.0"),
    "tool_choice required": ({"tool_choice": "required"}, "tool_choice"),
    "tool_choice named": ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
    "tool_choice a number": ({"tool_choice": 7}, "tool_choice"),
    "thinking without type": ({"thinking": {}}, "thinking.type"),
    "thinking of an unknown type": ({"thinking": {"type": SECRET}}, "thinking.type"),
    "thinking a number": ({"thinking": 7}, "thinking"),
    "think a text": ({"think": SECRET}, "think"),
    "tool_choice unknown": ({"tool_choice": SECRET}, "tool_choice"),
    "tool_choice of no tools": ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.allowed_tools"),
    "a tool of no type": ({"tools": [{"type": "Web search"}]}, "tools[0].type"),
    "a tool without a function": ({"tools": [{"type": "function"}]}, "tools[0].function"),
    "tool name ends in a blank": (
        {"tools": [{"type": "function", "function": {"name": SECRET + " "}}]},
        "tools[0].function.name",
    ),
    "two tools of one name": ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools[1].function.name"),
    "parameters": ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
    "strict": ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
    "both prompt endings": ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    "template kwargs a list": ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    "logprobs a number": ({"logprobs": 1}, "logprobs"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs"),
    "top_logprobs negative": ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
}
CONSTRAINTS: dict[str, tuple[dict[str, Any], str]] = {
    "response_format a string": ({"response_format": "json"}, "response_format.type"),
    "response_format unknown": ({"response_format": {"type": SECRET}}, "response_format.type"),
    "json_schema missing": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    "json_schema without name": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
    ),
    "json_schema without schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
    ),
    "json_schema a list": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": [SECRET]}}},
        "response_format.json_schema.schema",
    ),
    "guided_json not JSON": ({"guided_json": SECRET}, "guided_json"),
    "guided_regex empty": ({"guided_regex": ""}, "guided_regex"),
    "guided_grammar a number": ({"guided_grammar": 1}, "guided_grammar"),
    "guided_choice empty": ({"guided_choice": []}, "guided_choice"),
    "guided_choice with an empty text": ({"guided_choice": ["a", ""]}, "guided_choice"),
    "structured_outputs a list": ({"structured_outputs": []}, "structured_outputs"),
    "too many structured choices": (
        {"structured_outputs": {"choice": ["a"] * (limits.MAX_GUIDED_CHOICES + 1)}},
        "structured_outputs.choice",
    ),
    "structured choice of numbers": ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
    "structured json_object a string": ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
    "structured whitespace": (
        {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
    ),
    "two in structured_outputs": ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
    "two constraints": ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
}
BOTH: dict[str, tuple[dict[str, Any], str]] = {
    "model a number": ({"model": 7}, "model"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens beyond 64 bits": ({"max_tokens": 1e30}, "max_tokens"),
    "min_tokens over max_tokens": ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    "stop a number": ({"stop": 5}, "stop"),
    "stop with a number": ({"stop": ["a", 5]}, "stop"),
    "stop empty string": ({"stop": ""}, "stop"),
    "stop_token_ids outside": ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    "logit_bias key not an id": ({"logit_bias": {SECRET: 1}}, "logit_bias"),
    "logit_bias key outside": ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    "logit_bias value too large": ({"logit_bias": {"1": 101}}, "logit_bias"),
    "stream a string": ({"stream": "yes"}, "stream"),
    "stream_options without stream": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "include_usage a string": ({"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
    "cache_salt empty": ({"cache_salt": ""}, "cache_salt"),
    "allowed_token_ids outside": ({"allowed_token_ids": [1, VOCAB_SIZE]}, "allowed_token_ids"),
    "banned_token_ids outside": ({"banned_token_ids": [-1]}, "banned_token_ids"),
    "logprob_token_ids alone": ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    "logprob_token_ids outside": ({"logprob_token_ids": [VOCAB_SIZE]}, "logprob_token_ids"),
    "dry breaker empty": ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
    **CONSTRAINTS,
}
COMPLETION: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({"prompt": None}, "prompt"),
    "prompt empty list": ({"prompt": []}, "prompt"),
    "prompt empty": ({"prompt": ""}, "prompt"),
    "prompt a number": ({"prompt": 5}, "prompt"),
    "prompt mixed": ({"prompt": [SECRET, 5]}, "prompt"),
    "prompt of empty ids": ({"prompt": [[]]}, "prompt"),
    "prompt of bools": ({"prompt": [True]}, "prompt"),
    "prompt id negative": ({"prompt": [-1]}, "prompt"),
    "prompt id outside": ({"prompt": [[1], [VOCAB_SIZE]]}, "prompt[1]"),
    "prompt id is a float": ({"prompt": [1, 2.0]}, "prompt"),
    "prompt id beyond 64 bits": ({"prompt": [1 << 63]}, "prompt"),
    "prompt ids over the context": ({"prompt": [1] * CONTEXT_LEN}, "prompt"),
    "prompts times n": ({"prompt": ["x"] * limits.MAX_BATCH_PROMPTS, "n": 2}, "n"),
    "logprobs true": ({"logprobs": True}, "logprobs"),
    "too many logprobs": ({"logprobs": limits.MAX_TOP_LOGPROBS + 1}, "logprobs"),
    "logprobs negative": ({"logprobs": -1}, "logprobs"),
    "echo a string": ({"echo": "yes"}, "echo"),
}
EMBEDDING: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"input": None}, "input"),
    "input empty": ({"input": ""}, "input"),
    "input over the context": ({"input": [1] * (CONTEXT_LEN + 1)}, "input"),
    "encoding_format": ({"encoding_format": "hex"}, "encoding_format"),
    "dimensions 0": ({"dimensions": 0}, "dimensions"),
    "dimensions beyond the model's": ({"dimensions": EMBEDDING_SIZE + 1}, "dimensions"),
    "normalize a string": ({"normalize": "yes"}, "normalize"),
}


# The chat cases check the fields that chats and completions share (a test below checks that the definition is shared). The
# completion cases check the fields that only completions have. One more completion case (`stop_token_ids outside`) shows that
# completions also call the check of token ids and constraints.
# tests/contracts/test_sampling_parameters.py checks lengths and types of lists, test_limits_walked.py checks values just above a
# limit, and test_known_fields.py checks unsupported fields.
COMPLETION_FIELDS = {"max_tokens"}
SHARED_BY_COMPLETIONS = {
    name: case for name, case in BOTH.items() if case[1] in COMPLETION_FIELDS or name == "stop_token_ids outside"
}
CASES = [
    *((f"embedding: {name}", "/v1/embeddings", *case) for name, case in EMBEDDING.items()),
    *((f"chat: {name}", "/v1/chat/completions", *case) for name, case in (CHAT | BOTH).items()),
    *((f"completion: {name}", "/v1/completions", *case) for name, case in (COMPLETION | SHARED_BY_COMPLETIONS).items()),
]
# Values that pydantic refuses by the declared type and range. /openapi.json has the declarations, and
# tests/e2e/test_fuzz.py draws values from them.
DECLARED = {
    *(f"embedding: {name}" for name in ("no input", "encoding_format", "dimensions 0", "normalize a string")),
    *(f"chat: {name}" for name in ("no messages", "max_completion_tokens 0", "tools of strings", "template kwargs a list")),
    *(f"chat: {name}" for name in ("logprobs a number", "top_logprobs negative", "model a number", "max_tokens 0")),
    *(f"chat: {name}" for name in ("max_tokens beyond 64 bits", "stream a string", "include_usage a string", "cache_salt empty")),
    *(f"chat: {name}" for name in ("guided_grammar a number", "guided_choice empty")),
    *(f"completion: {name}" for name in ("no prompt", "logprobs true", "too many logprobs", "logprobs negative")),
    *(f"completion: {name}" for name in ("echo a string", "max_tokens beyond 64 bits")),
}
REFUSED_BY_RULES = [case for case in CASES if case[0] not in DECLARED]
REFUSED_BY_DECLARATIONS = [case for case in CASES if case[0] in DECLARED]


MINIMAL_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": SECRET},
    "/v1/embeddings": {"input": SECRET},
}


def expect_refusal(shared: System, path: str, change: dict[str, Any], param: str) -> None:
    before = len(shared.worker.submits)
    own = MINIMAL_BODIES[path]
    body = {key: value for key, value in {"model": MODEL, **own, **change}.items() if value is not None}
    answer = shared.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param and error["type"] == "invalid_request_error" and error["message"] and error["code"]
    assert SECRET not in answer.text
    assert len(shared.worker.submits) == before


@pytest.mark.parametrize(
    ("path", "change", "param"), [case[1:] for case in REFUSED_BY_RULES], ids=[case[0] for case in REFUSED_BY_RULES]
)
def test_error_names_the_bad_field(shared: System, path: str, change: dict[str, Any], param: str) -> None:
    expect_refusal(shared, path, change, param)


@pytest.mark.by_day(one_in=4, seed=8)
@pytest.mark.parametrize(
    ("path", "change", "param"), [case[1:] for case in REFUSED_BY_DECLARATIONS], ids=[case[0] for case in REFUSED_BY_DECLARATIONS]
)
def test_value_outside_the_declared_type_or_range_of_a_field_is_refused(
    shared: System, path: str, change: dict[str, Any], param: str
) -> None:
    expect_refusal(shared, path, change, param)


def test_chats_and_completions_share_field_definitions() -> None:
    of_chat, of_completions = ChatCompletionRequest.model_fields, CompletionRequest.model_fields
    shared = of_chat.keys() & of_completions.keys()
    assert {name for name in shared if repr(of_chat[name]) != repr(of_completions[name])} <= COMPLETION_FIELDS | {"logprobs"}
    assert {param.partition(".")[0] for _, param in BOTH.values()} <= shared


BODIES = {
    "not an object": b"[1]",
    "NaN": b'{"temperature": NaN}',
    "number out of range": b'{"temperature": 1e999}',
    "not UTF-8": b'{"model": "\xff\xfe"}',
    "nested 5000 deep": b'{"model":' + b"[" * 5000 + b"]" * 5000 + b"}",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_bad_json_is_refused(shared: System, body: bytes) -> None:
    answer = shared.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_every_route_refuses_a_body_that_is_not_an_object(shared: System, path: str) -> None:
    answer = shared.post(path, BODIES["not an object"])
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"


def nested(levels: int) -> dict[str, Any]:
    """Returns `levels` objects, each inside the previous one."""
    return {"a": nested(levels - 1)} if levels > 1 else {}


def levels_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(levels_of, inner), default=0)


def test_body_with_too_many_nested_levels_is_refused(shared: System) -> None:
    """The body's own object counts as one level. Brackets in a string add no level, and sibling objects add none."""
    most = limits.MAX_JSON_DEPTH
    assert shared.chat(metadata=nested(most - 1)).status_code == 200
    assert shared.chat(metadata={"a": [{}] * 2 * most, "b": "[{" * most}).status_code == 200
    deep = b"[" * 600 + b"]" * 600
    far = b'{"model":"%s","messages":[{"role":"user","content":"x","d":%s}]}' % (MODEL.encode(), deep)
    for answer in (shared.chat(metadata=nested(most)), shared.post("/v1/chat/completions", far)):
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"


def tool_use_body(value: Any) -> dict[str, Any]:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": value}
    return {"max_tokens": 9, "messages": [*USER, {"role": "assistant", "content": [call]}, *USER]}


# A route, and a function that puts a client's nested value into a body.
NESTED_VALUES: list[tuple[str, Callable[[Any], dict[str, Any]]]] = [
    ("/v1/messages", tool_use_body),
    ("/v1/messages/count_tokens", tool_use_body),
    ("/v1/messages", lambda schema: {"max_tokens": 9, "messages": USER, "tools": [{"name": "f", "input_schema": schema}]}),
    (
        "/v1/chat/completions",
        lambda schema: {
            "messages": USER,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
            "tool_choice": "required",
        },
    ),
    (
        "/v1/chat/completions",
        lambda schema: {
            "messages": USER,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        },
    ),
    ("/v1/responses", lambda schema: {"input": SECRET, "tools": [{"type": "function", "name": "f", "parameters": schema}]}),
    (
        "/v1/responses",
        lambda schema: {"input": SECRET, "tools": [{"type": "function", "name": "f", "parameters": schema}], "stream": True},
    ),
]


def test_value_nested_to_the_depth_limit_causes_no_internal_error() -> None:
    """The gateway must also serialize the messages that it makes from such a value, which have a few more levels."""
    with System(formats=("hermes", "think")) as system:
        for path, body_of in NESTED_VALUES:
            around = levels_of(body_of({})) - 1
            for levels in (limits.MAX_JSON_DEPTH, limits.MAX_JSON_DEPTH + 1, 254):
                answer = system.post(path, {"model": MODEL, **body_of(nested(levels - around))})
                if levels == limits.MAX_JSON_DEPTH:
                    assert answer.status_code == 200 and "Internal" not in answer.text, (path, answer.text)
                else:
                    assert answer.status_code == 400 and "levels" in answer.text, (path, levels, answer.text)
        for levels, status in ((limits.MAX_JSON_DEPTH, 200), (limits.MAX_JSON_DEPTH + 1, 400), (254, 400)):
            answer = system.chat(guided_json=orjson.dumps(nested(levels)).decode())
            assert answer.status_code == status, "JSON in a string"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/v1/chat/completions%0A", 404),
        ("POST", "/v1/chat/completions%0A", 404),
        ("GET", "/v1/models%0A", 404),
    ],
)
def test_unknown_routes_and_methods_are_refused(shared: System, method: str, path: str, status: int) -> None:
    answer = httpx.request(method, shared.url(path))
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_unknown_fields_are_ignored(shared: System) -> None:
    assert shared.chat(service_tier="auto", metadata={"a": 1}, user="u", parallel_tool_calls=True).status_code == 200


def test_neutral_values_of_unsupported_fields_are_accepted(shared: System) -> None:
    nulls = dict.fromkeys(("top_logprobs", "n", "stop", "temperature", "stream", "max_tokens"))
    answer = shared.chat(logprobs=False, response_format={"type": "text"}, tool_choice="auto", **nulls)
    assert answer.status_code == 200
    assert shared.complete(logprobs=False, best_of=1, suffix="").status_code == 200


NO_VALUE = b""  # a value that no field of JSON allows
NUM_WRONG = 4096  # invalid elements of one field
MOST_ERRORS = 16  # more than the required fields of a body and the types of a field together
VALIDATED: tuple[type[Body], ...] = (
    *(ChatCompletionRequest, CompletionRequest, EmbeddingRequest, MessagesRequest, ResponsesRequest, ParseCallRequest),
    *(NativeGenerateRequest, NativeSampling, OpenSessionRequest, ScoreRequest),
)


@pytest.mark.parametrize("body", VALIDATED)
def test_validation_makes_few_errors_when_a_field_has_many_invalid_elements(body: type[Body]) -> None:
    many: dict[str, Any] = {str(index): NO_VALUE for index in range(NUM_WRONG)}
    for name in body.model_fields:
        for value in ([NO_VALUE] * NUM_WRONG, many):
            assert _num_errors(body, {name: value}) < MOST_ERRORS, (name, type(value))
    assert _num_errors(body, many) < MOST_ERRORS


def _num_errors(body: type[Body], given: dict[str, Any]) -> int:
    try:
        body.model_validate(given)
    except ValidationError as error:
        return error.error_count()
    return 0


def test_error_names_the_first_unknown_field_when_there_are_several(shared: System) -> None:
    for given, param in (({"b": 1, "a": 1}, "b"), ({"session_params": {"b": 1, "a": 1}}, "session_params.b")):
        error = shared.post("/generate", {"text": "x", **given}).json()["error"]
        assert (error["param"], error["code"]) == (param, "unsupported_parameter")


def test_error_before_a_stream_is_a_plain_response(shared: System) -> None:
    answer = shared.chat(stream=True, temperature=-1)
    assert answer.status_code == 400 and answer.headers["content-type"] == "application/json"


@pytest.fixture(scope="module")
def limited() -> Iterator[System]:
    with System(max_body_bytes=1000) as system:
        yield system


class TestBodySize:
    def test_body_gets_413_when_its_declared_size_exceeds_the_limit(self, limited: System) -> None:
        answer = limited.post("/v1/completions", {"model": MODEL, "prompt": "x" * 2000})
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "request_too_large"

    def test_chunked_body_gets_413_when_its_size_exceeds_the_limit(self, limited: System) -> None:
        with socket.create_connection(("127.0.0.1", limited.port), timeout=10) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(3):
                raw.sendall(b"1f4\r\n" + b"x" * 500 + b"\r\n")
            assert raw.recv(65536).startswith(b"HTTP/1.1 413 ")

    def test_body_is_accepted_when_its_size_is_below_the_limit(self, limited: System) -> None:
        assert limited.complete(prompt="x" * 400).status_code == 200

    def test_slow_body_gets_408(self) -> None:
        with System(body_timeout_s=0.1) as system, socket.create_connection(("127.0.0.1", system.port), timeout=10) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            assert raw.recv(65536).startswith(b"HTTP/1.1 408 ")


def test_error_names_the_field_when_the_tokenizer_refuses_a_request(system: System) -> None:
    system.do(lambda: system.tokenizer.failures.append((grpc.StatusCode.INVALID_ARGUMENT, "roles must alternate")))
    answer = system.post("/v1/chat/completions", {"model": MODEL, **chat_body()})
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "roles must alternate",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "invalid_value",
    }
