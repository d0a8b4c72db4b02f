"""The Triton kernels as kernels.contracts.ops.Kernels and kernels.contracts.step_ops.StepKernels. Matrix products are
torch's (cuBLAS), but for those of one row, which it reads weights for too slowly, and deterministic ones: it chooses the order of
a row's sums by the number of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contracts.ops import PackedLinear, RaggedRows
from kernels.reference import layers
from kernels.triton.attention import attention
from kernels.triton.launch import misfit
from kernels.triton.layers import activation, norms, rope_kv, step, write_kv
from kernels.triton.layers.one_row import one_row_linear
from kernels.triton.layers.ordered_linear import OrderedLinear


class TritonLayers:
    """Holds nothing but its device. Every call is launched on the current stream of the current device, which has to be
    `device`, and can be captured in a CUDA graph once a call of the same shapes has compiled its kernel.

    gated_linear allocates [T, 2 N], and attention what it splits keys into: from torch's caching allocator, which under capture
    takes it from the graph's own pool and gives it to the next layer.
    """

    def __init__(self, device: torch.device, deterministic: bool = False) -> None:
        """deterministic: see Kernels; attention is then TritonAttention's of the same kind, not paged_attention()."""
        self._device, self._deterministic = device, deterministic
        self._in_order = OrderedLinear(device) if deterministic else None

    rms_norm = staticmethod(norms.rms_norm)
    fused_add_rms_norm = staticmethod(norms.fused_add_rms_norm)
    silu_and_mul = staticmethod(activation.silu_and_mul)
    write_kv = staticmethod(write_kv.write_kv)
    paged_attention = staticmethod(attention.paged_attention)
    general_attention = staticmethod(attention.general_attention)
    update_page_table = staticmethod(step.update_page_table)
    resolve_tokens = staticmethod(step.resolve_tokens)
    page_indices = staticmethod(step.page_indices)
    pack_linear = staticmethod(layers.pack_linear)
    pack_gated = staticmethod(layers.pack_gated)

    def allocate_pool(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def rope_write_kv(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        cos_sin: Tensor,
        rows: RaggedRows,
        k_pool: Tensor,
        v_pool: Tensor,
    ) -> None:
        """See Kernels. Raises ValueError for shapes that do not fit."""
        rope_kv.rope_write_kv(qkv, norms, eps, cos_sin, rows, k_pool, v_pool, self._deterministic)

    def linear(self, out: Tensor, x: Tensor, weight: PackedLinear) -> None:
        """See Kernels. Raises ValueError for shapes that do not fit, and an output neither of x's dtype nor float32."""
        if self._in_order is not None:
            self._in_order(out, x, weight)
            return
        if weight.packed or x.shape[1] != weight.in_features or out.shape != (x.shape[0], weight.out_features):
            raise misfit(out, x, weight.data)
        if x.shape[0] == 1:
            one_row_linear(out, x, weight)
            return
        transposed = weight.data.t()
        if out.dtype == x.dtype:
            if weight.bias is None:
                torch.mm(x, transposed, out=out)
            else:
                torch.addmm(weight.bias, x, transposed, out=out)
            return
        if out.dtype != torch.float32:
            raise misfit(out, x, weight.data)
        if x.is_cuda:
            torch.mm(x, transposed, out_dtype=torch.float32, out=out)
        else:
            torch.mm(x.float(), transposed.float(), out=out)
        if weight.bias is not None:
            out.add_(weight.bias)

    def gated_linear(self, out: Tensor, x: Tensor, weight: PackedLinear) -> None:
        """See Kernels. Raises as linear."""
        if self._in_order is not None:
            self._in_order.gated(out, x, weight)
            return
        both = x.new_empty((x.shape[0], weight.out_features))
        self.linear(both, x, weight)
        activation.silu_and_mul(out, both)
