"""Compares select_tokens in Triton with the torch reference.

Sums of probabilities are rounded differently: the kernel's exp is float32 in steps of 2 ** -44, and the reference's cuts use
float64. So a drawn token or the end of a nucleus may differ, but only within 2e-6 of a boundary between two tokens, and rarely.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from rootstock_llm.kernels.contracts.row_fault import RowFault
from rootstock_llm.kernels.contracts.sample_ops import MAX_COUNT, SEEN
from rootstock_llm.kernels.reference import sampling as sampling_reference
from rootstock_llm.kernels.triton.sampling.sampling import TritonSampling
from rootstock_llm.kernels.triton.sampling.select_keys import MAX_VOCAB, uniform_of
from tests.all_pairs import each_value
from tests.kernels.sampling_case import Row, SlotCase, Written, could_be, random_cuts, rows_of, sampled, table_of, uniforms
from tests.night import NIGHTLY

WIDE = 5000  # vocabulary with more tokens than a draw has candidates


def compared(logits: Tensor, rows: list[Row], case: list[SlotCase], device: torch.device) -> tuple[Written, int]:
    """Returns the results of the kernels, and the number of rows whose token differs from the reference's.

    Fails if rounding cannot explain such a token.
    """
    vocab_size = logits.shape[1]
    columns, table = rows_of(rows, vocab_size), table_of(case, vocab_size)
    found = sampled(TritonSampling(len(rows), vocab_size, device), logits, columns, table, device)
    expected = sampled(sampling_reference, logits, columns, table, device)
    assert found.faults.tolist() == expected.faults.tolist()
    different = (found.tokens != expected.tokens).nonzero().flatten().tolist()
    for row in different:
        mine, slot = case[rows[row].slot], rows[row].slot
        source = expected.edited[row] if mine.edited or rows[row].mask is not None else logits[row]
        assert int(found.tokens[row]) in could_be(source, mine, rows[row].position), (row, mine)
        expected.relay[slot] = found.relay[slot]
        expected.counts[slot] = found.counts[slot]
    assert found.relay.equal(expected.relay) and found.counts.equal(expected.counts)
    return found, len(different)


def assert_as_reference(logits: Tensor, rows: list[Row], case: list[SlotCase], device: torch.device) -> Written:
    found, different = compared(logits, rows, case, device)
    assert different == 0
    return found


def same_slots(case: SlotCase, number: int) -> tuple[list[Row], list[SlotCase]]:
    """Returns rows and slots that differ in their seeds only."""
    return [Row(slot, slot) for slot in range(number)], [replace(case, seed=1 + 977 * slot) for slot in range(number)]


def noise(rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    return torch.randn((rows, vocab_size), generator=torch.Generator().manual_seed(seed))


def random_asked(chance: random.Random, vocab_size: int) -> SlotCase:
    return SlotCase(
        **random_cuts(chance, vocab_size),
        counted=chance.random() < 0.3,
        presence=1.0,
        outputs={chance.randrange(vocab_size): 3},
    )


@pytest.mark.by_day(one_in=2)
@each_value(vocab_size=[1, 33, 257, 1000, 300], kind=["tied", "distinct"])
def test_token_selection_samples_the_same_tokens_as_the_reference(vocab_size: int, kind: str, device: torch.device) -> None:
    number = 4000 if device.type == "cuda" else 7
    chance = random.Random(f"{vocab_size}{kind}")
    logits = noise(number, vocab_size, vocab_size) * 3
    logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(5)) < 0.1] = -torch.inf
    logits[:, vocab_size // 2] = 1.0  # at least one token is finite
    case = [random_asked(chance, vocab_size) for _ in range(number)]
    rows = [Row(slot, chance.randrange(1 << 20)) for slot in chance.sample(range(number), number)]
    for index in range(0, number, 6):
        rows[index] = replace(rows[index], mask=sorted({chance.randrange(vocab_size) for _ in range(1 + vocab_size // 3)}))
    _, different = compared(logits.round() if kind == "tied" else logits, rows, case, device)
    assert different <= number // 500


CUTS = {
    "whole": SlotCase(1.0),
    "min-p": SlotCase(1.0, min_p=0.2),
    "few": SlotCase(1.0, top_k=40),
    "many": SlotCase(1.0, top_k=3000),
    "many cut further": SlotCase(0.5, top_k=3000, top_p=0.7, min_p=0.01),
    "flat nucleus": SlotCase(1.0, top_p=0.95),
    "flat nucleus cut further": SlotCase(1.0, top_p=0.95, min_p=0.05),
    "small nucleus": SlotCase(0.1, top_p=0.9),
}


@pytest.mark.by_day(one_in=3, seed=92)
@each_value(case=CUTS, rounded={"float32": False, "bfloat16": True})
def test_token_selection_samples_the_same_tokens_as_the_reference_for_a_wide_vocabulary(
    case: SlotCase, rounded: bool, device: torch.device
) -> None:
    number = 2000 if device.type == "cuda" else 1 if rounded else 2
    rows, slots = same_slots(case, number)
    logits = noise(number, WIDE, 7)
    _, different = compared(logits.bfloat16().float() if rounded else logits, rows, slots, device)
    assert different <= number // 100


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize(
    "case",
    [SlotCase(1.0), SlotCase(1.0, top_k=3), SlotCase(1.0, top_p=0.5), SlotCase(1.0, top_k=2500, top_p=0.5)],
    ids=["whole", "top-k", "top-p", "both"],
)
def test_token_selection_keeps_the_lowest_ids_among_equal_logits(case: SlotCase, device: torch.device) -> None:
    rows, slots = same_slots(case, 40 if device.type == "cuda" else 2)
    written, different = compared(torch.zeros(len(rows), WIDE), rows, slots, device)
    # A GPU sums the float masses in another order than the reference, so the sum may reach one half one token later.
    assert different == 0 or (device.type == "cuda" and case.top_p < 1.0 and case.top_k < 0)
    assert int(written.tokens.max()) < {-1: WIDE * case.top_p, 3: 3, 2500: 1250}[case.top_k]


def seed_near(end: float) -> int:
    """Returns a seed whose uniform number at position 0 differs from `end` by less than 1 / 4096."""
    seeds = np.arange(1 << 15, dtype=np.uint64)
    return int(np.abs(uniforms(seeds, np.zeros(len(seeds), dtype=np.int32)) - end).argmin())


def stepped(size: int, *steps: tuple[int, float]) -> Tensor:
    """Returns float32[1, size]: 0 up to the first step, then the value of the latest step."""
    logits = torch.zeros((1, size))
    for first, value in steps:
        logits[:, first:] = value
    return logits


@pytest.mark.by_day(one_in=2, seed=4)
@pytest.mark.parametrize(
    ("logits", "case", "first", "last"),
    [
        (stepped(10), SlotCase(1.0, top_k=3), 0, 2),
        (stepped(10), SlotCase(1.0, top_p=0.55), 0, 5),
        (stepped(10, (7, 1.0)), SlotCase(1.0, top_k=5), 0, 9),
        (stepped(10, (2, 1.0), (8, 0.0)), SlotCase(1.0, top_k=9, top_p=0.5), 2, 5),
        (stepped(WIDE), SlotCase(1.0), 0, WIDE - 1),
        (stepped(WIDE, (4990, 0.125)), SlotCase(1.0, top_k=2200), 0, WIDE - 1),
        (stepped(WIDE, (2500, -0.5)), SlotCase(1.0, top_k=2100), 0, 2099),
        (stepped(WIDE), SlotCase(1.0, top_p=0.5001), 0, 2500),
    ],
    ids=["top-k", "top-p", "likelier ones last", "both", "whole", "likelier ones last of many", "two values", "half and one"],
)  # fmt: skip
def test_token_selection_can_draw_the_first_and_the_last_kept_token(
    logits: Tensor, case: SlotCase, first: int, last: int, device: torch.device
) -> None:
    slots = [replace(case, seed=seed_near(end)) for end in (0.0, 1.0)]
    written = assert_as_reference(logits.repeat(2, 1), [Row(0, 0), Row(1, 0)], slots, device)
    assert written.tokens.tolist() == [first, last]


@pytest.mark.by_day(one_in=4, seed=2)
@pytest.mark.parametrize("case", [SlotCase(), SlotCase(1.0, top_k=30), SlotCase(1.0), SlotCase(1.0, top_p=0.9)])
def test_token_selection_does_not_depend_on_the_number_of_programs(
    case: SlotCase, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single program then reads all tiles of its row. The logits have two values, so that equal logits are in several tiles."""
    rows, slots = same_slots(case, 2)
    logits = noise(2, WIDE, 13).sign()
    many = assert_as_reference(logits, rows, slots, device)
    monkeypatch.setattr("rootstock_llm.kernels.triton.sampling.sampling.PROGRAMS", 1)
    assert assert_as_reference(logits, rows, slots, device).tokens.equal(many.tokens)


