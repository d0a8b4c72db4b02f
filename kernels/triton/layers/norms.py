"""RMS norms: one program a token, which holds the whole row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.chaining import begin_next, chained, wait_for_last
from kernels.triton.launch import block_of, misfit, require_contiguous, warps_for


@triton.jit
def _rms_norm_kernel(out, x, residual, weight, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr,
                     CHAINED: tl.constexpr):  # fmt: skip
    begin_next(CHAINED)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    places = tl.program_id(0).to(tl.int64) * WIDTH + columns
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)  # in flight while the row is
    wait_for_last(CHAINED)
    wide = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        wide += tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(residual.dtype.element_ty)
        tl.store(residual + places, rounded, mask=inside)
        wide = rounded.to(tl.float32)  # the norm reads what the residual holds
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    tl.store(out + places, (wide * scale * gain).to(out.dtype.element_ty), mask=inside)


def _launch(out: Tensor, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> None:
    require_contiguous(out, x, weight)
    if x.dim() != 2 or out.shape != x.shape or weight.shape[0] != x.shape[1]:
        raise misfit(out, x, weight)
    tokens, width = x.shape
    if tokens == 0:
        return
    block, held = block_of(width), x if residual is None else residual
    _rms_norm_kernel[(tokens,)](
        out,
        x,
        held,
        weight,
        eps,
        WIDTH=width,
        BLOCK=block,
        ADDS=residual is not None,
        num_warps=warps_for(block),
        **chained(x.device),
    )


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """See Kernels. Raises ValueError for shapes that do not fit and rows of more than launch.MAX_BLOCK columns."""
    _launch(out, x, None, weight, eps)


def fused_add_rms_norm(out: Tensor, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """See Kernels: the sum is rounded to the residual's dtype before the norm reads it. Raises as rms_norm."""
    require_contiguous(residual)
    if residual.shape != x.shape:
        raise misfit(x, residual)
    _launch(out, x, residual, weight, eps)
