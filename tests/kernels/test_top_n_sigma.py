"""Checks top-n-sigma of each back end against numpy: the tokens that it leaves, alone and with other cuts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from rootstock_llm.kernels.contracts.sample_ops import SampleKernels
from rootstock_llm.kernels.cpu.build import built_library
from rootstock_llm.kernels.cpu.sampling import CpuSampling
from rootstock_llm.kernels.reference import sampling as sampling_reference
from rootstock_llm.kernels.triton.sampling.sampling import TritonSampling
from tests.all_pairs import each_pair
from tests.kernels.sampling_case import Row, SlotCase, rows_of, sampled, table_of, uniforms

HOT = 2.0**13  # a temperature at which tokens are about equally likely; a power of two, so that the division does not round
WIDE = 5000  # vocabulary with more tokens than a tile and than the candidates of a draw
NUMBERS = np.random.default_rng(3)
NOISE = NUMBERS.normal(size=300) * 3
MASKED = np.where(NUMBERS.random(300) < 0.3, -np.inf, NOISE)
FALLING = -np.sort(-NUMBERS.normal(size=WIDE))
INF = float("inf")


BACK_ENDS = ["cpp", "torch", "triton"]


@pytest.fixture(params=BACK_ENDS)
def back_end(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def drawn(back_end: str, logits: Tensor, rows: list[Row], case: list[SlotCase], device: torch.device) -> list[int]:
    number, vocab_size = logits.shape
    where = device if back_end == "triton" else torch.device("cpu")
    kernels: SampleKernels = sampling_reference
    if back_end != "torch":
        kernels = CpuSampling(built_library(), 2) if back_end == "cpp" else TritonSampling(number, vocab_size, device)
    written = sampled(kernels, logits, rows_of(rows, vocab_size), table_of(case, vocab_size), where)
    assert written.faults.tolist() == [0] * number
    found: list[int] = written.tokens.tolist()
    return found


def extremes(back_end: str, logits: Tensor, case: SlotCase, device: torch.device, row: Row | None = None) -> tuple[int, int]:
    """Returns the lowest and the highest id that can be drawn from a row whose tokens are about equally likely.

    Draws with two seeds: one whose uniform number is near 0, and one whose uniform number is near 1.
    """
    row = replace(row or Row(0), position=0)
    ends = uniforms(np.arange(1 << 15, dtype=np.uint64), np.zeros(1 << 15, dtype=np.int32))
    slots = [replace(case, seed=int(seed)) for seed in (ends.argmin(), ends.argmax())]
    first, last = drawn(back_end, logits.repeat(2, 1), [row, replace(row, slot=1)], slots, device)
    return first, last


def kept_by(logits: NDArray[np.float64], n: float) -> list[int]:
    """Returns the tokens that top-n-sigma keeps."""
    sigma = logits[np.isfinite(logits)].std()
    return np.flatnonzero(logits >= logits.max() - n * sigma).tolist()


def float32(values: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))[None]


ROWS = {
    "masked": MASKED,
    "tiny sigma far from 0": 1e4 + NOISE / 64,
    "outliers": np.where(np.arange(300) % 7, NOISE, -1e4),
    "large": -NOISE * 1e30,
    "wide": FALLING,
}


@pytest.mark.by_day(one_in=4, seed=30)
@each_pair(indirect=("back_end",), row=ROWS, n={"half": 0.5, "two": 2.0, "huge": 1e6}, back_end=BACK_ENDS)
def test_top_n_sigma_keeps_logits_near_the_maximum(
    row: NDArray[np.float64], n: float, back_end: str, device: torch.device
) -> None:
    """The logits fall as the ids rise and masked tokens come last, so the highest drawn id is the least likely kept token."""
    logits = -np.sort(-row.astype(np.float32)).astype(np.float64)
    kept = kept_by(logits, n) if n < 1e6 else np.flatnonzero(np.isfinite(logits)).tolist()
    hot = float(np.float32(np.ptp(logits[np.isfinite(logits)]))) * 64
    assert extremes(back_end, float32(logits), SlotCase(hot, top_n_sigma=n), device) == (0, kept[-1])


@pytest.mark.by_day(one_in=4, seed=1)
@each_pair(indirect=("back_end",), n=[0.5, 1.0, 2.0], temperature=[0.5, 1.0, 3.0], back_end=BACK_ENDS)
def test_sampled_tokens_match_the_cumulative_probability_of_the_kept_tokens(
    n: float, temperature: float, back_end: str, device: torch.device
) -> None:
    """Computes the expected token of each draw in float64 from the cumulative probabilities and the draw's uniform number.

    top-n-sigma keeps the same tokens at every temperature.
    """
    number, logits = (200 if back_end != "triton" or device.type == "cuda" else 4), MASKED.astype(np.float32).astype(np.float64)
    kept = kept_by(logits, n)
    mass = np.exp((logits[kept] - logits.max()) / temperature).cumsum()
    seeds = np.arange(number, dtype=np.uint64) * np.uint64(977)
    targets = uniforms(seeds, np.full(number, 10, dtype=np.int32)) * mass[-1]
    clear = np.abs(targets[:, None] - mass[None, :]).min(axis=1) > 1e-5 * mass[-1]
    expected = np.array(kept)[np.searchsorted(mass, targets, side="right")]
    slots = [SlotCase(temperature, top_n_sigma=n, seed=int(seed)) for seed in seeds]
    found = np.array(drawn(back_end, float32(logits).repeat(number, 1), [Row(slot) for slot in range(number)], slots, device))
    assert clear.sum() > 0.9 * number
    assert found[clear].tolist() == expected[clear].tolist()


@pytest.mark.by_day(one_in=4, seed=66)
@pytest.mark.parametrize(
    ("row", "n", "first", "last"),
    [
        ([2.5] * 9, 0.5, 0, 8),
        ([-INF, 1e30, -INF], 1.0, 1, 1),
        ([0.0, 1.0, 1.0, 0.0], 2.0, 0, 3),
        ([0.0, 1.0, 1.0, 0.0], 1.9999999, 1, 2),
        ([-INF, 4.0, -2.0, 0.0, -2.0, -INF], 2.4494896, 1, 4),
        ([-1e38, 1e38, 1e38, -1e38], 3.0, 1, 2),
    ],
    ids=["all equal", "one finite", "at the threshold", "just below the threshold", "with forbidden tokens", "widest"],
)
def test_top_n_sigma_keeps_all_equal_logits_at_the_threshold(
    row: list[float], n: float, first: int, last: int, back_end: str, device: torch.device
) -> None:
    """In the case `widest`, top-n-sigma also keeps the two lowest logits, but at this temperature their probability is 0."""
    hot = HOT if max(row) < 1e9 else 1.0
    assert extremes(back_end, torch.tensor([row]), SlotCase(hot, top_n_sigma=n), device) == (first, last)


def test_sigma_is_computed_from_the_edited_logits(back_end: str, device: torch.device) -> None:
    """A bias and a mask leave the logits 4, 2 and 0, whose standard deviation is 1.63."""
    logits, row = torch.tensor([[0.0, 4.0, -96.0, 60.0, -50.0, 7.0]]), Row(0, mask=[0, 1, 2])
    case = SlotCase(HOT, biases=((2, 98.0),))
    assert extremes(back_end, logits, replace(case, top_n_sigma=1.2), device, row) == (1, 1)
    assert extremes(back_end, logits, replace(case, top_n_sigma=1.3), device, row) == (1, 2)
    assert extremes(back_end, logits, replace(case, top_n_sigma=2.5), device, row) == (0, 2)


CUTS: dict[str, tuple[dict[str, float], float]] = {
    "few": ({"top_k": 3}, 3),
    "many": ({"top_k": 2500}, 2500),
    "top-k beyond it": ({"top_k": WIDE - 1}, 1.0),
    "half": ({"top_p": 0.5}, 0.5),
    "small nucleus": ({"top_p": 0.001}, 0.001),
    "both": ({"top_k": 2500, "top_p": 0.5}, 1250),
    "min-p": ({"min_p": 0.5}, 1.0),
}


@pytest.mark.by_day(one_in=4, seed=30)
@each_pair(indirect=("back_end",), cut=CUTS, n={"tight": 0.5, "loose": 4.0}, back_end=BACK_ENDS)
def test_other_cuts_apply_to_the_tokens_that_top_n_sigma_keeps(
    cut: tuple[dict[str, float], float], n: float, back_end: str, device: torch.device
) -> None:
    """At a high temperature, all kept tokens are about equally likely, so top-p keeps a share of about `top_p`.

    The least likely tokens have the highest ids.
    """
    cuts, share = cut
    logits = FALLING.astype(np.float32).astype(np.float64)
    kept = len(kept_by(logits, n))
    count = kept * share if isinstance(share, float) else min(kept, share)
    if cuts.keys() == {"top_k", "top_p"}:
        count = min(kept, 2500) * 0.5
    first, last = extremes(back_end, float32(logits), SlotCase(HOT, top_n_sigma=n, **cuts), device)  # type: ignore[arg-type]
    assert first == 0 and abs(last + 1 - count) <= (2 if "top_p" in cuts else 0), (last, count)


def test_top_n_sigma_does_not_change_the_greedy_token(back_end: str, device: torch.device) -> None:
    logits = float32(MASKED)
    assert drawn(back_end, logits, [Row(0)], [SlotCase(top_n_sigma=0.5)], device) == [int(MASKED.argmax())]


@pytest.mark.by_day(one_in=2, seed=10)
@pytest.mark.parametrize(
    ("back_end", "programs"), [("cpp", 528), ("torch", 528), ("triton", 528), ("triton", 1)], indirect=["back_end"]
)
def test_sampled_token_is_the_same_in_any_batch(
    programs: int, back_end: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rootstock_llm.kernels.triton.sampling.sampling.PROGRAMS", programs)
    row, case = float32(NUMBERS.permuted(FALLING)), SlotCase(0.7, top_n_sigma=1.0, seed=4)
    slots = [case, SlotCase(1.0, seed=4), SlotCase(), SlotCase(1.0, 20, top_n_sigma=0.5, seed=9)]
    alone = drawn(back_end, row, [Row(0)], slots, device)
    together = drawn(back_end, row.repeat(4, 1), [Row(slot) for slot in (3, 1, 0, 2)], slots, device)
    assert together[2:3] == alone
