"""Compares the executor's sampler, which runs the C++ kernels, with the torch reference, whose parameter columns the test builds.

Also checks faults, counts and padding of both.
"""

from __future__ import annotations

import random
from dataclasses import fields

import numpy as np
import pytest
import torch

from rootstock_llm.kernels.contracts.row_fault import RowFault
from rootstock_llm.kernels.contracts.sample_ops import MAX_COUNT, SEEN, Measured, SampleKernels
from rootstock_llm.kernels.cpu.build import built_library
from rootstock_llm.kernels.cpu.sampling import CpuSampling
from rootstock_llm.kernels.reference import sampling as sampling_reference
from rootstock_llm.services.worker.core.contracts.plan import DryParams, SamplingParams, SlotParams
from rootstock_llm.services.worker.exec.sampling.dry import Repeats
from rootstock_llm.services.worker.exec.sampling.slots import token_words
from tests.all_pairs import each_pair, each_value
from tests.exec.sampling import Sampling, sample_kernels
from tests.kernels.sampling_case import ALWAYS, Row, SlotCase, random_cuts, rows_of, sampled, table_of, uniforms

CPU = torch.device("cpu")
SLOTS, STEPS, PROMPT = 40, 10, 5


@pytest.fixture(params=["cpp", "torch"])
def kernels(request: pytest.FixtureRequest) -> SampleKernels:
    return sample_kernels(request.param)


def random_params(chance: random.Random, vocab_size: int) -> SamplingParams:
    some = [chance.randrange(vocab_size) for _ in range(chance.randrange(1, 6))]
    penalized = chance.random() < 0.4
    return SamplingParams(
        max_new_tokens=99,
        **random_cuts(chance, vocab_size),
        repetition_penalty=chance.choice([1.0, 1.25, 0.5]) if penalized else 1.0,
        frequency_penalty=chance.choice([0.0, 0.5, -0.25]) if penalized else 0.0,
        presence_penalty=chance.choice([0.0, 0.75]) if penalized else 0.0,
        logit_bias=tuple((token, chance.choice([1.5, -2.0, 1.5])) for token in some + some) if chance.random() < 0.2 else (),
        allowed_token_ids=tuple(some) if chance.random() < 0.2 else (),
        banned_token_ids=tuple(some[:2]) if chance.random() < 0.2 else (),
        min_new_tokens=chance.choice([0, 0, 3]),
    )


def case_of(slot: SlotParams, vocab_size: int) -> SlotCase:
    params, history = slot.params, slot.history.tolist()
    outputs = history[slot.num_prompt_tokens :]
    limited = params.allowed_token_ids or params.banned_token_ids
    words = token_words(params.allowed_token_ids, params.banned_token_ids, vocab_size)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return SlotCase(
        **{field.name: getattr(params, field.name) for field in fields(SlotCase) if hasattr(params, field.name)},
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        biases=params.logit_bias,
        stops=slot.stop_token_ids,
        stopped_until=slot.num_prompt_tokens + params.min_new_tokens if params.min_new_tokens else 0,
        counted=bool(params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty),
        seen=tuple(history[: slot.num_prompt_tokens]),
        outputs={token: outputs.count(token) for token in outputs},
        allowed=np.flatnonzero(bits).tolist() if limited else None,
    )


@pytest.mark.by_day(one_in=5, seed=2)
@pytest.mark.parametrize("kernels", ["cpp"], indirect=True)
@each_value(vocab_size=[1, 33, 257, 1000, 258], tied={"distinct": False, "tied": True})
def test_sampler_samples_the_same_tokens_as_the_reference(kernels: SampleKernels, vocab_size: int, tied: bool) -> None:
    """Runs the same steps in the sampler with C++ kernels, and in the reference with columns that the test makes."""
    chance, numbers = random.Random(vocab_size), np.random.default_rng(vocab_size)
    sampler, slots = Sampling(SLOTS, vocab_size, kernels), []
    for index in range(SLOTS):
        history = numbers.integers(0, vocab_size, PROMPT + chance.randrange(4)).astype(np.int32)
        stops = (chance.randrange(vocab_size), chance.randrange(vocab_size))
        slots.append(SlotParams(index, PROMPT, random_params(chance, vocab_size), stops, history))
        sampler.admit(slots[-1])
    table = table_of([case_of(slot, vocab_size) for slot in slots], vocab_size)
    faults = 0
    for step in range(STEPS):
        order = numbers.permutation(SLOTS).astype(np.int32)
        logits = torch.from_numpy(numbers.normal(size=(SLOTS, vocab_size)).astype(np.float32) * 3)
        if tied:
            logits = logits.round()
        logits[numbers.random(logits.shape) < 0.1] = -torch.inf
        masks = {row: numbers.random(vocab_size) < chance.choice([0.0, 0.01, 0.5]) for row in range(0, SLOTS, 5)}
        positions = np.full(SLOTS, PROMPT + step, dtype=np.int32)
        words = {row: token_words(np.flatnonzero(bits).tolist() or [vocab_size], (), vocab_size) for row, bits in masks.items()}
        expected = sampler.sample(logits, order, positions, words)
        rows = [
            Row(int(slot), PROMPT + step, np.flatnonzero(masks[row]).tolist() if row in masks else None)
            for row, slot in enumerate(order)
        ]
        written = sampled(sampling_reference, logits, rows_of(rows, vocab_size), table, CPU)
        assert written.tokens.tolist() == expected.tokens.tolist()
        found = {row: RowFault(fault) for row, fault in enumerate(written.faults.tolist()) if fault}
        assert found == expected.faults
        sound = [row for row in range(SLOTS) if row not in found]
        assert written.relay[torch.from_numpy(order)[sound].long()].tolist() == expected.tokens[sound].tolist()
        table.counts.copy_(written.counts)
        faults += len(found)
    assert faults > 0, "some rows had no allowed token"


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("kernels", ["cpp"], indirect=True)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampler_passes_dry_penalties_to_the_kernels(kernels: SampleKernels, temperature: float) -> None:
    dry, history = DryParams(multiplier=2.0, allowed_length=1), np.array([3, 1, 2, 3, 1], dtype=np.int32)
    params = SamplingParams(9, temperature=temperature, seed=7, dry=dry)
    ids, lost = Repeats(dry, history.astype(np.int64)).penalties()
    losses = dict(zip(ids.tolist(), lost.tolist(), strict=True))
    assert losses.keys() == {2}
    table = table_of([SlotCase(temperature, seed=7)], 8)
    logits = torch.tensor([[0.0, 0.1, 2.0, 0.2, 0.3, 1.0, 0.4, 0.5]])
    for position in range(5, 25):
        written = sampled(sampling_reference, logits, rows_of([Row(0, position, losses=losses)], 8), table, CPU)
        fresh = Sampling(1, 8, kernels)
        fresh.admit(SlotParams(0, 5, params, (), history))
        found = fresh.sample(logits, np.array([0], np.int32), np.array([position], np.int32))
        assert written.tokens.tolist() == found.tokens.tolist()


