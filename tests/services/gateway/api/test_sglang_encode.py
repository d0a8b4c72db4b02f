"""Tests of SGLang's /encode: embeddings of texts or ids."""

from __future__ import annotations

import httpx

from tests.services.gateway.api.test_sglang import Waiting, abort
from tests.services.gateway.fakes import ids_of, vector_of
from tests.services.gateway.system import System, wait_until


def test_response_to_one_text_has_one_embedding(shared: System) -> None:
    answer = shared.post("/encode", {"text": "Hi", "rid": "e1", "priority": 3}).json()
    assert answer["embedding"] == vector_of(ids_of("Hi"))
    meta = answer["meta_info"]
    assert 0 < meta.pop("e2e_latency") < 60
    assert meta == {
        "id": "e1",
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": 2,
        "cached_tokens": 0,
        "weight_version": "default",
        "queue_time": 0.0,
        "num_retractions": 0,
    }
    submit = shared.worker.submits[-1]
    assert submit.sampling.HasField("embedding") and submit.priority == 3


def test_response_to_lists_of_ids_is_a_list_of_embeddings(shared: System) -> None:
    answers = shared.post("/encode", {"input_ids": [[8, 16], [24]], "rid": "e"}).json()
    assert [answer["embedding"] for answer in answers] == [vector_of([8, 16]), vector_of([24])]
    assert [answer["meta_info"]["id"] for answer in answers] == ["e_0", "e_1"]


def test_dimensions_shorten_the_embedding(shared: System) -> None:
    assert shared.post("/encode", {"text": "Hi", "dimensions": 2}).json()["embedding"] == vector_of(ids_of("Hi"))[:2]


def test_encode_request_is_refused_when_the_model_gives_no_embeddings() -> None:
    with System(down=("worker",)) as system:
        system.worker.info.embedding_size = 0
        system.call(system.workers[0].start())
        answer = system.post("/encode", {"text": "Hi"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "model"


def test_aborted_encode_request_gets_400(system: System) -> None:
    system.do(lambda: system.worker.allow(0))
    waiting = Waiting(system, "/encode", {"text": "Hi", "rid": "e1"})
    wait_until(lambda: bool(system.worker.running), "the submit")
    abort(system, rid="e1")
    answer: httpx.Response = waiting.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "aborted")
    wait_until(lambda: not system.worker.running, "the abort at the worker")
