"""Checks that the bits of a row, or of a token, do not depend on other rows in the deterministic Triton kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import RaggedRows, ScoreRule
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.kernels.triton.attention import attention
from rootstock_llm.kernels.triton.attention.attention_plan import Launch, plan_fixed
from rootstock_llm.kernels.triton.layers import linear
from rootstock_llm.kernels.triton.layers.layers import TritonLayers
from rootstock_llm.kernels.triton.layers.linear import OrderedLinear, Tile, Tiles
from tests.all_pairs import each_pair
from tests.kernels.ordered_products import products_in_order
from tests.kernels.test_deterministic_kernels import CUTS, LENGTH, Context, random, together
from tests.night import NIGHTLY

CPU = torch.device("cpu")
SPLIT_SIZE = 64  # positions per split; the tested contexts have three splits
LARGE = Tile(128, 128, 128, 8, 2)
ROOMY = Tiles(few=Tile(64, 128, 64, 4, 2), deep=Tile(64, 16, 256, 4, 2), some=LARGE, many=LARGE)
ROW_CUTS = (1, 3, 40, 64, 65, 97)
ATTENTION_CUTS = CUTS[2:] if NIGHTLY else CUTS[2:3]  # by day only the chunks of the most different sizes


def launched(shape: attention.HeadShape, rows: RaggedRows, num_tokens: int, split: bool, strided: bool) -> Launch:
    """Returns a plan with blocks of 32 keys, so that a tile has unmasked, partly masked and fully masked blocks.

    Args:
        shape: sizes of the heads.
        rows: the batch. If every row has one token, each row is a tile.
        num_tokens: tokens of the batch.
        split: whether several programs compute the splits of a tile.
        strided: whether only two programs compute the splits, so that each program computes several.
    """
    many, one = 1 << 20 if split else 0, bool((rows.num_tokens == 1).all())
    launch = plan_fixed(shape, len(rows.slots), num_tokens, rows.max_context + SPLIT_SIZE, SPLIT_SIZE, many, one)
    blocks = replace(launch.blocks, n=32)
    return replace(launch, blocks=blocks, min_blocks=SPLIT_SIZE // blocks.n, splits=min(launch.splits, 2 if strided else 64))


@pytest.fixture(autouse=True)
def ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    products_in_order(monkeypatch)


class Fixed:
    """Kernels that compute attention only, with plans that have fixed splits."""

    def __init__(self, split: bool, strided: bool = False) -> None:
        self._split, self._strided = split, strided

    def paged_attention(self, out: Tensor, q: Tensor, k_pool: Tensor, v_pool: Tensor, rows: RaggedRows, rule: ScoreRule) -> None:
        call = attention.AttentionCall.of(out, q, k_pool, v_pool, rows, rule)
        shape = attention.head_shape(call.q, k_pool, v_pool)
        launch = launched(shape, rows, len(q), self._split, self._strided)
        assert bool(launch.splits) == self._split
        scratch = attention.allocate_scratch(launch.scratch_lanes, launch.counters, shape.value_dim, CPU)
        attention.run_attention(call, shape, launch, scratch)
        assert not scratch.arrivals.any(), "the counters are 0 after a launch"


@pytest.mark.by_day(one_in=2, seed=2)
@each_pair(
    dtype=[torch.float32, torch.bfloat16],
    weights=[(65, 64), (70, 1100), (16, 600)],
    bias=[False, True],
    wide=[False, True],
    programs=[128, 1],
)
def test_linear_layer_gives_the_same_bits_for_any_rows_and_blocks(
    dtype: torch.dtype, weights: tuple[int, int], bias: bool, wide: bool, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outs, ins = weights
    monkeypatch.setattr(linear, "PROGRAMS", programs)  # with 1, all weights are computed in long segments
    kernels, added = TritonLayers(CPU, deterministic=True), random(outs, dtype=dtype, seed=2) if bias else None
    packed = kernels.pack_linear(random(outs, ins, dtype=dtype, seed=1), added)

    def compute(on: Any, x: Tensor) -> Tensor:
        out = torch.empty(len(x), outs, dtype=torch.float32 if wide else dtype)
        on.linear(out, x, packed)
        return out

    x = random(97, ins, dtype=dtype)
    whole = compute(kernels, x)
    torch.testing.assert_close(whole, compute(reference, x), atol=0.5 if dtype == torch.bfloat16 else 1e-3, rtol=0.02)
    for size in ROW_CUTS:
        for first in (0, 97 - size):
            part = slice(first, first + size)
            assert torch.equal(compute(kernels, x[part].clone()), whole[part]), part
    monkeypatch.setattr(linear, "TILES", {2: ROOMY, 4: ROOMY})
    assert torch.equal(compute(kernels, x), whole), "other blocks give the same bits"
    assert torch.equal(compute(kernels, x[:3].clone()), whole[:3])
    monkeypatch.setattr(OrderedLinear, "_counters", None)  # wide weights are not split, so they need no counters
    for bound in ("WIDE_BLOCKS", "VOCABULARY_BLOCKS"):
        monkeypatch.setattr(linear, bound, 1)
        assert torch.equal(compute(kernels, x[:3].clone()), whole[:3]), bound


@pytest.mark.parametrize("bias", [True, False])
def test_gated_linear_layer_gives_the_bits_of_two_products_and_an_activation(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    outs, ins, dtype = (70, 600, torch.bfloat16) if bias else (66, 64, torch.float32)
    kernels, added = TritonLayers(CPU, deterministic=True), random(outs, dtype=dtype, seed=2) if bias else None
    packed = kernels.pack_gated(random(outs, ins, dtype=dtype, seed=1), added)
    x = random(97, ins, dtype=dtype)
    both, expected = torch.empty(97, outs, dtype=dtype), torch.empty(97, outs // 2, dtype=dtype)
    kernels.linear(both, x, packed)
    kernels.silu_and_mul(expected, both)
    found = torch.empty_like(expected)
    for tiles in (linear.TILES, {2: ROOMY, 4: ROOMY}):
        monkeypatch.setattr(linear, "TILES", tiles)
        for size in ROW_CUTS:
            kernels.gated_linear(found[:size], x[:size].clone(), packed)
            assert torch.equal(found[:size], expected[:size]), (tiles, size)


SHAPES = [
    (torch.bfloat16, (4, 2, 64, 64), (16, 0), False),
    (torch.float32, (6, 2, 32, 24), (4, 40), True),
    (torch.bfloat16, (7, 1, 128, 128), (16, 90), False),
]


@pytest.mark.by_day(one_in=6, seed=2)
@pytest.mark.parametrize("split", [True, False], ids=["many programs", "one program"])
@pytest.mark.parametrize(("dtype", "shape", "layout", "ruled"), SHAPES, ids=str)
def test_paged_attention_gives_the_same_bits_for_any_chunks_and_launches(
    dtype: torch.dtype, shape: tuple[int, int, int, int], layout: tuple[int, int], ruled: bool, split: bool
) -> None:
    context = Context(dtype, shape, *layout, ruled)
    whole = context.in_pieces(Fixed(False), [LENGTH])
    expected = context.in_pieces(reference, [LENGTH])
    torch.testing.assert_close(whole, expected, atol=0.05 if dtype == torch.bfloat16 else 1e-4, rtol=0.02)
    for sizes in ATTENTION_CUTS:
        assert torch.equal(context.in_pieces(Fixed(split), sizes), whole), sizes
    for position in (0, 31, 32, 63, 64, 100, LENGTH - 1):
        (alone,) = context.attend(Fixed(split, strided=True), together(context.table, [(1, position, 1)]))
        assert torch.equal(alone, whole[position]), position


@pytest.mark.by_day(one_in=6, seed=1)
@pytest.mark.parametrize("split", [True, False], ids=["many programs", "one program"])
@pytest.mark.parametrize(("dtype", "shape", "layout", "ruled"), SHAPES, ids=str)
def test_paged_attention_gives_the_same_bits_in_any_batch(
    dtype: torch.dtype, shape: tuple[int, int, int, int], layout: tuple[int, int], ruled: bool, split: bool
) -> None:
    """Some of the other rows use other pages."""
    context = Context(dtype, shape, *layout, ruled)
    whole = context.in_pieces(Fixed(False), [LENGTH])
    parts = [(2, 100, 50), (1, 0, 9), (2, 37, 1), (0, 9, 60), (1, 149, 1)]
    found = context.attend(Fixed(split, strided=True), together(context.table, parts))
    assert torch.equal(found, torch.cat([whole[start : start + count] for _, start, count in parts]))