@pytest.mark.by_day(one_in=2, seed=13)
@each_pair(
    indirect=("kernels",),
    kernels=["cpp", "torch"],
    case={"greedy": SlotCase(), "draw": SlotCase(1.0), "edited": SlotCase(1.0, biases=((1, 2.0),))},
    poison=[torch.nan, torch.inf],
)
def test_token_selection_reports_faults(kernels: SampleKernels, case: SlotCase, poison: float) -> None:
    logits = torch.zeros((3, 8))
    logits[0, 3] = poison
    rows = rows_of([Row(0), Row(1, mask=[]), Row(2, mask=[5])], 8)
    written = sampled(kernels, logits, rows, table_of([case] * 3, 8), CPU)
    assert written.faults.tolist() == [RowFault.NAN_LOGITS, RowFault.NO_TOKEN_ALLOWED, 0]
    assert written.tokens.tolist() == [0, 0, 5] and written.relay.tolist() == [-1, -1, 5]


def test_uniform_random_numbers_are_equal_in_cpp_and_python() -> None:
    """C++ and Python are compared here, Triton in test_triton_select_tokens."""
    numbers = np.random.default_rng(1)
    seeds = np.append(numbers.integers(0, 1 << 64, 200, dtype=np.uint64), np.array([0, 1 << 63, 2**64 - 1], dtype=np.uint64))
    positions = np.append(numbers.integers(0, ALWAYS, 202), ALWAYS).astype(np.int32)
    cpp = CpuSampling(built_library(), 1)
    found = cpp.uniforms(torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(positions))
    assert found.tolist() == uniforms(seeds, positions).tolist()


def test_token_selection_stops_counting_at_max_count(kernels: SampleKernels) -> None:
    table = table_of([SlotCase(counted=True, seen=(2,), outputs={2: MAX_COUNT}), SlotCase(counted=True), SlotCase()], 4)
    written = sampled(kernels, torch.tensor([[0.0, 0, 9, 0]] * 3), rows_of([Row(0), Row(1), Row(2)], 4), table, CPU)
    assert written.counts.tolist() == [[0, 0, SEEN | MAX_COUNT, 0], [0, 0, 1, 0], [0, 0, 0, 0]]


def test_token_selection_skips_padding_rows(kernels: SampleKernels) -> None:
    written = sampled(kernels, torch.full((2, 4), torch.nan), rows_of([Row(-1), Row(-1)], 4), table_of([SlotCase()], 4), CPU)
    assert written.tokens.tolist() == written.faults.tolist() == [0, 0]
    assert written.relay.tolist() == [-1] and (written.edited == 777).all()


@pytest.mark.by_day(one_in=3, seed=3)
@pytest.mark.parametrize(("vocab_size", "num_top"), [(3, 5), (40, 7), (40, 0)])
def test_measured_logprobs_match_log_softmax(kernels: SampleKernels, vocab_size: int, num_top: int) -> None:
    logits = torch.randn((4, vocab_size), generator=torch.Generator().manual_seed(3)).mul(2).round()
    out = Measured(torch.zeros(3), torch.full((3, num_top), 9, dtype=torch.int32), torch.zeros(3, num_top), torch.zeros(3))
    tokens = torch.tensor([1, 2, vocab_size], dtype=torch.int32)
    kernels.measure_logprobs(out, logits, tokens, torch.tensor([3, -1, 0], dtype=torch.int32))
    chances = logits.log_softmax(-1)
    assert out.own.tolist() == pytest.approx([float(chances[3, 1]), 0.0, -torch.inf], abs=1e-6)
    assert out.mass[0] == pytest.approx(float(logits[3].logsumexp(0)), abs=1e-6)
    order = sorted(range(vocab_size), key=lambda token: (-float(logits[3, token]), token))[:num_top]
    assert out.top_ids[0].tolist() == order + [-1] * (num_top - len(order))
    expected = [float(chances[3, token]) for token in order] + [-torch.inf] * (num_top - len(order))
    assert out.top[0].tolist() == pytest.approx(expected, abs=1e-6)
