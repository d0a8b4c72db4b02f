"""Linear layers whose rows get the same bits in any company: fixed blocks, and the depth in segments that are added in order.

Few rows of a weight that is not wide: each segment has a program of its own, and another launch adds them, for the weight is what
takes time to read, and its columns alone are too few programs. Else one program takes all segments of its block. The sums are the
same ones, in the same order, none fused with a product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.contracts.ops import PackedLinear
from kernels.triton.attention.attention_block import dot
from kernels.triton.launch import misfit, require_contiguous

BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 64
SEGMENT = 512  # of the depth, a multiple of BLOCK_K
SPLIT_ROWS = 64  # rows up to which segments have programs of their own
WIDE_BLOCKS = 512  # blocks of columns from which these alone are programs enough
SUM_BLOCK = 1024


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


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    out,  # [T, N]; float32[segments, T, N] with SPLIT
    x,  # [T, K]
    weight,  # [N, K]
    bias,  # [N]; any pointer without HAS_BIAS
    num_rows,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows_in, columns_in = rows < num_rows, columns < WIDTH
    x_at = x + rows.to(tl.int64) * DEPTH
    w_at = weight + columns.to(tl.int64) * DEPTH
    places = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    inside = rows_in[:, None] & columns_in[None, :]
    if SPLIT:
        begin = tl.program_id(2) * SEGMENT
        end = tl.minimum(begin + SEGMENT, DEPTH)
        sums = _block_sums(x_at, w_at, rows_in, columns_in, begin, end, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST)
        tl.store(out + tl.program_id(2).to(tl.int64) * num_rows * WIDTH + places, sums, mask=inside)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for begin in range(0, DEPTH, SEGMENT):
            end = tl.minimum(begin + SEGMENT, DEPTH)
            total += _block_sums(x_at, w_at, rows_in, columns_in, begin, end, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST)
        if HAS_BIAS:
            total += tl.load(bias + columns, mask=columns_in, other=0.0).to(tl.float32)[None, :]
        tl.store(out + places, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _add_kernel(out, partials, bias, num_rows, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr,
                HAS_BIAS: tl.constexpr):  # fmt: skip
    """out [T, N] = the sum of partials float32[SEGMENTS, T, N] in their order, and bias."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    places = tl.program_id(0).to(tl.int64) * WIDTH + columns
    total = tl.zeros([BLOCK], dtype=tl.float32)
    at = partials + places
    for _ in range(0, SEGMENTS):
        total += tl.load(at, mask=inside, other=0.0)
        at += num_rows.to(tl.int64) * WIDTH
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=inside)


def ordered_linear(out: Tensor, x: Tensor, weight: PackedLinear) -> None:
    """See Kernels.linear, in its second contract. Raises ValueError for shapes that do not fit, and an output neither of x's
    dtype nor float32. Allocates float32[segments, T, N] for few rows."""
    rows, depth = x.shape
    width = weight.out_features
    if weight.packed or depth != weight.in_features or out.shape != (rows, width) or out.dtype not in (x.dtype, torch.float32):
        raise misfit(out, x, weight.data)
    require_contiguous(out, x, weight.data)
    if rows == 0:
        return
    segments = triton.cdiv(depth, SEGMENT)
    split = rows <= SPLIT_ROWS and segments > 1 and triton.cdiv(width, BLOCK_N) < WIDE_BLOCKS
    bias = out if weight.bias is None else weight.bias
    target = torch.empty(segments, rows, width, dtype=torch.float32, device=x.device) if split else out
    _linear_kernel[triton.cdiv(width, BLOCK_N), triton.cdiv(rows, BLOCK_M), segments if split else 1](
        target,
        x,
        weight.data,
        bias,
        rows,
        WIDTH=width,
        DEPTH=depth,
        SEGMENT=SEGMENT,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        SPLIT=split,
        HAS_BIAS=weight.bias is not None,
        UPCAST=x.device.type == "cpu" and x.dtype == torch.bfloat16,  # the interpreter multiplies no bfloat16
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=False,
    )
    if split:
        block = min(SUM_BLOCK, int(triton.next_power_of_2(width)))
        _add_kernel[rows, triton.cdiv(width, block)](
            out,
            target,
            bias,
            rows,
            WIDTH=width,
            SEGMENTS=segments,
            BLOCK=block,
            HAS_BIAS=weight.bias is not None,
            enable_fp_fusion=False,
        )
