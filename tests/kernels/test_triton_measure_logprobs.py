"""Compares measure_logprobs in Triton with the torch reference: the same top tokens, and numbers within float32 rounding."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.sample_ops import Measured
from rootstock_llm.kernels.reference import sampling
from rootstock_llm.kernels.triton.sampling.sampling import TritonSampling

POISON = 55


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def poisoned(rows: int, num_top: int) -> Measured:
    top_ids = torch.full((rows, num_top), POISON, dtype=torch.int32)
    return Measured(torch.full((rows,), 55.0), top_ids, torch.full((rows, num_top), 55.0), torch.full((rows,), 55.0))


def measured(logits: Tensor, tokens: Tensor, rows: Tensor, num_top: int, device: torch.device, max_rows: int) -> Measured:
    out = poisoned(len(rows), num_top)
    device_out = Measured(*(getattr(out, name.name).to(device) for name in fields(out)))
    TritonSampling(max_rows, logits.shape[1], device).measure_logprobs(
        device_out, logits.to(device), tokens.to(device), rows.to(device)
    )
    return Measured(*(getattr(device_out, name.name).cpu() for name in fields(out)))


def assert_as_reference(
    logits: Tensor, tokens: Tensor, rows: Tensor, num_top: int, device: torch.device, max_rows: int = 8
) -> Measured:
    found, expected = measured(logits, tokens, rows, num_top, device, max_rows), poisoned(len(rows), num_top)
    sampling.measure_logprobs(expected, logits, tokens, rows)
    assert found.top_ids.equal(expected.top_ids)
    for name in ("own", "top", "mass"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=2e-6, atol=1e-5)
    return found


@pytest.mark.by_day(one_in=4, seed=20)
@pytest.mark.parametrize("vocab_size", [1, 33, 2048, 8193])
@pytest.mark.parametrize("num_top", [0, 1, 5, 32])
def test_measured_logprobs_match_the_reference(vocab_size: int, num_top: int, device: torch.device) -> None:
    logits = torch.randn((3, vocab_size), generator=torch.Generator().manual_seed(vocab_size)) * 4
    assert_as_reference(logits, ints(0, vocab_size - 1, vocab_size // 2), ints(2, 0, 1), num_top, device)


def test_measured_top_logprobs_are_ordered_by_token_id_when_equal(device: torch.device) -> None:
    logits = torch.zeros(1, 9000)
    logits[0, [8500, 17, 4000]] = torch.tensor([1.0, 1.0, 2.0])
    logits[0, 5] = -0.0
    assert assert_as_reference(logits, ints(3), ints(0), 10, device).top_ids[0].tolist() == [4000, 17, 8500, 0, 1, 2, 3, 4, 5, 6]


def test_measured_top_logprobs_have_impossible_tokens_last(device: torch.device) -> None:
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [7, 290]] = torch.tensor([-1e30, -1e30])
    assert assert_as_reference(logits, ints(8), ints(0), 4, device).top_ids[0].tolist() == [7, 290, 0, 1]


def test_measured_logprob_is_minus_infinity_when_the_token_is_outside_the_vocabulary(device: torch.device) -> None:
    found = assert_as_reference(torch.zeros(2, 40), ints(-1, 40), ints(0, 1), 0, device)
    assert found.own.tolist() == [-torch.inf, -torch.inf]


def test_logprob_measurement_skips_negative_row_numbers(device: torch.device) -> None:
    found = assert_as_reference(torch.randn(2, 40), ints(1, 1, 1), ints(-1, 1, -1), 3, device)
    assert (found.top_ids[[0, 2]] == POISON).all() and (found.own[[0, 2]] == POISON).all()


def test_logprob_measurement_accepts_more_rows_than_the_scratch_memory(device: torch.device) -> None:
    logits = torch.randn((5, 50), generator=torch.Generator().manual_seed(4))
    assert_as_reference(logits, ints(*range(7)), ints(4, 3, 2, 1, 0, 4, 2), 3, device, max_rows=2)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_measured_probability_mass_is_not_finite_when_logits_are_not_finite(poison: float, device: torch.device) -> None:
    logits = torch.zeros((2, 3000))
    logits[0, 2500] = poison
    found = measured(logits, ints(0, 0), ints(0, 1), 2, device, 2)
    assert not found.mass[0].isfinite() and found.mass[1].isfinite()


def test_logprob_measurement_rejects_more_than_max_top(device: torch.device) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        measured(torch.zeros(1, 50), ints(0), ints(0), 33, device, 1)
