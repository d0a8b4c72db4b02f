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


def read_predictions(workers: list[FakeWorker]) -> None:
    for worker in workers:
        worker.info.reads_predictions = True


def counts(accepted: int, rejected: int) -> dict[str, int]:
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with System(configure=read_predictions) as system:
        yield system


def prediction_of(content: Any) -> dict[str, Any]:
    return {"type": "content", "content": content}


@pytest.mark.parametrize("content", [TEXT, [{"type": "text", "text": TEXT[:5]}, {"type": "text", "text": TEXT[5:]}]])
def test_worker_receives_the_predicted_tokens_for_each_choice(system: System, content: Any) -> None:
    without_prediction = system.chat(n=2, seed=5).json()
    with_prediction = system.chat(n=2, seed=5, prediction=prediction_of(content)).json()
    plain_submit, submits = system.worker.submits[-3], system.worker.submits[-2:]
    assert [list(submit.prediction_ids) for submit in (plain_submit, *submits)] == [[], ids_of(TEXT), ids_of(TEXT)]
    assert all(submit.prompt_ids == plain_submit.prompt_ids for submit in submits)
    call = system.tokenizer.calls[-1]
    assert call.add_special_tokens is False and not call.hash_root, "a prediction follows the prompt and has no block hashes"
    tokens = without_prediction["usage"]["completion_tokens"]
    assert with_prediction["usage"].pop("completion_tokens_details") == counts(tokens, tokens // 2)
    assert (with_prediction["choices"], with_prediction["usage"]) == (without_prediction["choices"], without_prediction["usage"])


def test_stream_has_prediction_counts_in_the_last_chunk(system: System) -> None:
    answer = system.chat(stream=True, stream_options={"include_usage": True}, prediction=prediction_of(TEXT))
    *_, last = events(answer.text)
    tokens = last["usage"]["completion_tokens"]
    assert last["usage"]["completion_tokens_details"] == counts(tokens, tokens // 2)


def test_prediction_is_truncated_to_the_first_tokens(system: System) -> None:
    most = min(limits.MAX_PREDICTION_TOKENS, CONTEXT_LEN)
    assert system.chat(prediction=prediction_of("x" * (most + 5))).status_code == 200
    assert len(system.worker.submits[-1].prediction_ids) == most
    assert system.chat(prediction=prediction_of("")).json()["usage"]["completion_tokens_details"] == counts(0, 0)
    assert not system.worker.submits[-1].prediction_ids
    assert "completion_tokens_details" not in system.chat(prediction=None).json()["usage"]


def test_worker_without_draft_support_receives_no_prediction(shared: System) -> None:
    calls = len(shared.tokenizer.calls)
    usage = shared.chat(prediction=prediction_of(TEXT)).json()["usage"]
    assert usage["completion_tokens_details"] == counts(0, 0)
    assert len(shared.tokenizer.calls) == calls + 1 and not shared.worker.submits[-1].prediction_ids


def test_prediction_is_not_encoded_without_speculation(system: System) -> None:
    calls = len(system.tokenizer.calls)
    usage = system.chat(prediction=prediction_of(TEXT), speculative=False).json()["usage"]
    assert usage["completion_tokens_details"] == counts(0, 0)
    assert len(system.tokenizer.calls) == calls + 1 and not system.worker.submits[-1].prediction_ids


def test_prediction_omits_tokens_outside_the_vocabulary(system: System) -> None:
    """A worker would refuse these tokens. A prediction is only a hint, so it must not cause a refusal."""
    assert system.chat(prediction=prediction_of(f"a{chr(VOCAB_SIZE)}b{chr(VOCAB_SIZE - 1)}")).status_code == 200
    assert list(system.worker.submits[-1].prediction_ids) == [*ids_of("ab"), VOCAB_SIZE - 1]


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("text", "prediction"),
        ({"type": "text", "content": "a"}, "prediction.type"),
        (prediction_of(None), "prediction.content"),
        (prediction_of([{"type": "text", "text": "a"}, {"type": "image_url"}]), "prediction.content[1].type"),
        (prediction_of([{"type": "text", "text": ""}] * (limits.MAX_CONTENT_PARTS + 1)), "prediction.content"),
    ],
    ids=["text", "type", "nothing", "part", "parts"],
)
def test_error_names_the_refused_element_of_a_prediction(system: System, prediction: Any, param: str) -> None:
    before = len(system.worker.submits)
    answer = system.chat(prediction=prediction)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert len(system.worker.submits) == before


def test_prediction_with_too_many_characters_is_refused(system: System) -> None:
    answer = system.chat(prediction=prediction_of("x" * (limits.MAX_RENDERED_CHARS + 1)))
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "prediction")


def test_next_worker_receives_the_prediction_and_usage_adds_the_counts_of_both_workers() -> None:
    def configure(workers: list[FakeWorker]) -> None:
        stopped(workers)
        read_predictions(workers)

    with System(workers=2, configure=configure) as system:
        pending = Pending(system, stream=True, stream_options={"include_usage": True}, prediction=prediction_of(TEXT))
        first = begun(system, 5)
        wait_until(lambda: sum(sum(batch.counts) for batch in system.detokenizer.batches) == 5, "five ids")
        system.call(first.stop())
        wait_until(lambda: sum(system.submits()) == 2, "the other worker")
        system.allow(None)
        usage = events(pending.result().text)[-1]["usage"]
        tokens = usage["completion_tokens"]
        assert usage["completion_tokens_details"] == counts(tokens, 2 + (tokens - 5) // 2)
        assert [list(host.servicer.submits[0].prediction_ids) for host in system.workers] == [ids_of(TEXT)] * 2
