"""Log probabilities of labels after a prompt equal transformers' log_softmax, and no token is sampled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rootstock_llm.kernels.contracts.sample_ops import SampleKernels
from rootstock_llm.services.worker.core.contracts.plan import RowFault, SamplingParams, ScoreParams, SlotParams
from rootstock_llm.services.worker.exec.executor import DeviceExecutor
from rootstock_llm.services.worker.exec.fake import FakeExecutor
from rootstock_llm.services.worker.exec.sampling import logprob_requests as logprob_wishes
from rootstock_llm.services.worker.exec.sampling.logprob_requests import LogprobRequests
from rootstock_llm.services.worker.exec.step.passes import POISON
from rootstock_llm.services.worker.exec.streams.copies import Readback
from tests.all_pairs import each_pair, each_value
from tests.exec.device_doubles import InlineStreams
from tests.exec.driver import Driver, Sequence, greedy, i32
from tests.exec.host_executors import KERNELS, build_host_executor
from tests.exec.tiny_models import MODELS

CLOSE = 1e-4
VOCAB = 257
CHECKPOINTS = ["qwen3", "llama-untied", "mistral-window"]
LABELS = (9, 250, 9, 0)


@dataclass(frozen=True)
class Scorer:
    """A checkpoint, and transformers' log probabilities for it."""

    folder: Path
    model: Any

    def expected(self, prompt: list[int], labels: tuple[int, ...]) -> list[float]:
        with torch.inference_mode():
            values: list[float] = self.model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)[list(labels)].tolist()
        return values


@pytest.fixture(scope="module", params=CHECKPOINTS)
def scorer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scorer:
    folder = tmp_path_factory.mktemp(request.param)
    return Scorer(folder, MODELS[request.param].build(folder))


@pytest.fixture
def driver(scorer: Scorer, monkeypatch: pytest.MonkeyPatch, kernel_name: str) -> Iterator[Driver]:
    """A driver whose executor measures log probabilities for three rows at a time, so that larger steps need several pieces."""
    monkeypatch.setattr(logprob_wishes, "PIECE_BYTES", 3 * 4 * VOCAB)
    executor, _ = build_host_executor(
        str(scorer.folder), "float32", 4, 16, 512, 0.5, None, 1, lambda _: None, True, kernel_name
    )  # fmt: skip
    yield Driver(executor, 4)
    executor.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, VOCAB, length).tolist()


def scoring(prompt: list[int], slot: int, labels: tuple[int, ...] = LABELS) -> Sequence:
    return Sequence(prompt, slot, SamplingParams(max_new_tokens=0, score=ScoreParams(labels)))


def check(scorer: Scorer, sequence: Sequence) -> None:
    assert sequence.params.score is not None and sequence.label_logprobs is not None
    assert sequence.label_logprobs.dtype == np.float32
    expected = scorer.expected(sequence.prompt, sequence.params.score.label_token_ids)
    assert sequence.label_logprobs.tolist() == pytest.approx(expected, abs=CLOSE)


@each_pair(
    indirect=("scorer", "kernel_name"),
    scorer=CHECKPOINTS,
    kernel_name=KERNELS,
    chunk={"chunks-of-4": 4, "chunks-of-16": 16, "whole": 1 << 30},
)
def test_score_equals_transformers_when_prompts_are_cut_into_chunks(scorer: Scorer, driver: Driver, chunk: int) -> None:
    sequence = scoring(prompt_of(41), 3)
    driver.prefill([sequence], chunk)
    check(scorer, sequence)


