"""SiLU of one half times the other."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.chaining import chained, take_turn
from kernels.triton.launch import misfit, require_contiguous, warps_for

BLOCK = 1024  # columns a program


@triton.jit
def _silu_and_mul_kernel(out, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    take_turn(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    places = token * (2 * WIDTH) + columns
    gate = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + places + WIDTH, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * WIDTH + columns, value.to(out.dtype.element_ty), mask=inside)


def silu_and_mul(out: Tensor, x: Tensor) -> None:
    """See Kernels. Raises ValueError for shapes that do not fit."""
    require_contiguous(out, x)
    if out.dim() != 2 or x.shape != (out.shape[0], 2 * out.shape[1]):
        raise misfit(out, x)
    tokens, width = out.shape
    if tokens == 0:
        return
    block = min(BLOCK, triton.next_power_of_2(width))
    grid = (tokens, triton.cdiv(width, block))
    _silu_and_mul_kernel[grid](out, x, WIDTH=width, BLOCK=block, num_warps=warps_for(block), **chained(x.device))
