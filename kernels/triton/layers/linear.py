"""Computes linear layers of one row, and deterministic linear layers of any number of rows.

One row: reading the weight takes nearly all of the time, so the kernel uses no tensor core and keeps all loads in flight. A
program has a few rows of the weight, and as many columns at a time as fit its registers. If launches are chained, the program
reads the weight, which no kernel of a step writes, while the previous kernel runs.

Deterministic: the bits of a row do not depend on the other rows. The depth (K) is cut into segments, whose size depends only on
the weight, and whose sums are added in order. There are two variants with the same sums:

- Few rows and a narrow weight: each segment has a separate program, and the program that ends last for a block adds the sums.
  Reading the weight takes nearly all of the time. A separate program per segment makes enough programs to read fast.
- All other cases: one program computes all segments of a block. Blocks are larger if there are enough programs.

No sum is fused with a product. The order in which a tensor core adds depends on the depth only, and not on other rows or columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import PackedLinear, misfit, require_contiguous
from rootstock_llm.kernels.triton.attention.attention_block import dot
from rootstock_llm.kernels.triton.launch import begin_next, chained, fetch_ahead, last_to_end, wait_for_last

# Sizes of a program of the one-row kernel.
MAX_DEPTH = 4096  # largest depth that a program has in registers at a time
ELEMENTS = 4096  # elements of the weight that a program has in registers at a time
NUM_WARPS = 4  # warps of a program, each with at least one row of the weight


@triton.jit
def _one_row_kernel(
    out,  # [N]
    x,  # [K]
    weight,  # [N, K]
    bias,  # [N]; without HAS_BIAS, any pointer
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    begin_next(CHAINED)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < WIDTH
    w_at = weight + columns.to(tl.int64)[:, None] * DEPTH
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for begin in tl.static_range(0, DEPTH, BLOCK_K):
        depths = begin + tl.arange(0, BLOCK_K)
        deep = depths < DEPTH
        w = tl.load(w_at + depths[None, :], mask=inside[:, None] & deep[None, :], other=0.0)
        if begin == 0:
            wait_for_last(CHAINED)
        row = tl.load(x + depths, mask=deep, other=0.0).to(tl.float32)
        total += tl.sum(w.to(tl.float32) * row[None, :], axis=1)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + columns, total.to(out.dtype.element_ty), mask=inside)


def one_row_linear(out: Tensor, x: Tensor, weight: PackedLinear) -> None:
    """Implements Kernels.linear() for one row: out [1, N], x [1, K].

    Raises:
        ValueError: the shapes do not fit, or the output has neither x's dtype nor float32.
    """
    depth, width = weight.in_features, weight.out_features
    if weight.packed or x.shape != (1, depth) or out.shape != (1, width) or out.dtype not in (x.dtype, torch.float32):
        raise misfit(out, x, weight.data)
    require_contiguous(out, x, weight.data)
    block_k = min(int(triton.next_power_of_2(depth)), MAX_DEPTH)
    block_n = max(ELEMENTS // block_k, NUM_WARPS)
    _one_row_kernel[triton.cdiv(width, block_n),](
        out,
        x,
        weight.data,
        out if weight.bias is None else weight.bias,
        WIDTH=width,
        DEPTH=depth,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        HAS_BIAS=weight.bias is not None,
        num_warps=NUM_WARPS,
        **chained(x.device),
    )


SHORT, LONG = 512, 1024  # the two sizes of a segment of the depth, see segment_of()
PROGRAMS = 128  # number of programs that is enough for a device: about one per multiprocessor
# Numbers of blocks of columns. With WIDE_BLOCKS or more, one program per block is enough, and segments need no separate programs.
# With VOCABULARY_BLOCKS or more, the blocks fill the device many times, and the weight is not prefetched.
WIDE_BLOCKS, VOCABULARY_BLOCKS = 512, 2048


@dataclass(frozen=True, slots=True)
class Tile:
    """Block sizes of one program."""

    m: int  # rows of a block
    n: int  # columns of a block
    k: int  # elements of the depth of a block
    num_warps: int  # warps of a program
    num_stages: int  # num_stages - 1 blocks of the depth are in flight at a time

    def blocks(self, rows: int, width: int) -> tuple[int, int]:
        """Returns the numbers of blocks of columns and of rows."""
        return -(-width // self.n), -(-rows // self.m)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of one element size, by the number of rows."""

    few: Tile  # for up to few.m rows
    deep: Tile  # for up to few.m rows, if there are at most PROGRAMS programs
    some: Tile  # for more than few.m rows, or for a weight with at least VOCABULARY_BLOCKS blocks of columns
    many: Tile  # instead of `some` for more than few.m rows, if there are at least PROGRAMS blocks of this size


