"""Triton's kernels of routers and experts equal their twins. A row's bits depend only on that row.

Without a GPU, Triton's interpreter runs the kernels.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from rootstock_llm.kernels.bench import gpu_experts
from rootstock_llm.kernels.bench.gpu_experts import MixtureShape
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.kernels.triton.layers import experts
from rootstock_llm.kernels.triton.layers.experts import Tile
from rootstock_llm.kernels.triton.layers.layers import TritonLayers
from tests.kernels.ordered_products import products_in_order
from tests.kernels.test_experts import CLAMPED, Case, assert_close, case_of, random_case, random_routing, routed
from tests.night import NIGHTLY

CASES = 200 if NIGHTLY else 4
DTYPES = [torch.float32, torch.bfloat16]


def computed(case: Case, device: torch.device) -> torch.Tensor:
    """Returns the result of the device's kernels, on the CPU."""
    kernels = TritonLayers(device, deterministic=True)
    gate_up_bias, down_bias = (None if each is None else each.to(device) for each in (case.gate_up_bias, case.down_bias))
    packed = kernels.pack_experts(case.gate_up.to(device), gate_up_bias, case.down.to(device), down_bias, case.activation)
    x, ids, weights = (each.to(device) for each in (case.x, case.ids, case.weights))
    out = torch.empty_like(x)
    kernels.experts(out, x, ids, weights, packed)
    return out.cpu()


def test_experts_of_random_batches_equal_the_twin(device: torch.device) -> None:
    for seed in range(CASES):
        case = random_case(seed)
        rows = slice(30)
        case = replace(case, x=case.x[rows], ids=case.ids[rows], weights=case.weights[rows])
        assert_close(computed(case, device), case.expected())