@each_value(indirect=("scorer", "kernel_name"), scorer=CHECKPOINTS, kernel_name=KERNELS)
def test_score_rows_share_steps_with_sampled_rows_in_a_mixed_batch(scorer: Scorer, driver: Driver) -> None:
    """Sampled rows must get equal tokens with and without eight scored rows in the batch."""
    alone = [Sequence(prompt_of(10 + slot, slot), slot, greedy(top_logprobs=2)) for slot in range(3)]
    for sequence in alone:
        driver.prefill([sequence])
        driver.decode([sequence], 4)
    beside = [Sequence(prompt_of(10 + slot, slot), slot, greedy(top_logprobs=2)) for slot in range(3)]
    scores = [scoring(prompt_of(7 + 3 * slot, slot), slot, LABELS[: 1 + slot % 4]) for slot in range(3, 11)]
    driver.prefill([beside[0], *scores[:4], beside[1], *scores[4:], beside[2]])
    driver.decode(beside, 4)
    for sequence in scores:
        check(scorer, sequence)
        assert sequence.output == []
    assert [sequence.output for sequence in beside] == [sequence.output for sequence in alone]


def test_score_request_samples_no_token(scorer: Scorer, kernel_name: str) -> None:
    """The relay must still have the value that the request's admission has written for the slot."""
    built, _ = build_host_executor(
        str(scorer.folder), "float32", 4, 16, 512, 0.5, None, 1, lambda _: None, True, kernel_name
    )  # fmt: skip
    assert isinstance(built, DeviceExecutor)
    driver = Driver(built, 4)
    sequence = scoring(prompt_of(9), 5)
    run = built.forward(driver.plan([(sequence, 9)]))
    built.sample(run, {})
    assert built.wait(run).tokens.tolist() == [0]
    assert int(built.runner._relay[5]) == POISON
    built.close()


# Without a model


def scores_of(kernels: SampleKernels, logits: torch.Tensor, labels: list[tuple[int, ...]]) -> tuple[Any, Any]:
    """Scores one-token prompts with a vocabulary of 8. Each prompt has a row of `logits` and a tuple of `labels`."""
    count, streams = len(labels), InlineStreams()
    logprobs, readback = LogprobRequests(8, 8, kernels, streams.device), Readback(streams)
    for slot, ids in enumerate(labels):
        logprobs.admit(SlotParams(slot, 1, SamplingParams(0, score=ScoreParams(ids)), (), i32([])))
    driver = Driver(FakeExecutor(8, 4, 8, 8, 8), 4)
    plan = driver.plan([(scoring([1], slot), 1) for slot in range(count)])
    scored = logprobs.scored_rows(plan)
    assert scored is not None
    views = {name: torch.from_numpy(values.astype(np.int32)) for name, values in logprobs.score_sections(scored)}
    pieces = logprobs.measure_scores(scored, views, lambda wanted: logits[wanted], readback, "")
    readback.launch()
    return logprobs.scores(pieces, readback.host())


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_only_the_score_row_with_logits_that_are_not_finite_gets_a_fault(kernels: SampleKernels, poison: float) -> None:
    logits = torch.zeros(3, 8)
    logits[1, 2] = poison
    values, faults = scores_of(kernels, logits, [(1,), (1, 5), (1, 2, 3)])
    assert faults == {1: RowFault.NAN_LOGITS}
    assert {row: found.tolist() for row, found in values.items()} == {
        0: pytest.approx([-np.log(8)]),
        2: pytest.approx([-np.log(8)] * 3),
    }


def test_score_of_a_label_with_probability_0_is_minus_infinity(kernels: SampleKernels) -> None:
    logits = torch.zeros(1, 8)
    logits[0, 3] = -torch.inf
    values, faults = scores_of(kernels, logits, [(3, 4)])
    assert values[0].tolist() == [-np.inf, pytest.approx(-np.log(7))] and faults == {}


def test_admission_drops_the_labels_of_the_previous_request(kernels: SampleKernels) -> None:
    logprobs = LogprobRequests(2, 8, kernels, InlineStreams().device)
    logprobs.admit(SlotParams(0, 1, SamplingParams(0, score=ScoreParams((3,))), (), i32([])))
    logprobs.admit(SlotParams(0, 1, greedy(), (), i32([])))
    plan = Driver(FakeExecutor(8, 4, 8, 8, 8), 4).plan([(scoring([1], 0), 1)])
    assert logprobs.scored_rows(plan) is None