EVEN = Tile(64, 64, 64, 4, 3)
TILES = {  # by the bytes of an element
    2: Tiles(Tile(64, 32, 128, 4, 4), Tile(64, 32, 256, 4, 3), Tile(64, 64, 64, 4, 4), Tile(128, 128, 64, 8, 4)),
    4: Tiles(EVEN, EVEN, EVEN, EVEN),
}


@triton.jit
def _block_sums(x_at, w_at, rows_in, columns_in, begin, end, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                UPCAST: tl.constexpr):  # fmt: skip
    """Returns the sums of the products over depths begin .. end - 1, float32[M, N].

    x_at [M] and w_at [N] point to the rows' first elements.
    """
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in range(begin, end, BLOCK_K):
        depths = first + tl.arange(0, BLOCK_K)
        inside = depths < end
        x = tl.load(x_at[:, None] + depths[None, :], mask=rows_in[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_at[:, None] + depths[None, :], mask=columns_in[:, None] & inside[None, :], other=0.0)
        sums = dot(x, tl.trans(w), sums, UPCAST)
    return sums


@triton.jit
def _store_block(out, total, bias, w_rows, columns_in, rows, rows_in, KIND, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
                 BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    """Adds the bias to a block of sums and stores the block. With GATED, rounds gate and up to KIND before the activation."""
    if HAS_BIAS:
        total += tl.load(bias + w_rows, mask=columns_in, other=0.0).to(tl.float32)[None, :]
    row_offsets = rows.to(tl.int64)[:, None] * WIDTH
    if GATED:
        gate, up = tl.split(tl.reshape(total.to(KIND).to(tl.float32), [BLOCK_M, BLOCK_N // 2, 2]))
        value = gate / (1.0 + tl.exp(-gate)) * up
        columns = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        inside = rows_in[:, None] & (columns < WIDTH)[None, :]
        tl.store(out + row_offsets + columns[None, :], value.to(out.dtype.element_ty), mask=inside)
    else:
        inside = rows_in[:, None] & columns_in[None, :]
        tl.store(out + row_offsets + w_rows[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    out,  # [T, N]
    x,  # [T, K]
    weight,  # [N, K]; [2 N, K] with GATED, the gate rows first
    bias,  # [N]; [2 N] with GATED; without HAS_BIAS, any pointer
    partials,  # float32[segments, T, columns of all blocks]; without SPLIT, `partials` and `arrivals` may be any pointer
    arrivals,  # int32[blocks of columns], 0 before and after the launch
    num_rows,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINE: tl.constexpr,  # elements in 128 bytes
    FEW: tl.constexpr,  # whether the weight is prefetched; True for few rows, for which the read takes most of the time
    SPLIT: tl.constexpr,  # whether each segment has a separate program
    GATED: tl.constexpr,  # whether out = silu(x @ gate.T) * (x @ up.T); gate and up columns then alternate in a block
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    CHAINED: tl.constexpr,
):
    begin_next(CHAINED)
    lanes = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = lanes // 2 if GATED else lanes
    columns_in = columns < WIDTH
    w_rows = columns + lanes % 2 * WIDTH if GATED else columns
    w_at = weight + tl.where(columns_in, w_rows, 0).to(tl.int64) * DEPTH
    if FEW:
        ahead = tl.program_id(2) * SEGMENT + tl.arange(0, SEGMENT // LINE) * LINE
        fetch_ahead(w_at[:, None] + tl.minimum(ahead, DEPTH - 1)[None, :], CHAINED)
    wait_for_last(CHAINED)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows_in = rows < num_rows
    x_at = x + rows.to(tl.int64) * DEPTH
    KIND = x.dtype.element_ty
    if SPLIT:
        begin = tl.program_id(2) * SEGMENT
        end = tl.minimum(begin + SEGMENT, DEPTH)
        sums = _block_sums(x_at, w_at, rows_in, columns_in, begin, end, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST)
        size = num_rows.to(tl.int64) * (tl.num_programs(0) * BLOCK_N)
        at = partials + rows.to(tl.int64)[:, None] * (tl.num_programs(0) * BLOCK_N) + lanes[None, :]
        inside = rows_in[:, None] & columns_in[None, :]
        tl.store(at + tl.program_id(2) * size, sums, mask=inside)
        last = last_to_end(arrivals + tl.program_id(0), tl.num_programs(2))
        if last:
            total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            for _ in tl.range(0, (DEPTH + SEGMENT - 1) // SEGMENT, loop_unroll_factor=4):  # four loads in flight
                total += tl.load(at, mask=inside, other=0.0)
                at += size
            _store_block(out, total, bias, w_rows, columns_in, rows, rows_in, KIND, WIDTH, BLOCK_M, BLOCK_N, HAS_BIAS, GATED)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for begin in range(0, DEPTH, SEGMENT):
            end = tl.minimum(begin + SEGMENT, DEPTH)
            total += _block_sums(x_at, w_at, rows_in, columns_in, begin, end, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST)
        _store_block(out, total, bias, w_rows, columns_in, rows, rows_in, KIND, WIDTH, BLOCK_M, BLOCK_N, HAS_BIAS, GATED)


class OrderedLinear:
    """Implements Kernels.linear() and gated_linear() with the guarantees of a deterministic implementation.

    Calls must not run concurrently, because they count ended segments in the same counters.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arrivals: Tensor | None = None

    def __call__(self, out: Tensor, x: Tensor, weight: PackedLinear) -> None:
        """Computes Kernels.linear().

        If each segment has a separate program, allocates float32[segments, T, N], with N rounded up to whole blocks. The first
        such call also allocates the counters, and must not be captured.

        Raises:
            ValueError: the shapes do not fit, or the output has neither x's dtype nor float32.
        """
        self._launch(out, x, weight, weight.out_features, gated=False)

    def gated(self, out: Tensor, x: Tensor, weight: PackedLinear) -> None:
        """Computes Kernels.gated_linear().

        The result has the same bits as linear() with outputs of x's dtype, followed by silu_and_mul(). Allocates and raises like
        __call__().
        """
        self._launch(out, x, weight, weight.out_features // 2, gated=True)

    def _launch(self, out: Tensor, x: Tensor, weight: PackedLinear, width: int, gated: bool) -> None:
        rows, depth = x.shape
        if weight.packed or depth != weight.in_features or out.shape != (rows, width):
            raise misfit(out, x, weight.data)
        if out.dtype not in (x.dtype, torch.float32):
            raise misfit(out, x, weight.data)
        require_contiguous(out, x, weight.data)
        if rows == 0:
            return
        tiles, outs = TILES[x.element_size()], weight.out_features
        segment = segment_of(outs, depth)
        segments, narrow = triton.cdiv(depth, segment), tiles.few.blocks(rows, outs)[0]
        few = rows <= tiles.few.m and narrow < VOCABULARY_BLOCKS
        split = few and segments > 1 and narrow < WIDE_BLOCKS
        tile = _few_tile(tiles, narrow * segments) if few else _tile_of(tiles, rows, outs)
        columns, blocks = tile.blocks(rows, outs)
        partials = torch.empty(segments, rows, columns * tile.n, dtype=torch.float32, device=x.device) if split else out
        _linear_kernel[columns, blocks, segments if split else 1](
            out,
            x,
            weight.data,
            out if weight.bias is None else weight.bias,
            partials,
            self._counters() if split else out,
            rows,
            WIDTH=width,
            DEPTH=depth,
            SEGMENT=segment,
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=tile.k,
            LINE=128 // x.element_size(),
            FEW=few,
            SPLIT=split,
            GATED=gated,
            HAS_BIAS=weight.bias is not None,
            UPCAST=x.device.type == "cpu" and x.dtype == torch.bfloat16,  # the interpreter cannot multiply bfloat16
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=False,
            **chained(x.device),
        )

    def _counters(self) -> Tensor:
        if self._arrivals is None:  # allocated on the caller's stream
            self._arrivals = torch.zeros(WIDE_BLOCKS, dtype=torch.int32, device=self._device)
        return self._arrivals


def segment_of(outs: int, depth: int) -> int:
    """Returns the segment size of a weight [outs, depth]: LONG if few rows then have at least PROGRAMS programs, else SHORT.

    The segment size must not depend on the actual number of rows, because it determines the order of the sums.
    """
    return LONG if triton.cdiv(outs, TILES[2].few.n) * triton.cdiv(depth, LONG) >= PROGRAMS else SHORT


def _few_tile(tiles: Tiles, programs: int) -> Tile:
    return tiles.deep if programs <= PROGRAMS else tiles.few


def _tile_of(tiles: Tiles, rows: int, outs: int) -> Tile:
    columns, blocks = tiles.many.blocks(rows, outs)
    return tiles.many if rows > tiles.few.m and columns * blocks >= PROGRAMS else tiles.some
