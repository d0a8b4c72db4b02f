"""Gated DeltaNet: a recurrent layer whose state is a matrix for each head (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.

    x ─┬─► queries, keys, values ─► causal convolution, silu ─► gated delta rule ─► norm ─► ◦ ─► output projection
       ├─► b, a: learning rate and decay of each value head ──────────┘                     │
       └─► z ─► silu ────────────────────────────────────────────────────────────────────────┘

Shapes: T tokens of the pass, hidden size N, I key heads of size D, J value heads of size E, C = 2 I D + J E channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import DeltaGates, DraftStates, Kernels, RaggedRows, StateRows
from rootstock_llm.services.worker.exec.models.layers import ForwardContext, Linear, RmsNorm, Take
from rootstock_llm.services.worker.exec.pools.kv_pool import LayerState
from rootstock_llm.services.worker.exec.weights.source import WeightReader


@dataclass(frozen=True, slots=True)
class DeltaNetSizes:
    """The sizes of the recurrent layers of a model."""

    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int  # elements of a key
    value_dim: int  # elements of a value
    taps: int  # width of the convolution

    @property
    def channels(self) -> int:
        """Number of elements of queries, keys and values together."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Number of elements of the values of all heads."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """The weights of one Gated DeltaNet layer."""

    sizes: DeltaNetSizes
    qkv: Linear  # projection to C features
    z: Linear  # projection to J E features
    gates: Linear  # projection to 2 J features: b, then a
    taps: Tensor  # [C, K], weight of the convolution
    decay: DeltaGates
    norm: Tensor  # float32[E], weight of the norm of a value head
    eps: float  # epsilon of this norm
    out: Linear
    kernels: Kernels

    @classmethod
    def read(cls, weights: WeightReader, hidden_size: int, sizes: DeltaNetSizes, eps: float) -> GatedDeltaNet:
        heads = sizes.value_heads
        rates = weights.tensor("A_log", heads).float().exp()
        return cls(
            sizes=sizes,
            qkv=Linear.read(weights, [("in_proj_qkv", sizes.channels)], hidden_size),
            z=Linear.read(weights, [("in_proj_z", sizes.values)], hidden_size),
            gates=Linear.read(weights, [("in_proj_b", heads), ("in_proj_a", heads)], hidden_size),
            taps=weights.tensor("conv1d.weight", sizes.channels, 1, sizes.taps).squeeze(1),
            decay=DeltaGates(rates, weights.tensor("dt_bias", heads).float()),
            norm=RmsNorm.read(weights.at("norm"), sizes.value_dim, eps).weight,
            eps=eps,
            out=Linear.read(weights, [("out_proj", hidden_size)], sizes.values),
            kernels=weights.kernels,
        )

    @property
    def cache(self) -> LayerState:
        """The size of a state of the layer."""
        sizes = self.sizes
        return LayerState(sizes.taps, sizes.channels, sizes.value_heads, sizes.key_dim, sizes.value_dim)

    def reserve(self, take: Take) -> None:
        """Takes all buffers that forward() uses, so that they are allocated before the first step."""
        self._buffers(take)

    def _buffers(self, take: Take) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sizes = self.sizes
        names = {"delta_qkv": sizes.channels, "delta_gates": 2 * sizes.value_heads, "delta_z": sizes.values}
        qkv, gates, z = (take(name, columns) for name, columns in names.items())
        return qkv, gates, z, take("delta_out", sizes.values)

    def forward(self, out: Tensor, x: Tensor, pools: tuple[Tensor, ...], context: ForwardContext) -> None:
        """Writes the layer's output to out [T, N], and the states that context.rows.states names. `out` may be x."""
        rows, states = context.rows, context.rows.states
        assert states is not None, "a step of a model with recurrent layers has state units"
        qkv, gates, z, mixed = self._buffers(context.take)
        self.qkv.forward(qkv, x)
        self.gates.forward(gates, x)
        self.z.forward(z, x)
        if rows.drafts is None:
            self._advance(mixed, qkv, gates, rows, states, pools)
        else:
            self._advance_with_drafts(mixed, qkv, gates, rows, states, rows.drafts, pools)
        heads = (-1, self.sizes.value_dim)
        normed = qkv.view(-1)[: z.numel()].view(z.shape)  # the memory of qkv, whose content is not needed any more
        self.kernels.gated_rms_norm(normed.view(heads), mixed.view(heads), z.view(heads), self.norm, self.eps)
        self.out.forward(out, normed)

    def _advance(
        self, out: Tensor, qkv: Tensor, gates: Tensor, rows: RaggedRows, states: StateRows, pools: tuple[Tensor, ...]
    ) -> None:
        self.kernels.gated_delta_rule(out, qkv, gates, self.taps, self.decay, rows, states, pools[0], pools[1])

    def _advance_with_drafts(
        self,
        out: Tensor,
        qkv: Tensor,
        gates: Tensor,
        rows: RaggedRows,
        states: StateRows,
        drafts: DraftStates,
        pools: tuple[Tensor, ...],
    ) -> None:
        """Replays accepted draft tokens, saves the inputs of the step's draft tokens, and computes the step's tokens.

        Args:
            out: [T, J E].
            qkv: [T, C]; overwritten.
            gates: [T, 2 J].
            pools: the states, then the saved inputs, see KVPool.layer().
        """
        saved = pools[2:]
        assert len(saved) == 2, "a pool for steps with draft tokens has saved inputs"
        earlier = [torch.index_select(inputs, 0, drafts.sources) for inputs in saved]
        for inputs, own in zip(saved, (qkv, gates), strict=True):
            inputs.index_copy_(0, drafts.targets, torch.index_select(own, 0, drafts.saved))
        count = len(drafts.sources) - drafts.num_inserted
        if len(drafts.replay_offsets):
            replays = replace(rows, offsets=drafts.replay_offsets, num_tokens=drafts.replay_num_tokens)
            dropped = out.new_empty((count, out.shape[1]))
            self._advance(dropped, earlier[0][:count], earlier[1][:count], replays, drafts.replays, pools)
        rows = replace(rows, offsets=drafts.offsets, num_tokens=drafts.num_tokens)
        if not drafts.num_inserted:
            self._advance(out, qkv, gates, rows, states, pools)
            return
        both = (torch.cat((part[count:], own)) for part, own in zip(earlier, (qkv, gates), strict=True))
        qkv, gates = (torch.index_select(inputs, 0, drafts.order) for inputs in both)
        with_inserted = out.new_empty((len(qkv), out.shape[1]))
        self._advance(with_inserted, qkv, gates, rows, states, pools)
        torch.index_select(with_inserted, 0, drafts.own, out=out)

    def tensors(self) -> Iterator[Tensor]:
        for part in (self.qkv, self.z, self.gates, self.out):
            yield from part.tensors()
        yield from (self.taps, self.decay.rates, self.decay.biases, self.norm)
