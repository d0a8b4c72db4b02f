"""Compares edit_logits in Triton and in C++ with the torch reference, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from rootstock_llm.kernels.contracts.sample_ops import MAX_COUNT
from rootstock_llm.kernels.cpu.build import built_library
from rootstock_llm.kernels.cpu.sampling import CpuSampling
from rootstock_llm.kernels.reference import sampling as sampling_reference
from rootstock_llm.kernels.triton.sampling import edit_logits
from tests.kernels.sampling_case import POISON, Row, SlotCase, on_device, rows_of, table_of

CPU = torch.device("cpu")
LARGEST = torch.finfo(torch.float32).max


@pytest.fixture(params=["triton"] if torch.cuda.is_available() else ["triton", "cpp"])
def editing(request: pytest.FixtureRequest) -> object:
    return edit_logits if request.param == "triton" else CpuSampling(built_library(), 2)


def edited(kernels: object, logits: torch.Tensor, rows: list[Row], case: list[SlotCase], device: torch.device) -> torch.Tensor:
    vocab_size = logits.shape[1]
    out = torch.full(logits.shape, POISON, device=device)
    table, columns = on_device(table_of(case, vocab_size), device), on_device(rows_of(rows, vocab_size), device)
    kernels.edit_logits(out, logits.to(device), columns, table)  # type: ignore[attr-defined]
    return out.cpu()


def assert_as_reference(
    kernels: object, logits: torch.Tensor, rows: list[Row], case: list[SlotCase], device: torch.device
) -> torch.Tensor:
    found, expected = (
        edited(each, logits, rows, case, device if each is kernels else CPU) for each in (kernels, sampling_reference)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    return found


def random_asked(chance: random.Random, vocab_size: int) -> SlotCase:
    tokens = [chance.randrange(vocab_size) for _ in range(12)]
    return SlotCase(
        repetition=chance.choice([1.0, 1.3, 0.7]),
        frequency=chance.choice([0.0, 0.3, -0.1]),
        presence=chance.choice([0.0, 0.7]),
        counted=chance.random() < 0.6,
        seen=tuple(tokens[:6]),
        outputs={token: chance.choice([1, 2, 77, MAX_COUNT]) for token in tokens[3:]},
        biases=tuple((token, chance.uniform(-3, 3)) for token in dict.fromkeys(tokens[:4])) if chance.random() < 0.5 else (),
        stops=tuple(tokens[2:5]),
        stopped_until=chance.choice([0, 10, 11]),
        allowed=sorted({chance.randrange(vocab_size) for _ in range(vocab_size)}) if chance.random() < 0.4 else None,
    )


@pytest.mark.by_day(one_in=2, seed=92)
@pytest.mark.parametrize("vocab_size", [1, 31, 257, 4096, 5001])
def test_logit_editing_matches_the_reference(editing: object, vocab_size: int, device: torch.device) -> None:
    chance = random.Random(vocab_size)
    case = [random_asked(chance, vocab_size) for _ in range(12)]
    logits = torch.randn((13, vocab_size), generator=torch.Generator().manual_seed(1)) * 5
    logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(2)) < 0.05] = -torch.inf
    rows = [Row(-1)]
    for slot in chance.sample(range(12), 12):
        mask = sorted({chance.randrange(vocab_size) for _ in range(vocab_size)}) if chance.random() < 0.4 else None
        lost = chance.sample(range(vocab_size), min(vocab_size, 9)) if chance.random() < 0.4 else []
        rows.append(Row(slot, 10, mask, {token: chance.uniform(0, 9) for token in lost}))
    found = assert_as_reference(editing, logits, rows, case, device)
    assert (found[0] == POISON).all(), "padding is not written"


@pytest.mark.by_day(one_in=2, seed=5)
@pytest.mark.parametrize(
    ("case", "row"),
    [
        (SlotCase(0.7, top_k=5), Row(0)),
        (SlotCase(stops=(1,), stopped_until=10), Row(0, 10)),
        (SlotCase(biases=((1, 1.0),)), Row(-1, 10)),
    ],
    ids=["nothing case", "stop tokens may come", "padding"],
)
def test_logit_editing_skips_rows_without_edits(editing: object, case: SlotCase, row: Row, device: torch.device) -> None:
    assert (assert_as_reference(editing, torch.randn(1, 70), [row], [case], device) == POISON).all()


def test_logit_editing_adds_all_biases_of_a_token(editing: object, device: torch.device) -> None:
    biases = tuple((token, 0.5) for token in (3, 4, 3, 5000) * 35)
    found = assert_as_reference(editing, torch.ones(1, 5001), [Row(0)], [SlotCase(biases=biases)], device)
    assert found[0, [2, 3, 4, 5000]].tolist() == [1.0, 36.0, 18.5, 18.5]


def test_logit_editing_keeps_forbidden_tokens_at_minus_infinity(editing: object, device: torch.device) -> None:
    case = SlotCase(biases=((1, 50.0), (2, 50.0), (3, 50.0)), stops=(1, 5), stopped_until=11, allowed=[0, 1, 3, 4, 5])
    found = assert_as_reference(editing, torch.zeros(1, 6), [Row(0, 10, mask=[0, 1, 2, 5])], [case], device)
    assert found[0].tolist() == [0.0, *[-torch.inf] * 5]


def test_logit_editing_subtracts_penalties_of_more_than_one_block(editing: object, device: torch.device) -> None:
    losses = {token: 0.25 * token for token in range(0, 900, 3)}
    found = assert_as_reference(editing, torch.zeros(2, 900), [Row(0), Row(1, losses=losses)], [SlotCase()] * 2, device)
    assert found[1, 897] == -0.25 * 897 and found[1, 898] == 0


@pytest.mark.by_day(one_in=2)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("repetition", [1e-30, 1e30])
def test_logit_editing_keeps_finite_logits_finite(editing: object, repetition: float, device: torch.device) -> None:
    logits = torch.tensor([[LARGEST, -LARGEST, 1e30, -1e30, 0.0, -torch.inf, torch.nan, torch.inf]])
    case = SlotCase(repetition=repetition, counted=True, seen=tuple(range(8)))
    found = assert_as_reference(editing, logits, [Row(0)], [case], device)
    assert found[0, :5].isfinite().all() and found[0, 5] == -torch.inf
