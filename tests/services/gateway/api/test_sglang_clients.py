"""Tests of bodies in the form of SGLang's own clients, which send most fields with neutral values."""

from __future__ import annotations

from typing import Any

import pytest

from tests.all_pairs import each_value
from tests.services.gateway.system import System, events

ANSWER = "Hello, world!"


def bench_serving(**fields: Any) -> dict[str, Any]:
    """Returns a body as `python -m sglang.bench_serving --backend sglang` sends it."""
    return {
        "text": "Hi",
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True},
        "stream": True,
        "lora_path": None,
        "return_logprob": False,
        "logprob_start_len": -1,
        **fields,
    }


def test_request_body_of_the_bench_serving_client_is_served(shared: System) -> None:
    answer = shared.post("/generate", bench_serving())
    assert answer.status_code == 200, answer.text
    last = events(answer.text)[-1]
    assert last["text"] == ANSWER[:5] and last["meta_info"]["completion_tokens"] == 5
    sampling = shared.worker.submits[-1].sampling
    assert (sampling.temperature, sampling.max_new_tokens, sampling.ignore_eos) == (0.0, 5, True)


NEUTRAL: dict[str, Any] = {
    "image_data": None,
    "video_data": [],
    "modalities": ["text"],
    "return_hidden_states": False,
    "return_bytes": False,
    "return_routed_experts": False,
    "log_metrics": True,
    "no_logs": False,
    "lora_path": [None],
    "background": False,
    "surprise": None,
}


@pytest.mark.by_day(one_in=4, seed=27)
@each_value(name=list(NEUTRAL), path=["/generate", "/encode"])
def test_neutral_value_of_an_unserved_field_is_accepted(shared: System, name: str, path: str) -> None:
    """Both routes take their neutral values from the table services/gateway/api/known_fields.NATIVE."""
    answer = shared.post(path, {"text": "Hi", name: NEUTRAL[name]})
    assert answer.status_code == 200, answer.text


@pytest.mark.by_day(one_in=3, seed=2)
@pytest.mark.parametrize("name", ["custom_params", "surprise", "temperature"])
def test_null_sampling_param_is_accepted(shared: System, name: str) -> None:
    answer = shared.post("/generate", {"text": "Hi", "sampling_params": {name: None}})
    assert answer.status_code == 200 and answer.json()["text"] == ANSWER


UNSUPPORTED: dict[str, Any] = {
    "return_bytes": 0,
    "return_entropy": [False, True],
    "modalities": ["image"],
    "background": True,
    "surprise": False,
}


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED.items(), ids=UNSUPPORTED.keys())
def test_unsupported_value_of_a_field_is_refused(shared: System, name: str, value: Any) -> None:
    answer = shared.post("/generate", {"text": "Hi", name: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")
