"""Grouped-query attention with rotary position embedding, over keys and values in pages.

Shapes: T tokens of the pass, hidden size N, H query heads, G key/value heads, head size D.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.coded_weight import Matrix, selected_rows
from rootstock_llm.kernels.contracts.ops import Kernels, ScoreRule
from rootstock_llm.services.worker.exec.models.layers import ForwardContext, Linear, RmsNorm, Take
from rootstock_llm.services.worker.exec.pools.kv_pool import LayerKV
from rootstock_llm.services.worker.exec.weights.source import WeightReader


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """Sizes and switches of the attention of all layers of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # number of a head's first elements that are rotated; even
    scale: float  # factor of the scores
    eps: float  # epsilon of the norms of queries and keys
    qkv_bias: bool = False  # whether the projections to queries, keys and values have biases
    o_bias: bool = False  # whether the output projection has a bias
    qk_norm: bool = False  # whether an RMS norm is applied to each head's queries and keys
    centered_norms: bool = False  # whether the checkpoint has the norms' weights minus 1
    has_gate: bool = False  # whether q_proj also has an output gate
    softcap: float = 0.0  # cap of the scores, see ScoreRule
    has_sinks: bool = False  # whether each head has a sink, see ScoreRule

    @property
    def norm_names(self) -> tuple[str, ...]:
        return ("q_norm", "k_norm") if self.qk_norm else ()

    def head_order(self) -> Tensor:
        """Returns the order of a head's elements in which the kernels rotate them, int64[D].

        The kernels rotate element i with element i + D / 2. A model with partial rotation rotates element i with element
        i + R / 2 for i < R / 2, where R is rotary_dim. Queries and keys may have any order of elements if they have the same one.
        """
        half, rotated = self.head_dim // 2, self.rotary_dim // 2
        order = torch.arange(self.head_dim)
        rest = order[self.rotary_dim :]
        return torch.cat((order[:rotated], rest[: half - rotated], order[rotated : 2 * rotated], rest[half - rotated :]))

    def qkv_rows(self) -> Tensor | None:
        """Returns the rows of queries, keys and values in the stacked q_proj, k_proj and v_proj; None if these are all rows."""
        if not self.has_gate and self.rotary_dim == self.head_dim:
            return None
        dim, order = self.head_dim, self.head_order()
        stride, first = 2 * dim if self.has_gate else dim, 0
        queries = [head * stride + order for head in range(self.num_heads)]
        first = self.num_heads * stride
        keys = [first + head * dim + order for head in range(self.num_kv_heads)]
        first += self.num_kv_heads * dim
        return torch.cat((*queries, *keys, torch.arange(first, first + self.num_kv_heads * dim)))

    def gate_rows(self) -> Tensor | None:
        """Returns the rows of the gate in q_proj, int64[H D]; None without a gate."""
        if not self.has_gate:
            return None
        heads = torch.arange(self.num_heads)[:, None] * 2 * self.head_dim
        return (heads + self.head_dim + torch.arange(self.head_dim)).flatten()


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention with rotary position embedding, over keys and values in pages."""

    sizes: AttentionSizes
    qkv: Linear
    o: Linear
    gate: Linear | None  # projection to H D features, whose sigmoid multiplies the attention result; None without a gate
    qk_norms: tuple[Tensor, Tensor] | None  # weights float32[D] of the RMS norms of queries and of keys, or None without norms
    rule: ScoreRule
    rope: int  # index of the layer's table in ForwardContext.cos_sin
    kernels: Kernels

    @classmethod
    def read(
        cls, weights: WeightReader, in_features: int, hidden_size: int, sizes: AttentionSizes, window: int, rope: int = 0
    ) -> Attention:
        """Reads the projections and norms of the layer.

        Args:
            weights: reader with the prefix of the attention.
            in_features: size of the input.
            hidden_size: size of the output.
            window: see ScoreRule.
            rope: index of the layer's table, see Attention.rope.
        """
        dim, q_size, kv_size = sizes.head_dim, sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        # With a gate, the rows of q_proj are, for each head, D rows of the query and D rows of the gate.
        parts = [("q_proj", 2 * q_size if sizes.has_gate else q_size), ("k_proj", kv_size), ("v_proj", kv_size)]
        weight, bias = weights.matrix(parts, in_features, sizes.qkv_bias)
        kernels, gate = weights.kernels, None
        if (rows := sizes.gate_rows()) is not None:
            gate = Linear(kernels.pack_linear(*_selected(weight, bias, rows)), kernels)
        if (rows := sizes.qkv_rows()) is not None:
            weight, bias = _selected(weight, bias, rows)
        qkv = Linear(kernels.pack_linear(weight, bias), kernels)
        del weight, bias  # the kernels may have packed a copy
        sinks = weights.tensor("sinks", sizes.num_heads).float() if sizes.has_sinks else None
        norms = [RmsNorm.read(weights.at(name), dim, sizes.eps, sizes.centered_norms).weight for name in sizes.norm_names]
        if sizes.rotary_dim < dim:
            norms = [torch.index_select(norm, 0, sizes.head_order().to(norm.device)) for norm in norms]
        return cls(
            sizes=sizes,
            qkv=qkv,
            o=Linear.read(weights, [("o_proj", hidden_size)], q_size, sizes.o_bias),
            gate=gate,
            qk_norms=(norms[0], norms[1]) if norms else None,
            rule=ScoreRule(sizes.scale, window, sizes.softcap, sinks),
            rope=rope,
            kernels=kernels,
        )

    @property
    def cache(self) -> LayerKV:
        """The size of a token's KV in the layer."""
        return LayerKV(self.sizes.num_kv_heads, self.sizes.head_dim, self.sizes.head_dim, self.rule.window)

    def reserve(self, take: Take) -> None:
        """Takes all buffers that forward() uses, so that they are allocated before the first step."""
        self.buffers(take)
        if self.gate is not None:
            take("gate", self.gate.packed.out_features)

    def buffers(self, take: Take) -> tuple[Tensor, Tensor]:
        """Returns the buffers of queries, keys and values, [T, (H + 2 G) D], and of the attention result, [T, H D]."""
        return take("qkv", self.qkv.packed.out_features), take("mixed", self.o.packed.in_features)

    def forward(self, out: Tensor, x: Tensor, pools: tuple[Tensor, ...], context: ForwardContext) -> None:
        """Writes keys and values of the tokens to the pools, and the attention's output to out [T, N].

        `out` may be x.
        """
        cos_sin, rows = context.cos_sin[self.rope], context.window_rows if self.rule.window else context.rows
        assert cos_sin.shape[1] == self.sizes.head_dim, "the table has cosines and sines of D / 2 angles"
        qkv, mixed = self.buffers(context.take)
        keys, values = pools
        self.qkv.forward(qkv, x)
        self.kernels.rope_write_kv(qkv, self.qk_norms, self.sizes.eps, cos_sin, rows, keys, values)
        context.attend(mixed, qkv, keys, values, rows, self.rule)
        if self.gate is not None:
            gate = context.take("gate", self.gate.packed.out_features)
            self.gate.forward(gate, x)
            self.kernels.sigmoid_mul(mixed, gate)
        self.o.forward(out, mixed)

    def tensors(self) -> Iterator[Tensor]:
        yield from self.qkv.tensors()
        yield from self.o.tensors()
        yield from () if self.gate is None else self.gate.tensors()
        yield from self.qk_norms or ()
        yield from () if self.rule.sinks is None else (self.rule.sinks,)


def _selected(weight: Matrix, bias: Tensor | None, rows: Tensor) -> tuple[Matrix, Tensor | None]:
    """Returns the given rows of a matrix and of its biases."""
    return selected_rows(weight, rows), None if bias is None else torch.index_select(bias, 0, rows.to(bias.device))
