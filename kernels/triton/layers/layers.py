"""Implements Kernels and StepKernels with the Triton kernels.

torch (cuBLAS) computes the matrix products. Triton kernels compute four kinds of products:

- products of one row, for which cuBLAS reads the weight too slowly
- deterministic products, because cuBLAS chooses the order of a row's sums by the number of rows
- products with weights that have codes
- products of experts
"""

from __future__ import annotations

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import PackedExperts, PackedLinear, RaggedRows, misfit
from rootstock_llm.kernels.reference import layers
from rootstock_llm.kernels.triton.attention import attention
from rootstock_llm.kernels.triton.layers import elementwise, experts, gated_delta, kv_writes, step
from rootstock_llm.kernels.triton.layers.coded import CodedWeights
from rootstock_llm.kernels.triton.layers.linear import OrderedLinear, one_row_linear
from rootstock_llm.kernels.triton.layers.route import route


class TritonLayers:
    """The Triton kernels of a model's layers. An instance has tables of coded weights and, if deterministic, counters.

    Every call launches on the current stream of the current device, which must be `device`. A CUDA graph can capture a call only
    after an earlier call with the same shapes has compiled the kernel.

    linear(), gated_linear(), experts() and paged_attention() may allocate temporary tensors with torch's caching allocator. In a
    capture, the allocator takes the memory from the graph's pool and reuses it for the next layer.
    """

    def __init__(self, device: torch.device, deterministic: bool = False) -> None:
        """Prepares the kernels for one device.

        Args:
            device: the device of all tensors.
            deterministic: whether results have the guarantees of a deterministic implementation of Kernels. paged_attention()
                does not have them; the caller uses TritonAttention instead.
        """
        self._device, self._deterministic = device, deterministic
        self._in_order = OrderedLinear(device) if deterministic else None
        self._coded = CodedWeights(device)

    rms_norm = staticmethod(elementwise.rms_norm)
    fused_add_rms_norm = staticmethod(elementwise.fused_add_rms_norm)
    silu_and_mul = staticmethod(elementwise.silu_and_mul)
    gelu_and_mul = staticmethod(elementwise.gelu_and_mul)
    sigmoid_mul = staticmethod(elementwise.sigmoid_mul)
    gated_delta_rule = staticmethod(gated_delta.gated_delta_rule)
    gated_rms_norm = staticmethod(gated_delta.gated_rms_norm)
    write_kv = staticmethod(kv_writes.write_kv)
    paged_attention = staticmethod(attention.paged_attention)
    update_page_table = staticmethod(step.update_page_table)
    resolve_tokens = staticmethod(step.resolve_tokens)
    page_indices = staticmethod(step.page_indices)
    pack_linear = staticmethod(layers.pack_linear)
    pack_gated = staticmethod(layers.pack_gated)
    embedding = staticmethod(layers.embedding)
    pack_experts = staticmethod(layers.pack_experts)
    route = staticmethod(route)

    def allocate_pool(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def experts(self, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, packed: PackedExperts) -> None:
        """Implements Kernels.experts(). Raises ValueError if the shapes do not fit."""
        experts.experts(out, x, ids, weights, packed, self._coded, self._deterministic)

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
        """Implements Kernels.rope_write_kv(). Raises ValueError if the shapes do not fit."""
        kv_writes.rope_write_kv(qkv, norms, eps, cos_sin, rows, k_pool, v_pool, self._deterministic)

    def linear(self, out: Tensor, x: Tensor, weight: PackedLinear) -> None:
        """Implements Kernels.linear().

        Raises:
            ValueError: the shapes do not fit, or the output has neither x's dtype nor float32.
        """
        if weight.scheme is not None:
            self._coded.linear(out, x, weight)
            return
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
        """Implements Kernels.gated_linear(). Raises the errors of linear()."""
        if self._in_order is not None and weight.scheme is None:
            self._in_order.gated(out, x, weight)
            return
        both = x.new_empty((x.shape[0], weight.out_features))
        self.linear(both, x, weight)
        elementwise.silu_and_mul(out, both)