def test_experts_equal_the_twin_when_tiles_are_full(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some experts have several tiles of rows, and a block has several parts of the depth."""
    monkeypatch.setattr(experts, "FEW_IDS", 16)
    monkeypatch.setattr(experts, "IDS", 16)
    case = case_of(random.Random(2), torch.float32, experts=3, inner=70, width=130, rows=70, choices=2, biases=True)
    case.ids[:40] = torch.tensor([2, 0], dtype=torch.int32)
    for tile in (experts.FEW, experts.MANY):
        monkeypatch.setattr(experts, "ORDERED", tile)
        assert_close(computed(case, device), case.expected())


def launches(monkeypatch: pytest.MonkeyPatch, tokens: int) -> list[tuple[Any, tuple[int, ...], dict[str, Any]]]:
    """Returns the kernel, the grid and the arguments of each launch for that number of tokens. Runs no kernel."""
    found = []

    def run(kernel: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        found.append((kernel, grid, dict(zip(kernel.arg_names, args, strict=False)) | options))

    monkeypatch.setattr(type(experts._group_kernel), "run", run)
    gpu_experts.experts_case(MixtureShape("small", 64, 32, experts=8, chosen=2), tokens).make(torch.device("meta"))()
    return found


def test_experts_keep_to_the_limits_of_a_grid_when_a_step_has_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    grids = [grid for _, grid, _ in launches(monkeypatch, 70_000)]
    assert len(grids) == 4 and max(max(grid[1:], default=1) for grid in grids) <= 65_535


def test_kernels_of_experts_have_few_variants_for_all_numbers_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles a variant for each constant, and for integers that are 1 or multiples of 16."""
    variants: dict[str, set[Any]] = {}
    for tokens in (*range(1, 130), 1000, 1001):
        for kernel, _, arguments in launches(monkeypatch, tokens):
            options = vars(kernel).get("kwargs", vars(kernel))  # the interpreter has the options of @triton.jit in `kwargs`
            numbers = [(name, value) for name, value in arguments.items() if isinstance(value, int)]
            key = [
                (name, value if name.isupper() else (value == 1, value % 16 == 0))
                for name, value in numbers
                if name not in (options["do_not_specialize"] or ())
            ]
            variants.setdefault(kernel.__name__, set()).add(tuple(key))
    assert {name: len(found) for name, found in variants.items()} == {
        "_group_kernel": 2,
        "_gate_up_kernel": 2,
        "_down_kernel": 2,
        "_combine_kernel": 1,
    }


def test_tile_of_deterministic_mode_does_not_depend_on_the_number_of_pairs() -> None:
    tiles = {experts.tile_of(pairs, 8, deterministic=True) for pairs in (1, 256, 257, 10_000)}
    assert tiles == {experts.ORDERED} and experts.ORDERED.m == 64
    assert experts.tile_of(256, 8, deterministic=False) != experts.tile_of(257, 8, deterministic=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_give_the_same_bits_for_any_rows_and_expert_ids(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    products_in_order(monkeypatch)
    case = case_of(random.Random(4), dtype, experts=4, inner=40, width=66, rows=20, choices=2, biases=True, activation=CLAMPED)
    whole = computed(case, device)
    for part in (slice(0, 1), slice(7, 8), slice(3, 20)):
        some = replace(case, x=case.x[part].clone(), ids=case.ids[part].clone(), weights=case.weights[part].clone())
        assert torch.equal(computed(some, device), whole[part]), part
    order = torch.tensor([2, 0, 3, 1])  # new expert i is the old expert order[i]
    assert case.gate_up_bias is not None and case.down_bias is not None
    renamed = replace(
        case,
        gate_up=case.gate_up[order],
        gate_up_bias=case.gate_up_bias[order],
        down=case.down[order],
        down_bias=case.down_bias[order],
        ids=order.argsort()[case.ids.long()].int(),
    )
    assert torch.equal(computed(renamed, device), whole)
    monkeypatch.setattr(experts, "ORDERED", Tile(64, 128, 64, 8, 3))
    assert torch.equal(computed(case, device), whole), "other numbers of rows and columns per block give the same bits"


def test_nan_in_the_weights_of_an_unused_expert_changes_nothing(device: torch.device) -> None:
    case = case_of(random.Random(6), torch.float32, experts=5, inner=24, width=34, rows=9, choices=2)
    used = replace(case, ids=torch.where(case.ids == 3, 4, case.ids))
    expected = computed(used, device)
    case.gate_up[3], case.down[3] = torch.nan, torch.nan
    assert expected.isfinite().all() and torch.equal(computed(used, device), expected)


def test_routes_of_random_batches_equal_the_twin(device: torch.device) -> None:
    """Logits are multiples of 1/4, so that many scores are equal, and no two scores differ only by rounding."""
    kernels = TritonLayers(device)
    for seed in range(4 * CASES):
        rng = random.Random(seed)
        count, routing = random_routing(rng)
        generator = torch.Generator().manual_seed(seed)
        logits = (torch.randn((rng.choice((1, 3)), count), generator=generator) * 6).round() / 4
        bias = (torch.randn(count, generator=generator) * 2).round() / 2 if rng.random() < 0.3 else None
        if rng.random() < 0.2:
            logits[0, rng.randrange(count)] = rng.choice((torch.nan, torch.inf, -torch.inf))
        given = logits.to(device), None if bias is None else bias.to(device)
        weights, ids = (
            torch.empty(len(logits), routing.top_k, dtype=kind, device=device) for kind in (torch.float32, torch.int32)
        )
        kernels.route(weights, ids, *given, routing)
        expected, expected_ids = routed(reference, logits, bias, routing)  # type: ignore[arg-type]
        assert torch.equal(ids.cpu(), expected_ids), (seed, routing)
        torch.testing.assert_close(weights.cpu(), expected, atol=1e-6, rtol=1e-5, equal_nan=True)


def test_kernels_of_experts_reject_tensors_that_do_not_fit(device: torch.device) -> None:
    case = case_of(random.Random(12), torch.float32, experts=4, inner=8, width=16, rows=3, choices=2)
    with pytest.raises(ValueError, match="do not fit"):
        computed(replace(case, ids=case.ids.long()), device)
    with pytest.raises(ValueError, match="do not fit"):
        computed(replace(case, weights=case.weights[:2].contiguous()), device)
