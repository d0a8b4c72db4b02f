"""Tests of /v1/embeddings with OpenAI's official client and plain HTTP."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest

from tests.services.gateway.fakes import CONTEXT_LEN, EMBEDDING_SIZE, MODEL, ids_of, vector_of
from tests.services.gateway.system import System


def embed(system: System, **body: Any) -> Any:
    return system.post("/v1/embeddings", {"model": MODEL, "input": "Hi", **body})


@pytest.mark.parametrize(
    ("input_", "prompts"),
    [
        (["ab", "c", "ab"], ["ab", "c", "ab"]),
        ([ids_of("ab"), ids_of("cde")], ["ab", "cde"]),
    ],
    ids=["strings", "lists of ids"],
)
def test_client_receives_embeddings_for_every_form_of_input(shared: System, input_: Any, prompts: list[str]) -> None:
    answer = shared.openai().embeddings.create(model=MODEL, input=input_)
    assert [item.index for item in answer.data] == list(range(len(prompts)))
    assert [item.embedding for item in answer.data] == [vector_of(ids_of(prompt)) for prompt in prompts]
    assert (answer.object, answer.model, answer.data[0].object) == ("list", MODEL, "embedding")
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, prompts))


def test_embedding_is_a_list_of_floats_by_default(shared: System) -> None:
    assert embed(shared).json()["data"][0]["embedding"] == vector_of(ids_of("Hi"))
    assert embed(shared, encoding_format="float").json() == embed(shared).json()


def test_base64_embedding_is_little_endian_float32(shared: System) -> None:
    raw = base64.b64decode(embed(shared, encoding_format="base64").json()["data"][0]["embedding"])
    assert list(struct.unpack(f"<{EMBEDDING_SIZE}f", raw)) == vector_of(ids_of("Hi"))


def test_dimensions_shorten_the_embedding(shared: System) -> None:
    answer = shared.openai().embeddings.create(model=MODEL, input=["ab", "c"], dimensions=2)
    assert [item.embedding for item in answer.data] == [vector_of(ids_of(text))[:2] for text in ("ab", "c")]


def test_fields_of_an_embedding_request_reach_the_worker(shared: System) -> None:
    answer = embed(shared, input=["ab", "c"], dimensions=3, normalize=False, cache_salt="s", priority=2, routing_key="k")
    assert answer.status_code == 200
    submits = shared.worker.submits[-2:]
    assert [list(submit.prompt_ids) for submit in submits] == [ids_of("ab"), ids_of("c")]
    for submit in submits:
        sampling = submit.sampling
        assert (sampling.max_new_tokens, sampling.embedding.dimensions, sampling.embedding.normalize) == (1, 3, False)
        assert (submit.stream, submit.cache_salt, submit.priority, submit.routing_key) == (False, "s", 2, "k")
    embed(shared)
    sampling = shared.worker.submits[-1].sampling
    assert not sampling.embedding.HasField("dimensions") and not sampling.embedding.HasField("normalize")


def test_embedding_input_is_truncated_to_the_last_tokens(shared: System) -> None:
    for max_tokens, sent in ((2, "ld"), (2.0, "ld"), (99, "world"), (-1, "world")):
        answer = embed(shared, input="world", truncate_prompt_tokens=max_tokens).json()
        assert answer["usage"]["prompt_tokens"] == len(sent), "the number 2.0 is accepted as the integer 2"
        assert list(shared.worker.submits[-1].prompt_ids) == ids_of(sent)
    assert embed(shared, input="x" * (CONTEXT_LEN + 9), truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == CONTEXT_LEN
    assert embed(shared, truncate_prompt_tokens=0).json()["error"]["param"] == "truncate_prompt_tokens"


def test_embedding_input_may_fill_the_context(shared: System) -> None:
    assert embed(shared, input="x" * CONTEXT_LEN).status_code == 200


def test_embedding_request_fails_when_the_worker_refuses_a_prompt(system: System) -> None:
    system.do(lambda: system.worker.refuse.append((2, "not today", "embedding")))
    answer = embed(system, input=["a", "b", "c"])
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "model"


def test_embedding_request_sends_nothing_to_the_detokenizer(system: System) -> None:
    assert embed(system, input=["a", "b"]).status_code == 200
    assert system.detokenizer.batches == []
    assert system.metric("rootstock_gateway_output_tokens_total") == 0


class TestUnsupportedModels:
    @pytest.fixture
    def served(self, system: System) -> System:
        """Returns a system with a stopped worker. A test may change the `info` of the worker before it starts the worker."""
        system.call(system.workers[0].stop())
        return system

    @staticmethod
    def start(system: System, generates: bool, embedding_size: int) -> None:
        system.worker.info.generates, system.worker.info.embedding_size = generates, embedding_size
        system.call(system.workers[0].start())

    def test_embedding_model_refuses_to_generate(self, served: System) -> None:
        self.start(served, False, 8)
        assert embed(served).status_code == 200
        for answer in (served.chat(), served.complete()):
            assert answer.status_code == 400
            assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == ("model", "unsupported_model")

    def test_generating_model_refuses_embeddings(self, served: System) -> None:
        self.start(served, True, 0)
        assert served.chat().status_code == 200
        answer = embed(served)
        assert answer.status_code == 400
        assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == ("model", "unsupported_model")
