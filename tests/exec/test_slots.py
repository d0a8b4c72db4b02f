"""Grammar masks, allowed tokens and banned tokens: their intersection, and batches in which they differ by row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rootstock_llm.kernels.contracts.sample_ops import SampleKernels
from rootstock_llm.services.worker.core.contracts.plan import RowFault, SamplingParams, SlotParams
from rootstock_llm.services.worker.exec.contracts.step_data import Outcome
from tests.exec.host_executors import on_both_by_night, on_both_kernels
from tests.exec.sampling import Sampling

VOCAB = 100  # a mask has four 32-bit words, the last of which has 4 used bits
GREEDY = SamplingParams(8, temperature=0.0)
DRAWING = SamplingParams(8, temperature=1.0)


def rising() -> torch.Tensor:
    """Returns logits that increase with the token id."""
    return torch.arange(VOCAB, dtype=torch.float32) / 20


def mask(*tokens: int) -> np.ndarray:
    words = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def sample(
    kernels: SampleKernels, rows: list[SamplingParams], masks: dict[int, np.ndarray] | None = None, **slot: Any
) -> Outcome:
    """Samples one token per row. `rows` has the sampling parameters of each row. All rows have equal logits."""
    sampler = Sampling(len(rows), VOCAB, kernels)
    stops = slot.get("stops", ())
    for index, params in enumerate(rows):
        sampler.admit(SlotParams(index, 0, params, stops, np.empty(0, np.int32)))
    positions = np.full(len(rows), slot.get("position", 0), np.int32)
    return sampler.sample(rising().repeat(len(rows), 1), np.arange(len(rows), dtype=np.int32), positions, masks)


@pytest.mark.by_day(one_in=2, seed=12)
@pytest.mark.parametrize(
    ("params", "allowed", "expected"),
    [
        (GREEDY, mask(31, 32), 32),
        (GREEDY, mask(96, 3), 96),
        (GREEDY, ~mask(), 99),
        (replace(GREEDY, allowed_token_ids=(5, 40)), None, 40),
        (replace(GREEDY, allowed_token_ids=(5, 40, VOCAB, -1)), None, 40),
        (replace(GREEDY, banned_token_ids=(99, 98)), None, 97),
        (replace(GREEDY, banned_token_ids=(VOCAB, -1)), None, 99),
        (replace(GREEDY, allowed_token_ids=(5, 40), banned_token_ids=(40,)), None, 5),
        (replace(GREEDY, allowed_token_ids=(5, 40)), mask(5, 90), 5),
        (replace(GREEDY, banned_token_ids=(90,)), mask(5, 90), 5),
        (replace(GREEDY, logit_bias=((7, 100.0),)), mask(5, 6), 6),
        (replace(GREEDY, logit_bias=((7, 100.0),)), mask(5, 7, 90), 7),
    ],
    ids=[
        "mask-word-edge", "mask-last-word", "mask-of-all", "allowed", "allowed-outside", "banned", "banned-outside",
        "allowed-less-banned", "mask-and-allowed", "mask-less-banned", "bias-cannot-lift", "bias-within",
    ],
)  # fmt: skip
def test_greedy_token_is_the_best_allowed_token(
    kernels: SampleKernels, params: SamplingParams, allowed: np.ndarray | None, expected: int
) -> None:
    result = sample(kernels, [params], {} if allowed is None else {0: allowed})
    assert result.faults == {} and result.tokens.tolist() == [expected]


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize(
    "params",
    [
        DRAWING,
        replace(DRAWING, top_p=0.9),
    ],
    ids=["plain", "top-p"],
)
def test_sampling_reaches_exactly_the_allowed_tokens(kernels: SampleKernels, params: SamplingParams) -> None:
    rows = [replace(params, seed=seed) for seed in range(300)]
    result = sample(kernels, rows, dict.fromkeys(range(len(rows)), mask(31, 50, 51)))
    assert set(result.tokens.tolist()) == {31, 50, 51} and not result.faults


@on_both_by_night
def test_each_mask_applies_only_to_its_row_of_a_mixed_batch(kernels: SampleKernels) -> None:
    rows = [GREEDY, GREEDY, replace(GREEDY, banned_token_ids=(99,)), GREEDY, replace(GREEDY, presence_penalty=1.0)]
    result = sample(kernels, rows, {3: mask(12), 1: mask(70, 8)})
    assert result.tokens.tolist() == [99, 70, 98, 12, 99]


@pytest.mark.by_day(one_in=3, seed=5)
@pytest.mark.parametrize(
    ("params", "allowed", "stops"),
    [
        (GREEDY, mask(), ()),
        (DRAWING, mask(), ()),
        (replace(GREEDY, allowed_token_ids=(VOCAB + 5,)), None, ()),
        (replace(GREEDY, banned_token_ids=tuple(range(VOCAB))), None, ()),
        (replace(GREEDY, allowed_token_ids=(4,)), mask(5), ()),
        (replace(GREEDY, min_new_tokens=3), mask(9), (9,)),
    ],
    ids=["empty-mask", "empty-mask-drawing", "allowed-outside", "all-banned", "disjoint", "stop-alone-before-its-time"],
)
def test_row_gets_a_fault_when_no_token_is_allowed(
    kernels: SampleKernels, params: SamplingParams, allowed: np.ndarray | None, stops: tuple[int, ...]
) -> None:
    params = replace(params, top_logprobs=0)
    result = sample(kernels, [GREEDY, params, DRAWING], {} if allowed is None else {1: allowed}, stops=stops)
    assert result.faults == {1: RowFault.NO_TOKEN_ALLOWED}
    assert result.tokens[:2].tolist() == [99, 0] and result.logprobs == {}


@pytest.mark.by_day(one_in=2, seed=2)
@on_both_kernels
def test_logits_that_are_not_finite_cause_a_fault_with_any_mask(kernels: SampleKernels) -> None:
    sampler = Sampling(3, VOCAB, kernels)
    logits = rising().repeat(3, 1)
    logits[0, 7], logits[1, 7], logits[2, 8:] = torch.nan, torch.inf, -torch.inf
    slots, masks = np.arange(3, dtype=np.int32), {0: mask(1), 1: mask(), 2: mask(9)}
    result = sampler.sample(logits, slots, np.zeros(3, np.int32), masks)
    assert result.faults == {0: RowFault.NAN_LOGITS, 1: RowFault.NAN_LOGITS, 2: RowFault.NO_TOKEN_ALLOWED}


def test_admission_drops_the_banned_tokens_of_the_previous_request(kernels: SampleKernels) -> None:
    sampler = Sampling(1, VOCAB, kernels)
    for params, expected in ((replace(GREEDY, banned_token_ids=(99,)), 98), (GREEDY, 99)):
        sampler.admit(SlotParams(0, 0, params, (), np.empty(0, np.int32)))
        for allowed in ({}, {0: ~mask()}):
            result = sampler.sample(rising()[None], np.zeros(1, np.int32), np.zeros(1, np.int32), allowed)
            assert result.tokens.tolist() == [expected]