@pytest.mark.by_day(one_in=2, seed=6)
@pytest.mark.parametrize("vocab_size", [1, 33, 2049, 40001])
def test_greedy_selection_takes_the_lowest_id_of_the_maximum(vocab_size: int, device: torch.device) -> None:
    logits = noise(4, vocab_size, 3).round()
    logits[3] = -torch.inf
    logits[3, -1] = -1e30
    written = assert_as_reference(logits, [Row(slot) for slot in range(4)], [SlotCase()] * 4, device)
    assert written.tokens.tolist() == [row.tolist().index(max(row.tolist())) for row in logits]


@pytest.mark.by_day(one_in=4)
@pytest.mark.parametrize("case", [SlotCase(1e-9), SlotCase(1.0, top_k=1), SlotCase(1.0, top_p=0.0), SlotCase(1.0, min_p=1.0)])
def test_token_selection_takes_the_maximum_when_the_cuts_leave_one_token(case: SlotCase, device: torch.device) -> None:
    logits = torch.tensor([[1e4, -1e4, 1e4 + 1, 3e4, -torch.inf, 9999.0]])
    assert assert_as_reference(logits, [Row(0)], [case], device).tokens.tolist() == [3]


@pytest.mark.by_day(one_in=4, seed=6)
@pytest.mark.parametrize("case", [SlotCase(), SlotCase(0.8, 20, 0.9), SlotCase(0.8), SlotCase(0.8, top_p=0.9)])
def test_token_selection_reports_a_fault_when_no_token_is_allowed(case: SlotCase, device: torch.device) -> None:
    rows = [Row(0, mask=[2100]), Row(1, mask=[]), Row(2), Row(3)]
    slots = [case, case, replace(case, allowed=[7]), replace(case, allowed=[7], stops=(7,), stopped_until=99)]
    written = assert_as_reference(noise(4, 2200), rows, slots, device)
    assert written.tokens.tolist() == [2100, 0, 7, 0]
    assert written.faults.tolist() == [0, RowFault.NO_TOKEN_ALLOWED, 0, RowFault.NO_TOKEN_ALLOWED]
    assert written.relay.tolist() == [2100, -1, 7, -1]


