"""The layers of decoder models, and the buffers that the layers of one forward pass share.

A layer has its weights in the layout of its kernels, and these methods:

- `read()` makes the layer from the tensors of a WeightReader.
- `forward()` writes the result into its first argument.
- `tensors()` yields the weights that stay in memory.
- `buffers()` returns the activation buffers that forward() uses, if there are any.
- `cache` is the size of a token's KV, if the layer has KV.

Shapes: T tokens of the pass, hidden size N, H query heads, G key/value heads, head size D, vocabulary V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import Kernels, PackedLinear, RaggedRows
from rootstock_llm.services.worker.exec.pools.kv_pool import LayerKV
from rootstock_llm.services.worker.exec.weights.source import WeightReader

Take = Callable[[str, int], Tensor]  # returns the buffer [T, columns] of a name, see ForwardContext.take()


class Workspace:
    """Activation buffers that stay allocated from step to step, because new memory would cause page faults.

    Until fix() is called, a buffer grows to the largest requested size. Then sizes and addresses are constant, because captured
    graphs contain the addresses.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._buffers: dict[str, Tensor] = {}
        self._fixed = False

    def fix(self) -> None:
        self._fixed = True

    def take(self, name: str, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the buffer of this name as [rows, columns], with undefined content. Valid until the next take() of the name.

        Raises:
            ValueError: the workspace is fixed and has no buffer of this name and size.
        """
        assert rows >= 0 and columns > 0, "a buffer has columns"
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < rows * columns:
            if self._fixed:
                raise ValueError(
                    f"buffer {name} is too small for {rows} rows of {columns}, and its size is fixed after reserve()"
                )
            buffer = self._buffers[name] = torch.empty(rows * columns, dtype=dtype or self._dtype, device=self._device)
        assert buffer.dtype == (dtype or self._dtype), "all calls for a name have the same dtype"
        assert buffer.numel() >= rows * columns, "a buffer has at least the requested size"
        return buffer[: rows * columns].view(rows, columns)


class Attend(Protocol):
    """Kernels.paged_attention, or the attend() of an attention back end."""

    def __call__(
        self, out: Tensor, qkv: Tensor, k_pool: Tensor, v_pool: Tensor, rows: RaggedRows, scale: float, window: int
    ) -> None: ...


class ForwardContext:
    """The inputs and the activation buffers that all layers of one forward pass over T tokens share.

    The output of a layer is the sum of the buffers `residual` and `update`, [T, N] each. `hidden` is a buffer for normed states.
    """

    def __init__(self, space: Workspace, hidden_size: int, rows: RaggedRows, cos_sin: Tensor, attend: Attend) -> None:
        """Takes the buffers that every layer uses.

        Args:
            space: owns the buffers.
            cos_sin: float32[positions, D]: per position, the cosines and then the sines of D / 2 angles.
        """
        self.rows, self.cos_sin, self.attend = rows, cos_sin, attend
        self._space, self._num_tokens = space, len(rows.positions)
        self._taken: dict[tuple[str, int], Tensor] = {}
        self.residual, self.update, self.hidden = stream_buffers(self.take, hidden_size)

    def take(self, name: str, columns: int) -> Tensor:
        """Returns the buffer [T, columns] of this name. All layers that take a name get the same memory."""
        found = self._taken.get((name, columns))
        if found is None:
            found = self._taken[name, columns] = self._space.take(name, self._num_tokens, columns)
        return found


def stream_buffers(take: Take, hidden_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the buffers `residual`, `update` and `hidden` of a forward pass, [T, N] each."""
    return take("residual", hidden_size), take("update", hidden_size), take("hidden", hidden_size)


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b."""

    packed: PackedLinear  # W and b in the layout of the kernels
    kernels: Kernels

    @classmethod
    def read(cls, weights: WeightReader, parts: Sequence[tuple[str, int]], in_features: int, bias: bool = False) -> Linear:
        """Reads several projections of one input as one matrix.

        Args:
            parts: names of the projections and their numbers of output features.
        """
        return cls(weights.kernels.pack_linear(*weights.stacked(parts, in_features, bias)), weights.kernels)

    def forward(self, out: Tensor, x: Tensor) -> None:
        self.kernels.linear(out, x, self.packed)

    def tensors(self) -> Iterator[Tensor]:
        yield from packed_tensors(self.packed)


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467)."""

    weight: Tensor
    eps: float
    kernels: Kernels

    @classmethod
    def read(cls, weights: WeightReader, size: int, eps: float) -> RmsNorm:
        return cls(weights.tensor("weight", size), eps, weights.kernels)

    def forward(self, out: Tensor, x: Tensor) -> None:
        self.kernels.rms_norm(out, x, self.weight, self.eps)

    def add(self, out: Tensor, update: Tensor, residual: Tensor) -> None:
        """Adds the update to the residual in place, and writes the norm of the sum to `out`."""
        self.kernels.fused_add_rms_norm(out, update, residual, self.weight, self.eps)

    def tensors(self) -> Iterator[Tensor]:
        yield self.weight


@dataclass(frozen=True, slots=True)
class Embedding:
    """A vector for each token of the vocabulary."""

    weight: Tensor  # [V, N]

    @classmethod
    def read(cls, weights: WeightReader, vocab_size: int, hidden_size: int) -> Embedding:
        return cls(weights.tensor("weight", vocab_size, hidden_size))

    def forward(self, out: Tensor, input_ids: Tensor) -> None:
        torch.index_select(self.weight, 0, input_ids, out=out)

    def tensors(self) -> Iterator[Tensor]:
        yield self.weight


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention with rotary position embedding, over keys and values in pages."""

    qkv: Linear
    o: Linear
    qk_norms: tuple[Tensor, Tensor] | None  # weights [D] of the RMS norms of queries and of keys, or None without norms
    eps: float  # epsilon of these norms
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int  # number of last tokens, itself included, to which a token attends; 0 for all
    kernels: Kernels

    @classmethod
    def read(
        cls,
        weights: WeightReader,
        in_features: int,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int,
        eps: float,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm: bool,
    ) -> Attention:
        q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
        qkv = [("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)]
        norms = [weights.tensor(f"{name}.weight", head_dim) for name in ("q_norm", "k_norm") if qk_norm]
        assert len(norms) in (0, 2), "either both queries and keys have a norm, or none of them"
        return cls(
            qkv=Linear.read(weights, qkv, in_features, qkv_bias),
            o=Linear.read(weights, [("o_proj", hidden_size)], q_size, o_bias),
            qk_norms=(norms[0], norms[1]) if norms else None,
            eps=eps,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=window,
            kernels=weights.kernels,
        )

    @property
    def cache(self) -> LayerKV:
        """The size of a token's KV in the layer."""
        return LayerKV(self.num_kv_heads, self.head_dim, self.head_dim)

    def buffers(self, take: Take) -> tuple[Tensor, Tensor]:
        """Returns the buffers of queries, keys and values, [T, (H + 2 G) D], and of the attention result, [T, H D]."""
        return take("qkv", self.qkv.packed.out_features), take("mixed", self.o.packed.in_features)

    def forward(self, out: Tensor, x: Tensor, pools: tuple[Tensor, Tensor], context: ForwardContext) -> None:
        """Writes keys and values of the tokens to the pools, and the attention's output to out [T, N]."""
        assert context.cos_sin.shape[1] == self.head_dim, "the table has cosines and sines of D / 2 angles"
        qkv, mixed = self.buffers(context.take)
        keys, values = pools
        self.qkv.forward(qkv, x)
        self.kernels.rope_write_kv(qkv, self.qk_norms, self.eps, context.cos_sin, context.rows, keys, values)
        context.attend(mixed, qkv, keys, values, context.rows, self.head_dim**-0.5, self.window)
        self.o.forward(out, mixed)

    def tensors(self) -> Iterator[Tensor]:
        yield from self.qkv.tensors()
        yield from self.o.tensors()
        yield from self.qk_norms or ()


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """y = down(silu(gate(x)) * up(x)) (SwiGLU, arXiv 2002.05202)."""

    gate_up: PackedLinear
    down: Linear
    kernels: Kernels

    @classmethod
    def read(cls, weights: WeightReader, hidden_size: int, intermediate_size: int, bias: bool) -> GatedMlp:
        gate_up = [("gate_proj", intermediate_size), ("up_proj", intermediate_size)]
        return cls(
            gate_up=weights.kernels.pack_gated(*weights.stacked(gate_up, hidden_size, bias)),
            down=Linear.read(weights, [("down_proj", hidden_size)], intermediate_size, bias),
            kernels=weights.kernels,
        )

    def buffers(self, take: Take) -> Tensor:
        return take("activated", self.down.packed.in_features)

    def forward(self, out: Tensor, x: Tensor, context: ForwardContext) -> None:
        activated = self.buffers(context.take)
        self.kernels.gated_linear(activated, x, self.gate_up)
        self.down.forward(out, activated)

    def tensors(self) -> Iterator[Tensor]:
        yield from packed_tensors(self.gate_up)
        yield from self.down.tensors()


@dataclass(frozen=True, slots=True)
class TransformerLayer:
    """Attention and an MLP. Each of them has a norm before it, and its output is added to the residual stream."""

    input_norm: RmsNorm
    attention: Attention
    post_norm: RmsNorm
    mlp: GatedMlp

    @property
    def cache(self) -> LayerKV:
        return self.attention.cache

    def reserve(self, take: Take) -> None:
        """Takes all buffers that forward() uses, so that they are allocated before the first step."""
        self.attention.buffers(take)
        self.mlp.buffers(take)

    def forward(self, x: Tensor, pools: tuple[Tensor, Tensor], context: ForwardContext) -> None:
        """Adds the output of attention to context.residual, and writes the output of the MLP to context.update.

        Args:
            x: [T, K], the input of attention after its norm. It may be context.hidden.
            pools: the layer's keys and values.
        """
        self.attention.forward(context.update, x, pools, context)
        self.post_norm.add(context.hidden, context.update, context.residual)
        self.mlp.forward(context.update, context.hidden, context)

    def tensors(self) -> Iterator[Tensor]:
        for part in (self.input_norm, self.attention, self.post_norm, self.mlp):
            yield from part.tensors()


@dataclass(frozen=True, slots=True)
class Head:
    """The projection of hidden states to logits of the vocabulary."""

    linear: Linear

    @classmethod
    def read(cls, weights: WeightReader, vocab_size: int, hidden_size: int) -> Head:
        return cls(Linear(weights.kernels.pack_linear(weights.view("weight", vocab_size, hidden_size), None), weights.kernels))

    @classmethod
    def tied(cls, embedding: Embedding, kernels: Kernels) -> Head:
        """Returns the head that uses the weight of the embedding."""
        return cls(Linear(kernels.pack_linear(embedding.weight, None), kernels))

    @property
    def vocab_size(self) -> int:
        return self.linear.packed.out_features

    def forward(self, logits: Tensor, x: Tensor) -> None:
        """Writes the logits, float32[T, V]."""
        self.linear.forward(logits, x)

    def tensors(self) -> Iterator[Tensor]:
        yield from self.linear.tensors()


def packed_tensors(linear: PackedLinear) -> list[Tensor]:
    return [linear.data] if linear.bias is None else [linear.data, linear.bias]


def storage_bytes(tensors: Iterable[Tensor], shared: Iterable[Tensor] = ()) -> int:
    """Returns the bytes of the tensors, except those that share storage with `shared`. Shared storage counts once."""
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    for tensor in shared:
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(sizes.values())
