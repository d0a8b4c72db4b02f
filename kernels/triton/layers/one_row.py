"""Linear layers of one row, where reading the weight is all that takes time: no tensor core, all loads on their way at once.

A program has a few of the weight's rows and as much of the depth as registers hold. Where kernels begin before the one before
them has ended, weights, which no kernel of a step writes, are read meanwhile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.contracts.ops import PackedLinear
from kernels.triton.chaining import begin_next, chained, wait_for_last
from kernels.triton.launch import misfit, require_contiguous

MAX_DEPTH = 4096  # that a program holds at a time
ELEMENTS = 4096  # of the weight that a program holds at a time
NUM_WARPS = 4  # a row of the weight each, at least


@triton.jit
def _one_row_kernel(
    out,  # [N]
    x,  # [K]
    weight,  # [N, K]
    bias,  # [N]; any pointer without HAS_BIAS
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
    """Kernels.linear of one row. Raises ValueError for shapes that do not fit, and an output neither of x's dtype nor float32."""
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
