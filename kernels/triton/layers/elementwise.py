"""Computes RMS norms and gates. For a norm, one program has the whole row of a token in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import misfit, require_contiguous
from rootstock_llm.kernels.triton.launch import begin_next, block_of, chained, take_turn, wait_for_last, warps_for


@triton.jit
def _rms_norm_kernel(out, x, residual, weight, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr,
                     CHAINED: tl.constexpr):  # fmt: skip
    begin_next(CHAINED)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    offsets = tl.program_id(0).to(tl.int64) * WIDTH + columns
    # Loaded before the wait, because no kernel writes the weight.
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_last(CHAINED)
    wide = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        wide += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(residual.dtype.element_ty)
        tl.store(residual + offsets, rounded, mask=inside)
        wide = rounded.to(tl.float32)  # the norm reads the rounded residual
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    tl.store(out + offsets, (wide * scale * gain).to(out.dtype.element_ty), mask=inside)


def _launch(out: Tensor, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> None:
    require_contiguous(out, x, weight)
    if x.dim() != 2 or out.shape != x.shape or weight.shape[0] != x.shape[1]:
        raise misfit(out, x, weight)
    tokens, width = x.shape
    if tokens == 0:
        return
    block, residual_or_x = block_of(width), x if residual is None else residual
    _rms_norm_kernel[(tokens,)](
        out,
        x,
        residual_or_x,
        weight,
        eps,
        WIDTH=width,
        BLOCK=block,
        ADDS=residual is not None,
        num_warps=warps_for(block),
        **chained(x.device),
    )


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """Implements Kernels.rms_norm().

    Raises ValueError for shapes that do not fit and rows of more than launch.MAX_BLOCK columns.
    """
    _launch(out, x, None, weight, eps)


def fused_add_rms_norm(out: Tensor, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """Implements Kernels.fused_add_rms_norm().

    The sum is rounded to the residual's dtype before the norm. Raises the errors of rms_norm().
    """
    require_contiguous(residual)
    if residual.shape != x.shape:
        raise misfit(x, residual)
    _launch(out, x, residual, weight, eps)


BLOCK = 1024  # columns of a gate per program


@triton.jit
def _activate_and_mul_kernel(out, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, CHAINED: tl.constexpr):
    take_turn(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    offsets = token * (2 * WIDTH) + columns
    gate = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + offsets + WIDTH, mask=inside, other=0.0).to(tl.float32)
    # 0.5 (1 + tanh(u)) of gelu's approximation is sigmoid(2 u)
    exponent = 1.5957691216 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    value = gate / (1.0 + tl.exp(-exponent)) * up
    tl.store(out + token * WIDTH + columns, value.to(out.dtype.element_ty), mask=inside)


def silu_and_mul(out: Tensor, x: Tensor) -> None:
    """Implements Kernels.silu_and_mul(). Raises ValueError if the shapes do not fit."""
    _activate_and_mul(out, x, gelu=False)


def gelu_and_mul(out: Tensor, x: Tensor) -> None:
    """Implements Kernels.gelu_and_mul(). Raises ValueError if the shapes do not fit."""
    _activate_and_mul(out, x, gelu=True)


def _activate_and_mul(out: Tensor, x: Tensor, gelu: bool) -> None:
    require_contiguous(out, x)
    if out.dim() != 2 or x.shape != (out.shape[0], 2 * out.shape[1]):
        raise misfit(out, x)
    tokens, width = out.shape
    if tokens == 0:
        return
    block = min(BLOCK, triton.next_power_of_2(width))
    grid, warps = (tokens, triton.cdiv(width, block)), warps_for(block)
    _activate_and_mul_kernel[grid](out, x, WIDTH=width, BLOCK=block, GELU=gelu, num_warps=warps, **chained(x.device))


@triton.jit
def _sigmoid_mul_kernel(x, gate, size, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """Multiplies x by the sigmoid of the gate. Each element of the gate applies to WIDTH elements of x."""
    take_turn(CHAINED)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    wide = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 + tl.exp(-tl.load(gate + offsets // WIDTH, mask=inside, other=0.0).to(tl.float32))
    tl.store(x + offsets, (wide / factor).to(x.dtype.element_ty), mask=inside)


def sigmoid_mul(x: Tensor, gate: Tensor) -> None:
    """Implements Kernels.sigmoid_mul(). Raises ValueError if the shapes do not fit."""
    require_contiguous(x, gate)
    if x.shape != gate.shape and gate.shape != (len(x), 1):
        raise misfit(x, gate)
    size, width = x.numel(), x.shape[1] // gate.shape[1]
    if size:
        grid = (triton.cdiv(size, BLOCK),)
        _sigmoid_mul_kernel[grid](x, gate, size, WIDTH=width, BLOCK=BLOCK, num_warps=warps_for(BLOCK), **chained(x.device))
