"""Tests of invalid values on SGLang's routes: each gets a 4xx response that names the field, repeats no prompt and reaches no
worker.
"""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from rootstock_llm.services.shared import limits
from tests.services.gateway.fakes import CONTEXT_LEN, EMBEDDING_SIZE, VOCAB_SIZE
from tests.services.gateway.system import System

SECRET = "s3cr3t-input"

GENERATE: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({"text": None}, "text"),
    "text and ids": ({"input_ids": [1]}, "text"),
    "text a number": ({"text": 5}, "text"),
    "text mixed list": ({"text": [SECRET, 5]}, "text"),
    "text without tokens": ({"text": ""}, "text"),
    "text too long": ({"text": "x" * CONTEXT_LEN}, "text"),
    "too many texts": ({"text": ["x"] * (limits.MAX_BATCH_PROMPTS + 1)}, "text"),
    "ids empty": ({"text": None, "input_ids": []}, "input_ids"),
    "ids mixed": ({"text": None, "input_ids": [[1], 2]}, "input_ids"),
    "second ids outside": ({"text": None, "input_ids": [[1], [-1]]}, "input_ids[1]"),
    "unknown field": ({"surprise": 1}, "surprise"),
    "stream a number": ({"stream": 1}, "stream"),
    "rid a number": ({"rid": 5}, "rid"),
    "rid empty": ({"rid": ""}, "rid"),
    "rid long": ({"rid": "x" * 256}, "rid"),
    "rids for one": ({"rid": ["a", "b"]}, "rid"),
    "rids twice": ({"text": ["a", "b"], "rid": ["a", "a"]}, "rid"),
    "extra key empty": ({"extra_key": ""}, "extra_key"),
    "parameters a string": ({"sampling_params": "x"}, "sampling_params"),
    "parameters for two": ({"sampling_params": [{}, {}]}, "sampling_params"),
    "parameters, one a string": ({"text": ["a", "b"], "sampling_params": [{}, "x"]}, "sampling_params[1]"),
    "parameters, one bad": ({"text": ["a", "b"], "sampling_params": [{}, {"top_p": 2}]}, "sampling_params[1].top_p"),
    "n differs": ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params.n"),
    "n times prompts": ({"text": ["a"] * 1000, "sampling_params": {"n": 2}}, "sampling_params.n"),
    "return_logprob a string": ({"return_logprob": "yes"}, "return_logprob"),
    "return_logprob for two": ({"return_logprob": [True, False]}, "return_logprob"),
    "start past the prompt": ({"return_logprob": True, "logprob_start_len": len(SECRET)}, "logprob_start_len"),
    "start beyond 31 bits": ({"return_logprob": True, "logprob_start_len": 1 << 31}, "logprob_start_len"),
    "turn with max_new_tokens beyond 32 bits": (
        {"session_params": {"id": "s"}, "sampling_params": {"max_new_tokens": 1 << 32}},
        "sampling_params.max_new_tokens",
    ),
    "start below": ({"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
    "start not whole": ({"return_logprob": True, "logprob_start_len": 0.5}, "logprob_start_len"),
    "chosen outside": ({"return_logprob": True, "token_ids_logprob": [VOCAB_SIZE]}, "token_ids_logprob"),
    "too many chosen": ({"return_logprob": True, "token_ids_logprob": [1] * 257}, "token_ids_logprob"),
    "session a string": ({"session_params": "x"}, "session_params"),
    "session id a number": ({"session_params": {"id": 1}}, "session_params.id"),
    "session offset below": ({"session_params": {"id": "s", "offset": -2}}, "session_params.offset"),
    "session of many": ({"text": ["a", "b"], "session_params": {"id": "s"}}, "session_params"),
    "session with answers": ({"sampling_params": {"n": 2}, "session_params": {"id": "s"}}, "session_params"),
    "session with its prompt's logprobs": (
        {"session_params": {"id": "s"}, "return_logprob": True, "logprob_start_len": 0},
        "logprob_start_len",
    ),
}

SAMPLING: dict[str, tuple[Any, str]] = {
    "min_new_tokens above": (129, "min_new_tokens"),
    "stop_token_ids outside": ([VOCAB_SIZE], "stop_token_ids"),
    "json_schema not JSON": ("{", "json_schema"),
    "regex a number": (5, "regex"),
    "spaces_between_special_tokens false": (False, "spaces_between_special_tokens"),
}


def refused(system: System, path: str, body: dict[str, Any]) -> dict[str, Any]:
    before = len(system.worker.submits)
    answer = system.post(path, {key: value for key, value in body.items() if value is not None})
    assert answer.status_code == 400, answer.text
    assert SECRET not in answer.text and len(system.worker.submits) == before
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.by_day(one_in=4, seed=47)
@pytest.mark.parametrize(("change", "param"), GENERATE.values(), ids=GENERATE.keys())
def test_error_names_the_bad_field_of_a_generate_request(shared: System, change: dict[str, Any], param: str) -> None:
    assert refused(shared, "/generate", {"text": SECRET, **change})["param"] == param


@pytest.mark.parametrize(("value", "field"), SAMPLING.values(), ids=SAMPLING.keys())
def test_error_names_the_bad_sampling_param_of_a_generate_request(shared: System, value: Any, field: str) -> None:
    error = refused(shared, "/generate", {"text": SECRET, "sampling_params": {field: value}})
    assert error["param"] == f"sampling_params.{field}"


def test_request_with_two_grammars_is_refused_with_the_names_of_both(shared: System) -> None:
    error = refused(shared, "/generate", {"text": SECRET, "sampling_params": {"regex": "a", "ebnf": "root ::= [a]"}})
    assert error["param"] == "sampling_params.ebnf" and "'regex' and 'ebnf'" in error["message"]


ENCODE: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"text": None}, "text"),
    "too long": ({"text": "x" * (CONTEXT_LEN + 1)}, "text"),
    "dimensions zero": ({"dimensions": 0}, "dimensions"),
    "dimensions many": ({"dimensions": EMBEDDING_SIZE + 1}, "dimensions"),
    "sampling": ({"sampling_params": {}}, "sampling_params"),
    "image": ({"image_data": "x"}, "image_data"),
}


@pytest.mark.by_day(one_in=2, seed=28)
@pytest.mark.parametrize(("change", "param"), ENCODE.values(), ids=ENCODE.keys())
def test_error_names_the_bad_field_of_an_encode_request(shared: System, change: dict[str, Any], param: str) -> None:
    assert refused(shared, "/encode", {"text": SECRET, **change})["param"] == param


@pytest.mark.by_day(one_in=2, seed=1)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", b"[1]"),
        ("/encode", b'{"text": NaN}'),
        ("/abort_request", b""),
        ("/open_session", b"\xff"),
        ("/close_session", b"[1]"),
    ],
    ids=["a list", "NaN", "empty", "not UTF-8", "list for close_session"],
)
def test_bad_json_is_refused(shared: System, path: str, body: bytes) -> None:
    answer = shared.post(path, body)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"


def test_request_for_an_unknown_model_gets_404(shared: System) -> None:
    answer = shared.post("/generate", {"text": "Hi", "model": "nobody"})
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "model"


def test_large_body_of_an_abort_request_gets_413(shared: System) -> None:
    assert shared.post("/abort_request", {"rid": "x" * 100_000}).status_code == 413


def test_error_names_the_field_text_when_the_tokenizer_refuses_the_prompt(system: System) -> None:
    system.do(lambda: system.tokenizer.failures.append((grpc.StatusCode.INVALID_ARGUMENT, "no")))
    answer = system.post("/generate", {"text": "Hi"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "text"
