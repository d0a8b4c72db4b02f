"""The kernels a decoder needs, as one protocol. kernels.reference.layers satisfies it as a module, kernels.cpu as an object.

Shapes: T tokens of a ragged batch (rows one after the other), R rows, H query heads, G key/value heads, D head size,
P pages of S tokens. The model dtype (float32, bfloat16, float16) is that of every tensor unless said otherwise.
Outputs are written into the first argument; it may alias no input. All tensors are contiguous and on one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight in the layout its kernel wants. Made and read by the same Kernels only.

    data: weight, either as [N, K] or packed; bias: [N] in the model dtype, or None.
    """

    data: Tensor
    bias: Tensor | None
    in_features: int
    out_features: int
    packed: bool


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Which tokens a step computes. Row r computes positions starts[r] .. starts[r] + num_tokens[r] - 1 of one sequence.

    page_table: int32[slots, pages], page ids of each slot's sequence; entries below 0 are read as page 0.
    slots, starts, num_tokens, offsets: int32[R]; offsets[r] is the row's first token in the batch.
    positions: int32[T]. locations: int64[T], page * S + offset in page where a token's key and value go; below 0: nowhere.
    max_context: the largest starts[r] + num_tokens[r].
    """

    page_table: Tensor
    slots: Tensor
    starts: Tensor
    num_tokens: Tensor
    offsets: Tensor
    positions: Tensor
    locations: Tensor
    max_context: int


class Kernels(Protocol):
    """Deterministic kernels keep a second contract: what a row of linear(), of a norm or of an activation gets, and a token of
    paged_attention(), is a function of that row, or of the tokens before it, alone, to the last bit: not of how many others there
    are, where a prompt is cut, which pages hold it. For one build and one CPU's instruction sets. CpuKernels says how."""

    def allocate_pool(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for a key or value pool. Contents undefined, committed by the system as pages are first written."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """weight [N, K] -> the layout linear() reads. The weight may be dropped afterwards."""

    def linear(self, out: Tensor, x: Tensor, weight: PackedLinear) -> None:
        """out [T, N] (model dtype or float32) = x [T, K] @ weight.T + bias, accumulated in float32."""

    def pack_gated(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """weight [2 N, K], the N gate rows first -> the layout gated_linear() reads."""

    def gated_linear(self, out: Tensor, x: Tensor, weight: PackedLinear) -> None:
        """out [T, N] = silu(x @ gate.T) * (x @ up.T), biases added before."""

    def rms_norm(self, out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
        """out [T, N] = x / sqrt(mean(x^2) + eps) * weight [N], computed in float32."""

    def fused_add_rms_norm(self, out: Tensor, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        """residual [T, N] += x in place, then out = rms_norm(residual)."""

    def silu_and_mul(self, out: Tensor, x: Tensor) -> None:
        """out [T, N] = silu(x[:, :N]) * x[:, N:], x [T, 2N]."""

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
        """Rotates q and k of qkv [T, (H + 2G) D] (neox style: halves), each head RMS-normed first if norms (q, k: [D]) are given.

        q is rewritten in place; k and v go to the pools [P, G, S, D] at rows.locations and nowhere else.
        cos_sin: float32[positions, D], cosines then sines of D / 2 angles.
        """

    def paged_attention(
        self, out: Tensor, qkv: Tensor, k_pool: Tensor, v_pool: Tensor, rows: RaggedRows, scale: float, window: int
    ) -> None:
        """out [T, H D]: each token attends to positions 0 .. its own through its row's page table.

        q is the first H D columns of qkv [T, (H + 2G) D]; H / G query heads share a key/value head.
        window: 0 for none, else only the last `window` positions, the token's own included.
        """

    def write_kv(self, keys: Tensor, values: Tensor, rows: RaggedRows, k_pool: Tensor, v_pool: Tensor) -> None:
        """keys [T, G, D], values [T, G, E] -> the pools [P, G, S, D] and [P, G, S, E], at rows.locations and nowhere else."""

    def general_attention(
        self,
        out: Tensor,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        rows: RaggedRows,
        scale: float,
        window: int,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> None:
        """paged_attention for more kinds: q [T, H, D], pools [P, G, S, D] and [P, G, S, E], out [T, H, E].

        softcap: scores become softcap * tanh(score / softcap), 0 for none. sinks: [H], joins each softmax with no value of
        its own.
        """
