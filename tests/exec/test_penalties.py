"""The DRY penalty equals its definition, and penalties count tokens that the sampler did not sample."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from rootstock_llm.kernels.contracts.sample_ops import SampleKernels
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, DryParams, ForwardMode, SamplingParams, SlotParams
from rootstock_llm.services.worker.exec.sampling.dry import MAX_PENALTY, Repeats
from tests.all_pairs import each_pair
from tests.exec.host_executors import on_both_by_night, on_both_kernels
from tests.exec.sampling import Sampling

VOCAB = 40
DRY = DryParams(multiplier=0.8)


def expected_penalties(params: DryParams, tokens: list[int]) -> dict[int, float]:
    """Returns each token's DRY penalty after `tokens`, by trying all candidates, earlier positions and lengths."""
    seen = tokens[-params.window :] if params.window else tokens
    result = {}
    for place, candidate in enumerate(seen):
        if candidate in params.breakers:
            continue
        length = 0
        while (
            length < place and seen[place - 1 - length] == seen[len(seen) - 1 - length]
            and seen[place - 1 - length] not in params.breakers
        ):  # fmt: skip
            length += 1
        if length >= max(1, params.allowed_length):
            penalty = params.multiplier * params.base ** (length - params.allowed_length)
            result[candidate] = max(result.get(candidate, 0.0), penalty)
    return result


def found(repeats: Repeats) -> dict[int, float]:
    ids, penalties = repeats.penalties()
    return dict(zip(ids.tolist(), penalties.tolist(), strict=True))


@pytest.mark.by_day(one_in=2, seed=5)
@pytest.mark.parametrize(
    ("params", "tokens", "expected"),
    [
        (DRY, [], {}),
        (DRY, [1], {}),
        (DRY, [1, 2, 3, 4, 1], {}),
        (DRY, [1, 2, 3, 4, 1, 2], {3: 0.8}),
        (DRY, [1, 2, 3, 4, 1, 2, 3], {4: 0.8 * 1.75}),
        (DRY, [1, 2, 3, 1, 2, 4, 1, 2], {3: 0.8, 4: 0.8}),
        (replace(DRY, allowed_length=1), [1, 2, 3, 1], {2: 0.8}),
        (DRY, [7, 7, 7, 7], {7: 0.8 * 1.75}),
        (replace(DRY, breakers=(2,)), [1, 2, 3, 4, 1, 2], {}),
        (replace(DRY, breakers=(3,)), [1, 2, 3, 4, 1, 2], {}),
        (replace(DRY, breakers=(9,)), [8, 9, 1, 2, 3, 4, 8, 9, 1, 2], {3: 0.8}),
        (replace(DRY, window=5), [1, 2, 3, 4, 1, 2], {}),
        (replace(DRY, window=6), [1, 2, 3, 4, 1, 2], {3: 0.8}),
        (replace(DRY, window=6), [9, 1, 2, 3, 9, 1, 2], {3: 0.8}),
    ],
    ids=[
        "nothing", "one", "below-allowed", "at-allowed", "one-more", "two-ways", "allowed-1", "overlapping", "breaker-last",
        "breaker-next", "breaker-before", "outside-window", "just-inside-window", "copy-cut-by-window",
    ],
)  # fmt: skip
def test_dry_penalties_have_the_expected_values(params: DryParams, tokens: list[int], expected: dict[int, float]) -> None:
    assert found(Repeats(params, np.array(tokens, dtype=np.int64))) == pytest.approx(expected)
    assert expected_penalties(params, tokens) == pytest.approx(expected)


@pytest.mark.by_day(one_in=2, seed=12)
@each_pair(
    window=[0, 1, 7, 50],
    breakers={"no-breaker": (), "one-breaker": (0,), "two-breakers": (0, 1)},
    alphabet=[2, 3, 6],
)
def test_dry_penalties_equal_the_definition_at_every_length(window: int, breakers: tuple[int, ...], alphabet: int) -> None:
    params = DryParams(0.5, 1.1, 2, window, breakers)
    rng = random.Random(f"{window} {breakers} {alphabet}")
    tokens = [rng.randrange(alphabet) for _ in range(120)]
    grown = Repeats(params, np.array(tokens[:30], dtype=np.int64))
    for size in range(30, len(tokens)):
        expected = pytest.approx(expected_penalties(params, tokens[:size]), rel=1e-5)
        assert found(grown) == expected, size
        assert found(Repeats(params, np.array(tokens[:size], dtype=np.int64))) == expected, size
        grown.add(tokens[size])


