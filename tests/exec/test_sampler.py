"""The sampler: its tokens, their distribution, and the edits of logits before sampling, compared with plain numpy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rootstock_llm.kernels.contracts.sample_ops import SampleKernels
from rootstock_llm.kernels.reference.sampling import largest, support
from rootstock_llm.services.worker.core.contracts.plan import DryParams, RowFault, SamplingParams, SlotParams
from tests.all_pairs import each_value
from tests.exec.host_executors import on_both_by_night
from tests.exec.sampling import Sampling
from tests.kernels.sampling_case import uniforms

GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)
LOGITS = [1.0, 4.0, 2.0, 4.5, 0.5, 3.0, -1.0, 2.5]


def slot_params(
    slot: int, params: SamplingParams, history: list[int], num_prompt: int, stops: tuple[int, ...] = ()
) -> SlotParams:
    return SlotParams(slot, num_prompt, params, stops, np.array(history, dtype=np.int32))


def sampler_of(
    kernels: SampleKernels, params: SamplingParams, history: list[int] | None = None, num_prompt: int = 0, **rest: Any
) -> Sampling:
    """Returns a sampler over a vocabulary of 8 whose slot 0 has these parameters."""
    sampler = Sampling(4, len(LOGITS), kernels)
    sampler.admit(slot_params(0, params, history or [], num_prompt, **rest))
    return sampler


def sample_one(sampler: Sampling, logits: list[float], position: int = 10, slot: int = 0) -> int:
    result = sampler.sample(torch.tensor([logits]), np.array([slot], np.int32), np.array([position], np.int32))
    assert not result.faults
    return int(result.tokens[0])


def expected_support(logits: np.ndarray, top_k: int, top_p: float, min_p: float, top_n_sigma: float = 0.0) -> set[int]:
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_n_sigma > 0:
        order = [token for token in order if logits[token] >= logits.max() - top_n_sigma * logits.std()]
    kept = order[:top_k] if top_k > 0 else order
    chances = np.exp(logits[kept] - logits.max())
    chances /= chances.sum()
    kept = [token for token, before in zip(kept, np.cumsum(chances) - chances, strict=True) if before < top_p]
    return {token for token in kept if np.exp(logits[token] - logits.max()) >= min_p}


@pytest.mark.by_day(one_in=3)
@each_value(
    cut=[(-1, 1.0, 0.0), (1, 1.0, 0.0), (3, 1.0, 0.0), (-1, 0.5, 0.0), (-1, 0.95, 0.0), (-1, 0.0, 0.0), (-1, 1.0, 0.1),
         (4, 0.8, 0.0), (4, 0.99, 0.3), (100, 0.9, 0.05)],
    temperature=[0.3, 1.0, 2.0],
)  # fmt: skip
def test_kept_tokens_equal_the_tokens_that_numpy_keeps(cut: tuple[int, float, float], temperature: float) -> None:
    """`cut` is (top_k, top_p, min_p)."""
    top_k, top_p, min_p = cut
    logits = np.array(LOGITS) / temperature
    kept = support(torch.tensor(logits, dtype=torch.float32), top_k, top_p, min_p)
    found = set(range(len(LOGITS))) if kept is None else set(kept.tolist())
    assert found == (expected_support(logits, top_k, top_p, min_p) if top_p > 0 else {3})


@pytest.mark.by_day(one_in=5, seed=1)
@pytest.mark.parametrize(("spread", "top_p"), [(0.01, 0.1), (0.01, 0.999), (1.0, 0.7), (5.0, 0.1), (5.0, 0.999)])
def test_top_p_keeps_the_right_tokens_of_a_large_vocabulary(top_p: float, spread: float) -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * spread
    kept = support(logits, -1, top_p, 0.0)
    assert kept is not None
    chances = np.sort(logits.double().softmax(0).numpy())[::-1]
    assert len(kept) == int((np.cumsum(chances) - chances < top_p).sum())
    assert kept.tolist() == sorted(kept.tolist())


def test_top_k_keeps_the_lowest_ids_among_equal_logits() -> None:
    assert largest(torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 2.0]), 3).tolist() == [1, 2, 3]


@pytest.mark.by_day(one_in=2, seed=11)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(8, temperature=1.0, seed=3),
        SamplingParams(8, temperature=0.5, seed=4),
        SamplingParams(8, temperature=1.5, top_k=4, seed=5),
        SamplingParams(8, temperature=1.0, top_p=0.8, seed=6),
        SamplingParams(8, temperature=1.0, min_p=0.2, seed=2**64 - 1),
        SamplingParams(8, temperature=2.0, top_n_sigma=1.25, seed=7),
        SamplingParams(8, temperature=2.0, top_n_sigma=1.25, top_p=0.6, seed=8),
    ],
    ids=["plain", "cold", "top-k", "top-p", "min-p", "top-n-sigma", "top-n-sigma-top-p"],
)
def test_sampled_tokens_follow_the_distribution(kernels: SampleKernels, params: SamplingParams) -> None:
    sampler, draws = sampler_of(kernels, params), 4000
    counts: Counter[int] = Counter()
    for first in range(0, draws, 4):  # the sampler has four slots
        positions = np.arange(first, first + 4, dtype=np.int32)
        counts.update(sampler.sample(torch.tensor([LOGITS] * 4), np.zeros(4, np.int32), positions).tokens.tolist())
    scaled = np.array(LOGITS) / params.temperature
    kept = expected_support(scaled, params.top_k, params.top_p, params.min_p, params.top_n_sigma)
    chances = np.where([i in kept for i in range(len(LOGITS))], np.exp(scaled), 0.0)
    chances /= chances.sum()
    assert set(counts) <= kept
    assert [counts[i] / draws for i in range(len(LOGITS))] == pytest.approx(chances.tolist(), abs=0.025)


def test_uniform_random_numbers_depend_only_on_seed_and_position() -> None:
    seeds, positions = np.arange(500, dtype=np.uint64), np.arange(500, dtype=np.int32)
    together = uniforms(seeds, positions)
    assert [float(uniforms(seeds[i : i + 1], positions[i : i + 1])[0]) for i in range(500)] == together.tolist()
    grid = uniforms(np.repeat(seeds[:100], 100), np.tile(positions[:100], 100))
    assert len(set(grid.tolist())) == 10_000
    assert grid.min() >= 0.0 and grid.max() < 1.0
    assert np.histogram(grid, bins=10, range=(0, 1))[0].tolist() == pytest.approx([1000] * 10, abs=120)


@on_both_by_night
def test_sampled_token_does_not_depend_on_the_batch(kernels: SampleKernels) -> None:
    params = SamplingParams(8, temperature=1.0, top_p=0.9, seed=11)
    sampler = Sampling(4, len(LOGITS), kernels)
    for slot, other in enumerate([params, GREEDY, replace(params, seed=5), replace(params, frequency_penalty=1.0)]):
        sampler.admit(slot_params(slot, other, [], 0))
    alone = [sample_one(sampler, LOGITS, position) for position in range(50)]
    batch = torch.tensor([LOGITS[::-1], LOGITS, LOGITS, LOGITS])
    slots = np.array([1, 3, 0, 2], np.int32)
    mixed = [int(sampler.sample(batch, slots, np.array([7, 7, p, 7], np.int32)).tokens[2]) for p in range(50)]
    assert mixed == alone


@pytest.mark.by_day(one_in=2, seed=59)
@pytest.mark.parametrize(
    ("params", "history", "num_prompt", "expected"),
    [
        (GREEDY, [], 0, 3),
        (replace(GREEDY, frequency_penalty=0.3), [3, 3], 0, 1),
        (replace(GREEDY, frequency_penalty=0.3), [3, 3], 2, 3),
        (replace(GREEDY, presence_penalty=0.6), [3, 3], 0, 1),
        (replace(GREEDY, presence_penalty=0.6), [3, 3], 2, 3),
        (replace(GREEDY, repetition_penalty=1.2), [3], 1, 1),
        (replace(GREEDY, repetition_penalty=1.2), [3], 0, 1),
        (replace(GREEDY, logit_bias=((6, 100.0),)), [], 0, 6),
        (replace(GREEDY, logit_bias=((3, -1.0), (99, 5.0))), [], 0, 1),
    ],
    ids=["none", "frequency-counts-output", "frequency-not-prompt", "presence-output", "presence-not-prompt",
         "repetition-prompt", "repetition-output", "bias", "bias-outside-vocabulary"],
)  # fmt: skip
def test_greedy_token_follows_penalties_and_bias(
    kernels: SampleKernels, params: SamplingParams, history: list[int], num_prompt: int, expected: int
) -> None:
    assert sample_one(sampler_of(kernels, params, history, num_prompt), LOGITS) == expected


def test_repetition_penalty_pushes_negative_logits_down(kernels: SampleKernels) -> None:
    sampler = sampler_of(kernels, replace(GREEDY, repetition_penalty=2.0), [0], 1)
    assert sample_one(sampler, [-1.0, -1.5, *[-9.0] * 6]) == 1


def test_sampled_tokens_count_for_penalties(kernels: SampleKernels) -> None:
    sampler = sampler_of(kernels, replace(GREEDY, frequency_penalty=0.4))
    assert [sample_one(sampler, LOGITS) for _ in range(5)] == [3, 3, 1, 3, 1]


def test_admission_drops_the_state_of_the_previous_request(kernels: SampleKernels) -> None:
    sampler = sampler_of(kernels, replace(GREEDY, frequency_penalty=5.0), [3, 1], 0)
    assert sample_one(sampler, LOGITS) == 5
    sampler.admit(slot_params(0, GREEDY, [], 0))
    assert sample_one(sampler, LOGITS) == 3


@pytest.mark.by_day(one_in=2, seed=10)
@pytest.mark.parametrize(("position", "expected"), [(4, 1), (5, 1), (6, 3), (7, 3)])
def test_stop_tokens_are_forbidden_before_min_new_tokens(kernels: SampleKernels, position: int, expected: int) -> None:
    sampler = sampler_of(kernels, replace(GREEDY, min_new_tokens=2), num_prompt=4, stops=(3, 77))
    assert sample_one(sampler, LOGITS, position) == expected


def test_greedy_token_is_the_lowest_id_among_equal_logits(kernels: SampleKernels) -> None:
    assert sample_one(sampler_of(kernels, GREEDY), [0.0, 2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0]) == 1


@pytest.mark.by_day(one_in=2, seed=2)
@each_value(
    params={"greedy": GREEDY, "drawn": SamplingParams(8), "edited": replace(GREEDY, logit_bias=((1, 1.0),))},
    poison=[torch.nan, torch.inf],
)
def test_only_the_row_whose_logits_are_not_finite_gets_a_fault(
    kernels: SampleKernels, params: SamplingParams, poison: float
) -> None:
    sampler = sampler_of(kernels, params)
    sampler.admit(slot_params(1, GREEDY, [], 0))
    logits = torch.tensor([LOGITS, LOGITS, LOGITS])
    logits[1, 5] = poison
    result = sampler.sample(logits, np.array([1, 0, 1], np.int32), np.array([3, 3, 3], np.int32))
    assert result.faults == {1: RowFault.NAN_LOGITS}
    assert result.tokens.tolist() == [3, 0, 3]


@on_both_by_night
def test_sampling_is_greedy_when_the_temperature_is_tiny(kernels: SampleKernels) -> None:
    assert sample_one(sampler_of(kernels, SamplingParams(8, temperature=1e-9)), [1e4, *[-1e4] * 6, 9999.0]) == 0


@on_both_by_night
def test_logprobs_use_the_raw_logits(kernels: SampleKernels) -> None:
    sampler = sampler_of(kernels, SamplingParams(8, temperature=0.1, top_k=1, logit_bias=((6, 100.0),), top_logprobs=3))
    sampler.admit(slot_params(1, replace(GREEDY, top_logprobs=0), [], 0))
    result = sampler.sample(torch.tensor([LOGITS] * 3), np.array([0, 1, 2], np.int32), np.array([1, 1, 1], np.int32))
    expected = torch.tensor(LOGITS).log_softmax(0)
    assert result.tokens.tolist() == [6, 3, 3]
    assert result.logprobs[0].sampled == pytest.approx(float(expected[6]), abs=1e-6)
    assert result.logprobs[0].top_ids == (3, 1, 5)
    assert list(result.logprobs[0].top) == pytest.approx([float(expected[i]) for i in (3, 1, 5)], abs=1e-6)
    assert result.logprobs[1].top_ids == () and result.logprobs[1].sampled == pytest.approx(float(expected[3]), abs=1e-6)
    assert 2 not in result.logprobs


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(8, temperature=1.0)])
def test_sampled_tokens_stay_within_the_mask(kernels: SampleKernels, params: SamplingParams) -> None:
    mask = {0: np.array([1 << 2 | 1 << 4], dtype=np.uint32)}
    sampler = sampler_of(kernels, params)
    drawn = {
        int(sampler.sample(torch.tensor([LOGITS]), np.array([0], np.int32), np.array([p], np.int32), mask).tokens[0])
        for p in range(60)
    }
    assert drawn == ({2} if params is GREEDY else {2, 4})


def test_sampling_does_not_change_the_input_logits(kernels: SampleKernels) -> None:
    logits = torch.tensor([LOGITS])
    sampler_of(kernels, SamplingParams(8, frequency_penalty=1.0), [1], 0).sample(
        logits, np.array([0], np.int32), np.array([2], np.int32)
    )
    assert logits.tolist() == [LOGITS]


@pytest.mark.parametrize("where", ["apply", "admit"])
def test_only_the_row_with_parameters_that_cannot_be_applied_fails(
    kernels: SampleKernels, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = Sampling(4, len(LOGITS), kernels)
    plain = slot_params(0, GREEDY, [], 0)
    odd = slot_params(1, replace(GREEDY, repetition_penalty=1.5, dry=DryParams(1.0)), [1], 0)
    sampler.admit(plain)
    with monkeypatch.context() as broken:
        if where == "admit":
            broken.setattr("rootstock_llm.services.worker.exec.sampling.slots.past_counts", raising)
        sampler.admit(odd)
    with monkeypatch.context() as broken:
        if where == "apply":
            broken.setattr("rootstock_llm.services.worker.exec.sampling.dry.Repeats.penalties", raising)
        result = sampler.sample(torch.tensor([LOGITS, LOGITS]), np.array([0, 1], np.int32), np.array([4, 4], np.int32))
    assert result.faults == {1: RowFault.FAILED}
    assert int(result.tokens[0]) == 3
    sampler.admit(slot_params(1, GREEDY, [], 0))
    assert sample_one(sampler, LOGITS, slot=1) == 3, "the next request of the slot must get its token"


def raising(*args: object, **more: object) -> None:
    raise OverflowError("made to fail")


def test_dry_penalty_accepts_an_allowed_length_beyond_int32(kernels: SampleKernels) -> None:
    dry = DryParams(multiplier=1.0, allowed_length=1 << 40)
    assert sample_one(sampler_of(kernels, replace(GREEDY, dry=dry), [3, 3, 3, 3], 4), LOGITS) == 3