@pytest.mark.by_day(one_in=5, seed=1)
@each_value(
    case={
        "greedy": SlotCase(),
        "few": SlotCase(1.0, 5, 0.9),
        "nucleus": SlotCase(1.0, top_p=0.9),
        "whole": SlotCase(1.0),
        "edited": SlotCase(1.0, allowed=[3]),
    },
    poison=[torch.nan, torch.inf],
)
def test_token_selection_reports_nan_logits_of_each_row(case: SlotCase, poison: float, device: torch.device) -> None:
    logits = noise(3, 2100)
    logits[0, 2077], logits[1] = poison, -torch.inf
    written = assert_as_reference(logits, [Row(slot) for slot in range(3)], [case, case, SlotCase()], device)
    assert written.faults.tolist() == [RowFault.NAN_LOGITS, RowFault.NAN_LOGITS, 0]
    assert written.relay.tolist()[:2] == [-1, -1] and int(written.relay[2]) == int(logits[2].argmax())


def test_token_selection_skips_padding_rows(device: torch.device) -> None:
    logits = torch.full((3, 50), torch.nan)
    logits[1] = noise(1, 50)[0]
    written = assert_as_reference(logits, [Row(-1), Row(1), Row(-1)], [SlotCase(1.0, counted=True), SlotCase()], device)
    assert written.faults.tolist() == [0, 0, 0] and written.tokens.tolist()[::2] == [0, 0]
    assert int(written.relay[0]) == -1 and not written.counts.any()


