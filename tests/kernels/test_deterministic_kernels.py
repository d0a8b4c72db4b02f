"""Checks that a row's result has the same bits in any batch, whole and in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import Kernels, RaggedRows, ScoreRule
from rootstock_llm.kernels.cpu.build import built_library
from rootstock_llm.kernels.cpu.library import CpuKernels
from rootstock_llm.kernels.reference import layers
from tests.all_pairs import each_pair

DTYPES = [torch.float32, torch.bfloat16]
LENGTH = 150
CUTS = ([1] * LENGTH, [3] * (LENGTH // 3), [1, 7, 64, 2, 13, 1, 5, 57], [128, 22])


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return CpuKernels(built_library(), 2, deterministic=True)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def slices(rows: int) -> Iterator[slice]:
    """Yields slices of one row, of each number of rows that a tile may have, and of more rows."""
    yield from (slice(row, row + 1) for row in range(rows))
    for size in (2, 3, 4, 5, 6, 7, 13):
        yield from (slice(first, first + size) for first in range(0, rows - size, 5))


def assert_rows_alone(compute: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Checks that `compute` gives the same rows for a part of `x` as for the whole `x`. `compute` maps [rows, N] to [rows, M]."""
    whole = compute(x)
    for part in slices(len(x)):
        assert torch.equal(compute(x[part].clone()), whole[part]), part


@pytest.mark.by_day(one_in=2, seed=59)
@each_pair(dtype=DTYPES, weights=[(65, 64), (200, 31), (16, 1024)], bias=[False, True], wide=[False, True])
def test_linear_layer_gives_the_same_bits_for_any_number_of_rows(
    kernels: CpuKernels, dtype: torch.dtype, weights: tuple[int, int], bias: bool, wide: bool
) -> None:
    outs, ins = weights
    added = random(outs, dtype=dtype, seed=2) if bias else None
    packed = kernels.pack_linear(random(outs, ins, dtype=dtype, seed=1), added)

    def compute(x: Tensor) -> Tensor:
        out = torch.empty(len(x), outs, dtype=torch.float32 if wide else dtype)
        kernels.linear(out, x, packed)
        return out

    assert_rows_alone(compute, random(40, ins, dtype=dtype))


@each_pair(dtype=DTYPES, weights=[(33, 64), (96, 31)])
def test_gated_linear_layer_gives_the_same_bits_for_any_number_of_rows(
    kernels: CpuKernels, dtype: torch.dtype, weights: tuple[int, int]
) -> None:
    size, ins = weights
    packed = kernels.pack_gated(random(2 * size, ins, dtype=dtype, seed=1), None)

    def compute(x: Tensor) -> Tensor:
        out = torch.empty(len(x), size, dtype=dtype)
        kernels.gated_linear(out, x, packed)
        return out

    assert_rows_alone(compute, random(40, ins, dtype=dtype))


