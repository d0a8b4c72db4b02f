"""Linear layers whose rows get the same bits in any company: fixed blocks, and the depth in segments that are added in order.

Few rows of a weight that is not wide: each segment has a program of its own, and the last of a block to end adds them all, for
the weight is what takes time to read, and its columns alone are too few programs. Else one program takes all segments of its
block, which is larger where that leaves programs enough. The sums are the same ones, in the same order, none fused with a
product: a tensor core adds what it multiplies by depth alone, whatever rows and columns stand beside.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.contracts.ops import PackedLinear
from kernels.triton.attention.attention_block import dot
from kernels.triton.chaining import begin_next, chained, fetch_ahead, last_to_end, wait_for_last
from kernels.triton.launch import misfit, require_contiguous

SHORT, LONG = 512, 1024  # segments of the depth
PROGRAMS = 128  # that are enough: about one a multiprocessor
WIDE_BLOCKS, VOCABULARY_BLOCKS = 512, 2048  # of columns, from which these alone are programs enough, and fill the device at once


@dataclass(frozen=True, slots=True)
class Tile:
    """m: rows of a block, n: columns, k: of the depth. num_stages - 1 blocks of the depth are on their way at a time."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int

    def blocks(self, rows: int, width: int) -> tuple[int, int]:
        """Of columns, and of rows."""
        return -(-width // self.n), -(-rows // self.m)


@dataclass(frozen=True, slots=True)
class Tiles:
    """few: up to so many rows segments have programs of their own. deep: of those, where a multiprocessor has one block. some:
    more rows. many: where its blocks are PROGRAMS."""

    few: Tile
    deep: Tile
    some: Tile
    many: Tile


EVEN = Tile(64, 64, 64, 4, 3)
TILES = {  # by an element's bytes
    2: Tiles(Tile(64, 32, 128, 4, 4), Tile(64, 32, 256, 4, 3), Tile(64, 64, 64, 4, 4), Tile(128, 128, 64, 8, 4)),
    4: Tiles(EVEN, EVEN, EVEN, EVEN),
}


@triton.jit
def _block_sums(x_at, w_at, rows_in, columns_in, begin, end, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                UPCAST: tl.constexpr):  # fmt: skip
    """float32[M, N] of depths begin .. end - 1. x_at, w_at: pointers [M], [N] to the rows' first elements."""
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
    """A block of sums, and bias, to out. GATED: they are rounded to KIND first, as where another kernel takes them on."""
    if HAS_BIAS:
        total += tl.load(bias + w_rows, mask=columns_in, other=0.0).to(tl.float32)[None, :]
    places = rows.to(tl.int64)[:, None] * WIDTH
    if GATED:
        gate, up = tl.split(tl.reshape(total.to(KIND).to(tl.float32), [BLOCK_M, BLOCK_N // 2, 2]))
        value = gate / (1.0 + tl.exp(-gate)) * up
        columns = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        inside = rows_in[:, None] & (columns < WIDTH)[None, :]
        tl.store(out + places + columns[None, :], value.to(out.dtype.element_ty), mask=inside)
    else:
        inside = rows_in[:, None] & columns_in[None, :]
        tl.store(out + places + w_rows[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    out,  # [T, N]
    x,  # [T, K]
    weight,  # [N, K]; [2 N, K] with GATED, gates first
    bias,  # of as many; any pointer without HAS_BIAS
    partials,  # float32[segments, T, columns of all blocks]; this and the next: any pointer without SPLIT
    arrivals,  # int32[blocks of columns], 0 before and after
    num_rows,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINE: tl.constexpr,  # elements of 128 bytes
    FEW: tl.constexpr,  # rows, for which the weight is all that takes time
    SPLIT: tl.constexpr,
    GATED: tl.constexpr,  # out = silu(x @ gate.T) * (x @ up.T): gates and ups lie side by side in a block
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
            for _ in tl.range(0, (DEPTH + SEGMENT - 1) // SEGMENT, loop_unroll_factor=4):  # so many loads are under way
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
    """Kernels.linear and gated_linear in their second contract. One call at a time: segments count their ends where the next
    call's do."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arrivals: Tensor | None = None

    def __call__(self, out: Tensor, x: Tensor, weight: PackedLinear) -> None:
        """Raises ValueError for shapes that do not fit, and an output neither of x's dtype nor float32. Allocates
        float32[segments, T, N] for few rows, and a little once: not in a first call under capture."""
        self._launch(out, x, weight, weight.out_features, gated=False)

    def gated(self, out: Tensor, x: Tensor, weight: PackedLinear) -> None:
        """The same bits as two products that are rounded to x's dtype, and silu_and_mul. Raises and allocates as a call."""
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
            UPCAST=x.device.type == "cpu" and x.dtype == torch.bfloat16,  # the interpreter multiplies no bfloat16
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=False,
            **chained(x.device),
        )

    def _counters(self) -> Tensor:
        if self._arrivals is None:  # on the stream that calls
            self._arrivals = torch.zeros(WIDE_BLOCKS, dtype=torch.int32, device=self._device)
        return self._arrivals


def segment_of(outs: int, depth: int) -> int:
    """Of a weight [outs, depth]: the longer one, where its blocks of few rows are programs enough. Rows have no say in it."""
    return LONG if triton.cdiv(outs, TILES[2].few.n) * triton.cdiv(depth, LONG) >= PROGRAMS else SHORT


def _few_tile(tiles: Tiles, programs: int) -> Tile:
    return tiles.deep if programs <= PROGRAMS else tiles.few


def _tile_of(tiles: Tiles, rows: int, outs: int) -> Tile:
    columns, blocks = tiles.many.blocks(rows, outs)
    return tiles.many if rows > tiles.few.m and columns * blocks >= PROGRAMS else tiles.some