def test_token_selection_stops_counting_at_max_count(device: torch.device) -> None:
    logits = torch.zeros((4, 40))
    logits[:, 33] = 9.0
    slots = [
        SlotCase(counted=True, outputs={33: MAX_COUNT}),
        SlotCase(counted=True, seen=(33,), outputs={33: MAX_COUNT}),
        SlotCase(counted=True, seen=(33,), outputs={33: MAX_COUNT - 1}),
        SlotCase(outputs={33: 5}),
    ]
    written = assert_as_reference(logits, [Row(slot) for slot in (3, 1, 0, 2)], slots, device)
    assert written.counts[:, 33].tolist() == [MAX_COUNT, SEEN | MAX_COUNT, SEEN | MAX_COUNT, 5]
    assert int((written.counts != 0).sum()) == 4


def test_token_selection_draws_the_same_token_in_any_batch(device: torch.device) -> None:
    logits = noise(1, 2300, 9).repeat(9, 1)
    case = [SlotCase(1.0, seed=3), SlotCase(0.7, 20, 0.9, seed=4), SlotCase(1.0, top_p=0.99, seed=5)]
    alone = [int(compared(logits[:1], [Row(slot, 6)], case, device)[0].tokens[0]) for slot in range(3)]
    slots = case + [SlotCase()] * 6
    together = compared(logits, [Row(slot, 6) for slot in (8, 2, 7, 0, 6, 5, 1, 4, 3)], slots, device)[0].tokens
    assert together[[3, 6, 1]].tolist() == alone


@pytest.mark.skipif(not NIGHTLY, reason="takes half a minute; runs only with ROOTSTOCK_TEST_NIGHTLY=1")
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_token_selection_draws_from_equal_tokens_of_the_largest_vocabulary(top_p: float, device: torch.device) -> None:
    """The sum of all masses is the largest that an int64 must hold. The reference may round the nucleus to one token more."""
    rows, slots = [Row(0, position=0)], [SlotCase(1.0, top_p=top_p, seed=seed_near(1.0))]
    found, _ = compared(torch.zeros(1, MAX_VOCAB), rows, slots, device)
    assert 0.999 < int(found.tokens[0]) / (MAX_VOCAB * top_p) < 1.0


def test_triton_sampling_supports_the_vocabulary_of_gemma_3(device: torch.device) -> None:
    assert MAX_VOCAB >= 262_208
    TritonSampling(1, MAX_VOCAB, device)  # allocates the scratch memory


def test_scratch_memory_keeps_no_state_between_calls(device: torch.device) -> None:
    kernels, table = TritonSampling(4, WIDE, device), table_of([SlotCase(1.0, top_p=0.9, seed=5), SlotCase(0.5, 9, seed=6)], WIDE)
    rows, logits = rows_of([Row(0), Row(1)], WIDE), noise(2, WIDE, 11)
    first = sampled(kernels, logits, rows, table, device)
    sampled(kernels, logits.flip(1) * 2, rows, table, device)
    assert sampled(kernels, logits, rows, table, device).tokens.equal(first.tokens)


@pytest.mark.parametrize("size", [0, MAX_VOCAB + 1])
def test_triton_sampling_rejects_an_unsupported_vocabulary_size(size: int, device: torch.device) -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        TritonSampling(1, size, device)


def test_token_selection_rejects_more_rows_than_the_scratch_memory(device: torch.device) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        sampled(TritonSampling(1, 8, device), noise(2, 8), rows_of([Row(0), Row(1)], 8), table_of([SlotCase()] * 2, 8), device)


@triton.jit
def uniforms_kernel(out, lows, highs, positions, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    tl.store(out + lanes, uniform_of(tl.load(lows + lanes), tl.load(highs + lanes), tl.load(positions + lanes)))


def test_uniform_random_numbers_match_the_reference(device: torch.device) -> None:
    numbers = np.random.default_rng(1)
    seeds = numbers.integers(0, 1 << 64, 1024, dtype=np.uint64)
    seeds[:3] = 0, 2**64 - 1, 2**63
    positions = numbers.integers(0, 1 << 31, 1024).astype(np.int32)
    halves = torch.from_numpy(seeds.view(np.int32).reshape(-1, 2).copy()).to(device)
    out = torch.empty(1024, dtype=torch.float64, device=device)
    low, high = (halves[:, half].contiguous() for half in range(2))
    uniforms_kernel[(1,)](out, low, high, torch.from_numpy(positions).to(device), 1024)
    assert out.tolist() == uniforms(seeds, positions).tolist()