@each_pair(dtype=DTYPES, size=[31, 1000])
def test_norms_and_activation_give_the_same_bits_for_any_number_of_rows(
    kernels: CpuKernels, dtype: torch.dtype, size: int
) -> None:
    weight = random(size, dtype=torch.float32, seed=1)

    def normed(x: Tensor) -> Tensor:
        out, residual = torch.empty_like(x), x.flip(1).contiguous()
        kernels.fused_add_rms_norm(out, x, residual, weight, 1e-6)
        again = torch.empty_like(x)
        kernels.rms_norm(again, out, weight, 1e-6)
        return torch.cat((out, residual, again), dim=1)

    def activated(x: Tensor) -> Tensor:
        silu, gelu = torch.empty(2, len(x), size // 2, dtype=dtype)
        even = x[:, : size // 2 * 2].contiguous()
        kernels.silu_and_mul(silu, even)
        kernels.gelu_and_mul(gelu, even)
        kernels.sigmoid_mul(silu, gelu)
        return torch.cat((silu, gelu), dim=1)

    assert_rows_alone(normed, random(40, size, dtype=dtype))
    assert_rows_alone(activated, random(40, size, dtype=dtype))


def one_row(table: Tensor, start: int, count: int, slot: int, page_size: int) -> RaggedRows:
    return RaggedRows(
        page_table=table,
        slots=torch.tensor([slot], dtype=torch.int32),
        starts=torch.tensor([start], dtype=torch.int32),
        num_tokens=torch.tensor([count], dtype=torch.int32),
        offsets=torch.zeros(1, dtype=torch.int32),
        positions=torch.arange(start, start + count, dtype=torch.int32),
        locations=torch.zeros(count, dtype=torch.int64),
        max_context=start + count,
    )


def together(table: Tensor, parts: Sequence[tuple[int, int, int]]) -> RaggedRows:
    """Returns a batch of rows from (slot, start, count)."""
    slots, starts, counts = (torch.tensor(column, dtype=torch.int32) for column in zip(*parts, strict=True))
    positions = torch.cat([torch.arange(start, start + count, dtype=torch.int32) for _, start, count in parts])
    offsets, most = (counts.cumsum(0) - counts).int(), int((starts + counts).max())
    return RaggedRows(table, slots, starts, counts, offsets, positions, torch.zeros(len(positions), dtype=torch.int64), most)


class Context:
    """Queries, keys and values of a sequence. Slot 0 has the keys and values on its pages, and two other slots have copies."""

    def __init__(
        self, dtype: torch.dtype, shape: tuple[int, int, int, int], page_size: int, window: int, ruled: bool = False
    ) -> None:
        """Creates random queries, keys and values of LENGTH tokens.

        Args:
            shape: heads, KV heads, size of a key and size of a value.
            ruled: whether scores have a cap and heads have sinks.
        """
        self.heads, kv_heads, head_dim, self.value_dim = shape
        self.page_size, width = page_size, -(-LENGTH // page_size)
        sinks = random(self.heads, dtype=torch.float32, seed=4) * 2 if ruled else None
        self.rule = ScoreRule(head_dim**-0.5, window, 3.0 if ruled else 0.0, sinks)
        self.table = torch.randperm(3 * width, generator=torch.Generator().manual_seed(7)).view(3, width).int()
        pool = (3 * width, kv_heads, page_size)
        self.qkv = random(LENGTH, (self.heads + 2 * kv_heads) * head_dim, dtype=dtype, seed=1) * 2
        self.keys, self.values = random(*pool, head_dim, dtype=dtype, seed=2), random(*pool, self.value_dim, dtype=dtype, seed=3)
        positions = torch.arange(LENGTH)
        source_pages, offsets = self.table[0, positions // page_size].long(), positions % page_size
        for slot in (1, 2):  # copies on other pages
            pages = self.table[slot, positions // page_size].long()
            self.keys[pages, :, offsets] = self.keys[source_pages, :, offsets]
            self.values[pages, :, offsets] = self.values[source_pages, :, offsets]

    def attend(self, kernels: Kernels, rows: RaggedRows) -> Tensor:
        """Returns [tokens, H E], the attention of the tokens at the rows' positions."""
        qkv = self.qkv[rows.positions.long()].contiguous()
        out = torch.empty(len(qkv), self.heads * self.value_dim, dtype=qkv.dtype)
        kernels.paged_attention(out, qkv, self.keys, self.values, rows, self.rule)
        return out

    def in_pieces(self, kernels: Kernels, sizes: Sequence[int], slot: int = 0) -> Tensor:
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        found = [
            self.attend(kernels, one_row(self.table, *piece, slot, self.page_size)) for piece in zip(starts, sizes, strict=True)
        ]
        return torch.cat(found)


SHAPES = [
    (torch.bfloat16, (4, 2, 64, 64), (16, 0), False),
    (torch.bfloat16, (4, 4, 96, 96), (4, 70), False),
    (torch.bfloat16, (7, 1, 128, 128), (16, 24), True),
    (torch.bfloat16, (6, 2, 256, 256), (1, 0), False),
    (torch.bfloat16, (16, 1, 64, 64), (16, 100), True),
    (torch.bfloat16, (4, 2, 192, 128), (4, 0), True),
    (torch.bfloat16, (4, 2, 20, 28), (16, 0), True),
    (torch.float32, (4, 2, 64, 64), (16, 24), False),
    (torch.float32, (3, 1, 40, 24), (4, 70), True),
]


@pytest.mark.by_day(one_in=2, seed=5)
@pytest.mark.parametrize(("dtype", "shape", "layout", "ruled"), SHAPES, ids=str)
def test_paged_attention_gives_the_same_bits_for_any_chunks(
    kernels: CpuKernels, dtype: torch.dtype, shape: tuple[int, int, int, int], layout: tuple[int, int], ruled: bool
) -> None:
    """`layout` is (tokens per page, window)."""
    context = Context(dtype, shape, *layout, ruled)
    whole = context.in_pieces(kernels, [LENGTH])
    for sizes in CUTS:
        found = context.in_pieces(kernels, sizes)
        assert torch.equal(found, whole), (sizes, (found != whole).any(1).nonzero().flatten())


@pytest.mark.by_day(one_in=2, seed=5)
@pytest.mark.parametrize(("dtype", "shape", "layout", "ruled"), SHAPES, ids=str)
def test_paged_attention_gives_the_same_bits_in_any_batch(
    kernels: CpuKernels, dtype: torch.dtype, shape: tuple[int, int, int, int], layout: tuple[int, int], ruled: bool
) -> None:
    """Some of the other rows use other pages."""
    context = Context(dtype, shape, *layout, ruled)
    whole = context.in_pieces(kernels, [LENGTH])
    parts = [(2, 100, 50), (1, 0, 9), (2, 37, 1), (0, 9, 60), (1, 149, 1)]
    found, expected = context.attend(kernels, together(context.table, parts)), []
    for _, start, count in parts:
        expected.append(whole[start : start + count])
    assert torch.equal(found, torch.cat(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_attention_gives_different_bits_when_chunks_differ(dtype: torch.dtype) -> None:
    """Shows that the comparisons above can fail. In torch's kernels, the order of sums depends on the sizes of a step."""
    context = Context(dtype, (4, 2, 64, 64), 16, 0)
    assert not torch.equal(context.in_pieces(layers, [1] * LENGTH), context.in_pieces(layers, [LENGTH]))
