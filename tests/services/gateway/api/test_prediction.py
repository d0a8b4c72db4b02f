"""Tests of OpenAI's `prediction`: workers with draft support receive the tokens, and usage has the counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rootstock_llm.services.shared import limits
from tests.services.gateway.dispatch.test_dispatch_lost import begun, stopped
from tests.services.gateway.dispatch.test_faults import Pending
from tests.services.gateway.fakes import CONTEXT_LEN, VOCAB_SIZE, FakeWorker, ids_of
from tests.services.gateway.system import System, events, wait_until

TEXT = "Hello, reader!"


def reading(workers: list[FakeWorker]) -> None:
    for worker in workers:
        worker.info.reads_predictions = True


def counts(accepted: int, rejected: int) -> dict[str, int]:
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}


@pytest.fixture(scope="module")
def readers() -> Iterator[System]:
    with System(configure=reading) as system:
        yield system


def predicted(content: Any) -> dict[str, Any]:
    return {"type": "content", "content": content}


@pytest.mark.parametrize("content", [TEXT, [{"type": "text", "text": TEXT[:5]}, {"type": "text", "text": TEXT[5:]}]])
def test_worker_of_each_choice_gets_the_predicted_tokens(readers: System, content: Any) -> None:
    plain = readers.chat(n=2, seed=5).json()
    told = readers.chat(n=2, seed=5, prediction=predicted(content)).json()
    without, submits = readers.worker.submits[-3], readers.worker.submits[-2:]
    assert [list(submit.prediction_ids) for submit in (without, *submits)] == [[], ids_of(TEXT), ids_of(TEXT)]
    assert all(submit.prompt_ids == without.prompt_ids for submit in submits)
    call = readers.tokenizer.calls[-1]
    assert call.add_special_tokens is False and not call.hash_root, "it begins nothing and is cached nowhere"
    tokens = plain["usage"]["completion_tokens"]
    assert told["usage"].pop("completion_tokens_details") == counts(tokens, tokens // 2)
    assert (told["choices"], told["usage"]) == (plain["choices"], plain["usage"])


def test_stream_has_prediction_counts_in_its_last_chunk(readers: System) -> None:
    answer = readers.chat(stream=True, stream_options={"include_usage": True}, prediction=predicted(TEXT))
    *_, last = events(answer.text)
    tokens = last["usage"]["completion_tokens"]
    assert last["usage"]["completion_tokens_details"] == counts(tokens, tokens // 2)


def test_prediction_is_cut_to_its_first_tokens(readers: System) -> None:
    most = min(limits.MAX_PREDICTION_TOKENS, CONTEXT_LEN)
    assert readers.chat(prediction=predicted("x" * (most + 5))).status_code == 200
    assert len(readers.worker.submits[-1].prediction_ids) == most
    assert readers.chat(prediction=predicted("")).json()["usage"]["completion_tokens_details"] == counts(0, 0)
    assert not readers.worker.submits[-1].prediction_ids
    assert "completion_tokens_details" not in readers.chat(prediction=None).json()["usage"]


def test_other_workers_get_no_prediction(shared: System) -> None:
    calls = len(shared.tokenizer.calls)
    usage = shared.chat(prediction=predicted(TEXT)).json()["usage"]
    assert usage["completion_tokens_details"] == counts(0, 0)
    assert len(shared.tokenizer.calls) == calls + 1 and not shared.worker.submits[-1].prediction_ids


def test_prediction_is_not_encoded_without_speculation(readers: System) -> None:
    calls = len(readers.tokenizer.calls)
    usage = readers.chat(prediction=predicted(TEXT), speculative=False).json()["usage"]
    assert usage["completion_tokens_details"] == counts(0, 0)
    assert len(readers.tokenizer.calls) == calls + 1 and not readers.worker.submits[-1].prediction_ids


def test_prediction_leaves_out_tokens_without_a_row(readers: System) -> None:
    """A worker would refuse these tokens. A prediction is only a hint, so it must not cause a refusal."""
    assert readers.chat(prediction=predicted(f"a{chr(VOCAB_SIZE)}b{chr(VOCAB_SIZE - 1)}")).status_code == 200
    assert list(readers.worker.submits[-1].prediction_ids) == [*ids_of("ab"), VOCAB_SIZE - 1]


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("text", "prediction"),
        ({"type": "text", "content": "a"}, "prediction.type"),
        (predicted(None), "prediction.content"),
        (predicted([{"type": "text", "text": "a"}, {"type": "image_url"}]), "prediction.content[1].type"),
        (predicted([{"type": "text", "text": ""}] * (limits.MAX_CONTENT_PARTS + 1)), "prediction.content"),
    ],
    ids=["text", "type", "nothing", "part", "parts"],
)
def test_refusal_names_the_element_of_a_prediction(readers: System, prediction: Any, param: str) -> None:
    before = len(readers.worker.submits)
    answer = readers.chat(prediction=prediction)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert len(readers.worker.submits) == before


def test_prediction_has_a_limit_of_characters(readers: System) -> None:
    answer = readers.chat(prediction=predicted("x" * (limits.MAX_RENDERED_CHARS + 1)))
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "prediction")


def test_next_worker_gets_the_prediction_and_counts_add_up() -> None:
    def configure(workers: list[FakeWorker]) -> None:
        stopped(workers)
        reading(workers)

    with System(workers=2, configure=configure) as system:
        pending = Pending(system, stream=True, stream_options={"include_usage": True}, prediction=predicted(TEXT))
        first = begun(system, 5)
        wait_until(lambda: sum(sum(batch.counts) for batch in system.detokenizer.batches) == 5, "five ids")
        system.call(first.stop())
        wait_until(lambda: sum(system.submits()) == 2, "the other worker")
        system.allow(None)
        usage = events(pending.result().text)[-1]["usage"]
        tokens = usage["completion_tokens"]
        assert usage["completion_tokens_details"] == counts(tokens, 2 + (tokens - 5) // 2)
        assert [list(host.servicer.submits[0].prediction_ids) for host in system.workers] == [ids_of(TEXT)] * 2
