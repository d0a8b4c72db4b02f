"""Tests that a worker's refusal, which names a protobuf field, reaches the client with the field name of the client's API."""

from __future__ import annotations

from typing import Any

import pytest

from rootstock_llm.protos import common_pb2 as pb
from tests.all_pairs import each_value
from tests.services.gateway.fakes import MODEL, Refusal
from tests.services.gateway.system import System, chat_body

INVALID = pb.ERROR_CODE_INVALID_ARGUMENT
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, **chat_body()},
    COMPLETIONS: {"model": MODEL, "prompt": "Hi"},
    EMBEDDINGS: {"model": MODEL, "input": "Hi"},
    "/generate": {"text": "Hi"},
    "/encode": {"input_ids": [1]},
}
CASES = [
    (CHAT, "top_k", "top_k"),
    (CHAT, "max_new_tokens", "max_tokens"),
    (CHAT, "min_new_tokens", "min_tokens"),
    (CHAT, "logprobs.top", "top_logprobs"),
    (CHAT, "logprobs.token_ids", "logprob_token_ids"),
    (CHAT, "prompt_ids", "messages"),
    (COMPLETIONS, "logprobs.top", "logprobs"),
    (COMPLETIONS, "logprobs.prompt_from", "echo"),
    (COMPLETIONS, "prompt_ids", "prompt"),
    (EMBEDDINGS, "embedding.dimensions", "dimensions"),
    (EMBEDDINGS, "embedding", "model"),
    (EMBEDDINGS, "prompt_ids", "input"),
    ("/generate", "session", "session_params"),
    ("/generate", "logprobs.top", "top_logprobs_num"),
    ("/generate", "logprobs.token_ids", "token_ids_logprob"),
    ("/generate", "logprobs.prompt_from", "logprob_start_len"),
    ("/generate", "top_k", "sampling_params.top_k"),
    ("/generate", "dry_base", "sampling_params.dry_base"),
    ("/generate", "prompt_ids", "text"),
    ("/encode", "embedding.dimensions", "dimensions"),
    ("/encode", "prompt_ids", "input_ids"),
    ("/encode", "cache_salt", "extra_key"),
]


@pytest.mark.by_day(one_in=2, seed=15)
@pytest.mark.parametrize(("path", "name", "param"), CASES, ids=[f"{path} {name}" for path, name, _ in CASES])
def test_error_of_a_worker_names_the_field_that_the_client_sent(shared: System, path: str, name: str, param: str) -> None:
    shared.do(lambda: shared.worker.refuse.append(Refusal(INVALID, f"{name}: is too much", name)))
    answer = shared.post(path, BODIES[path])
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["message"]) == (400, param, f"{param}: is too much")


def test_error_names_the_sampling_params_element_of_the_refused_prompt(shared: System) -> None:
    shared.do(lambda: shared.worker.refuse.extend([Refusal(INVALID, "top_k: is too much", "top_k")] * 2))
    answer = shared.post("/generate", {"text": ["a", "b"], "sampling_params": [{}, {}]})
    assert answer.json()["error"]["param"] == "sampling_params[0].top_k"
    shared.do(shared.worker.refuse.clear)


def test_error_keeps_the_index_of_the_refused_element(shared: System) -> None:
    shared.do(lambda: shared.worker.refuse.append(Refusal(INVALID, "stop_regex[0]: is no pattern", "stop_regex", 0)))
    error = shared.post("/generate", {"text": "Hi"}).json()["error"]
    assert error["message"] == "sampling_params.stop_regex[0]: is no pattern"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("is too much", "is too much"),
        ("top_p: is too much", "top_p: is too much"),
        ("top_k: top_k: is too much", "top_k: is too much"),
        ("it is not for top_k: ", "it is not for top_k: "),
        ("top_k: ", "The worker refused it."),
    ],
    ids=["no field", "another field", "field twice", "field not at the start", "no text"],
)
def test_error_omits_one_leading_field_name_of_the_workers_message(shared: System, message: str, shown: str) -> None:
    shared.do(lambda: shared.worker.refuse.append(Refusal(INVALID, message, "top_k")))
    error = shared.post(CHAT, BODIES[CHAT]).json()["error"]
    assert (error["param"], error["message"]) == ("top_k", f"top_k: {shown}")


def test_error_about_a_grammar_keeps_the_message_of_the_worker(shared: System) -> None:
    shared.do(lambda: shared.worker.refuse.append(Refusal(INVALID, "grammar: regex, position 3: no", "grammar")))
    error = shared.post("/generate", {"text": "Hi", "sampling_params": {"regex": "a"}}).json()["error"]
    assert (error["param"], error["message"]) == ("sampling_params.regex", "regex, position 3: no")


@pytest.mark.by_day(one_in=2, seed=9)
@each_value(path=list(BODIES), message=["stop_regex[1]: is no pattern", "regex, position 3: (a+: no", "cannot be", ""])
def test_error_of_an_older_worker_names_no_field(shared: System, path: str, message: str) -> None:
    """The client gets the message as the worker wrote it."""
    shared.do(lambda: shared.worker.refuse.append(Refusal(INVALID, message)))
    answer = shared.post(path, BODIES[path])
    error = answer.json()["error"]
    expected = (400, "invalid_request_error", "invalid_value", None, message or "The worker refused the request.")
    assert (answer.status_code, error["type"], error["code"], error["param"], error["message"]) == expected


def test_error_of_a_newer_worker_keeps_an_unknown_field(shared: System) -> None:
    shared.do(lambda: shared.worker.refuse.append(Refusal(INVALID, "xtc.probability: is too much", "xtc.probability")))
    error = shared.post("/generate", {"text": "Hi"}).json()["error"]
    own = "sampling_params.xtc.probability"
    assert (error["param"], error["message"]) == (own, f"{own}: is too much")


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_request_with_a_value_that_protobuf_refuses_gets_400(shared: System, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protobuf gets such a value only if the gateway's check of the field has a fault."""
    monkeypatch.setattr(
        "rootstock_llm.services.gateway.api.generation_params.logit_bias", lambda entries, vocab_size: {1 << 40: 1.0}
    )
    answer = shared.post(path, {**BODIES[path], "logit_bias": {"1": 1}})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_value"