def test_dry_penalties_stay_finite_for_a_long_repetition() -> None:
    repeats = Repeats(DryParams(1.0, 10.0), np.zeros(2000, dtype=np.int64))
    assert found(repeats) == {0: pytest.approx(MAX_PENALTY)}


def test_dry_penalties_are_right_for_texts_longer_than_the_first_buffer() -> None:
    params = replace(DRY, base=1.001)
    repeats, tokens = Repeats(params, np.empty(0, dtype=np.int64)), [index % 17 for index in range(700)]
    for token in tokens:
        repeats.add(token)
    assert found(repeats) == pytest.approx(expected_penalties(params, tokens), rel=1e-4)


PENALISED = SamplingParams(8, frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=1.3, dry=DRY)


def penalised(kernels: SampleKernels, prompt: list[int], output: list[int], params: SamplingParams = PENALISED) -> Sampling:
    """Returns a sampler whose slot 0 has this prompt and output."""
    sampler = Sampling(1, VOCAB, kernels)
    sampler.admit(SlotParams(0, len(prompt), params, (), np.array(prompt + output, dtype=np.int32)))
    return sampler


def count(sampler: Sampling, token: int) -> None:
    """Makes the sampler sample this token in slot 0, whatever the penalties."""
    logits = torch.zeros((1, VOCAB))
    logits[0, token] = 1e6
    found = sampler.sample(logits, np.zeros(1, np.int32), np.zeros(1, np.int32))
    assert found.tokens.tolist() == [token]


def follow(sampler: Sampling, start: int, row: list[int]) -> None:
    """Gives the sampler an extend row of slot 0 with these tokens from position `start`."""
    none, one = np.empty(0, np.int32), np.zeros(1, np.int32)
    sampler.follow(BatchPlan(
        step_id=1, mode=ForwardMode.EXTEND, num_extend=1, slots=one, starts=one + start, num_tokens=one + len(row),
        input_ids=np.array(row, dtype=np.int32), sample=np.array([False]), mask_rows=none, prompt_logprob_rows=none,
        prompt_logprob_offsets=none, prompt_logprob_nexts=none, admitted=(), table_slots=none, table_firsts=none,
        table_counts=none, table_pages=none,
    ))  # fmt: skip


def edited(sampler: Sampling) -> list[float]:
    return sampler.edited(torch.linspace(-1, 1, VOCAB), 0, 0)


PROMPT = [1, 2, 3, 4, 1, 2]


@pytest.mark.by_day(one_in=2, seed=45)
@pytest.mark.parametrize(
    ("sampled", "start", "row", "sequence"),
    [
        ([], 0, [1, 2, 3], []),
        ([], 3, [4, 1, 2], []),
        ([5, 6], 8, [7, 8], [5, 6, 7, 8]),
        ([5, 6], 7, [6, 7, 8], [5, 6, 7, 8]),
        ([5, 6], 4, [1, 2, 5, 6, 7], [5, 6, 7]),
        ([5, 6], 7, [7, 8], [5, 7, 8]),
        ([5, 6, 9, 9], 7, [7], [5, 7]),
        ([5, 6, 9, 9], 7, [6], [5, 6]),
        ([5, 6], 6, [3, 4, 1, 2], [3, 4, 1, 2]),
        ([5], 7, [VOCAB + 3], [5, VOCAB - 1]),
    ],
    ids=[
        "prompt-chunk", "prompt-end", "forced", "sampled-then-forced", "from-the-prompt-on", "other-than-sampled",
        "other-and-stale", "stale-alone", "all-taken-back", "outside-the-vocabulary",
    ],
)  # fmt: skip
def test_extend_rows_of_a_running_slot_update_penalties(
    kernels: SampleKernels, sampled: list[int], start: int, row: list[int], sequence: list[int]
) -> None:
    sampler = penalised(kernels, PROMPT, [])
    for token in sampled:
        count(sampler, token)
    follow(sampler, start, row)
    assert edited(sampler) == edited(penalised(kernels, PROMPT, sequence))


@on_both_by_night
def test_penalties_count_a_chunked_prompt_once(kernels: SampleKernels) -> None:
    sampler, output = penalised(kernels, PROMPT, [7, 7]), [7, 7]
    for start in range(0, len(PROMPT) + 2, 2):
        follow(sampler, start, (PROMPT + output)[start : start + 2])
    assert edited(sampler) == edited(penalised(kernels, PROMPT, output))


@on_both_kernels
def test_logits_stay_finite_when_the_repetition_penalty_is_tiny(kernels: SampleKernels) -> None:
    params = replace(PENALISED, repetition_penalty=1e-44)
    assert np.isfinite(edited(penalised(kernels, [0], [39], params))).all()
