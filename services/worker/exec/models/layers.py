"""The layers of decoder models, and the buffers that the layers of one forward pass share.

A layer has its weights in the layout of its kernels, and these methods:

- `read()` makes the layer from the tensors of a WeightReader.
- `forward()` writes the result into its first argument.
- `tensors()` yields the weights that stay in memory.
- `reserve()` takes the activation buffers that forward() uses, if there are any.
- `cache` is the size of a token's KV or of a state, if the layer has one.

Shapes: T tokens of the pass, hidden size N, H query heads, G key/value heads, head size D, vocabulary V.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.coded_weight import CodedWeight, Scheme
from rootstock_llm.kernels.contracts.ops import Kernels, PackedLinear, RaggedRows, ScoreRule
from rootstock_llm.services.worker.exec.pools.kv_pool import LayerCache
from rootstock_llm.services.worker.exec.weights.checkpoint import CheckpointError
from rootstock_llm.services.worker.exec.weights.source import WeightReader


class Take(Protocol):
    """Returns the buffer [T, columns] of a name, in the model dtype if `dtype` is None, see ForwardContext.take()."""

    def __call__(self, name: str, columns: int, dtype: torch.dtype | None = None) -> Tensor: ...


class Workspace:
    """Activation buffers that stay allocated from step to step, because new memory would cause page faults.

    Until fix() is called, a buffer grows to the largest requested size. After fix(), sizes and addresses are constant, because
    captured graphs contain the addresses.
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
            ValueError: the workspace is fixed, and has no buffer of this name that is large enough.
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

    def __call__(self, out: Tensor, q: Tensor, k_pool: Tensor, v_pool: Tensor, rows: RaggedRows, rule: ScoreRule) -> None: ...


class ForwardContext:
    """The inputs and the activation buffers that all layers of one forward pass over T tokens share.

    The output of a layer is the sum of the buffers `residual` and `update`, [T, N] each. `hidden` is a buffer for normed states.
    """

    def __init__(self, space: Workspace, hidden_size: int, rows: RaggedRows, cos_sin: Sequence[Tensor], attend: Attend) -> None:
        """Takes the buffers that every layer uses.

        Args:
            space: owns the buffers.
            cos_sin: tables of rotary angles, float32[positions, D] each: per position, the cosines and then the sines of D / 2
                angles. Attention.rope is the index of a layer's table.
        """
        self.rows, self.cos_sin, self.attend = rows, cos_sin, attend
        self._space, self._num_tokens = space, len(rows.positions)
        self._taken: dict[tuple[str, int], Tensor] = {}
        self._taken_each: dict[str, Sequence[Tensor]] = {}
        self.residual, self.update, self.hidden = stream_buffers(self.take, hidden_size)

    @cached_property
    def window_rows(self) -> RaggedRows:
        """The rows with the page table of windowed layers."""
        return self.rows.in_windows()

    def take(self, name: str, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the buffer [T, columns] of this name. All layers that take a name get the same memory.

        Args:
            dtype: dtype of the buffer, the same in all calls for the name; None for the model dtype.
        """
        found = self._taken.get((name, columns))
        if found is None:
            found = self._taken[name, columns] = self._space.take(name, self._num_tokens, columns, dtype)
        return found

    def take_each(self, name: str, count: int, columns: int, dtype: torch.dtype) -> Sequence[Tensor]:
        """Returns the parts [T, columns] of the buffer [count, T, columns] of this name, such as one for each layer."""
        found = self._taken_each.get(name)
        if found is None:
            whole = self.take(name, count * columns, dtype)
            found = self._taken_each[name] = whole.view(count, self._num_tokens, columns).unbind(0)
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
        return cls(weights.kernels.pack_linear(*weights.matrix(parts, in_features, bias)), weights.kernels)

    def forward(self, out: Tensor, x: Tensor) -> None:
        self.kernels.linear(out, x, self.packed)

    def tensors(self) -> Iterator[Tensor]:
        yield from self.packed.tensors


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467)."""

    weight: Tensor  # float32
    eps: float
    kernels: Kernels

    @classmethod
    def read(cls, weights: WeightReader, size: int, eps: float, centered: bool = False) -> RmsNorm:
        """Reads the weight of the norm.

        Args:
            centered: whether the checkpoint has the weight minus 1. The sum with 1 is computed in float32, as Gemma does it.
        """
        weight = weights.tensor("weight", size).float()
        return cls(weight + 1.0 if centered else weight, eps, weights.kernels)

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

    packed: PackedLinear  # [V, N]; also the weight of a tied vocabulary projection
    dtype: torch.dtype  # model dtype
    kernels: Kernels
    scale: float = 1.0  # factor of the vectors, a number of the model dtype; a tied vocabulary projection does not have it

    @classmethod
    def read(cls, weights: WeightReader, vocab_size: int, hidden_size: int, scale: float = 1.0, tied: bool = False) -> Embedding:
        """Reads the vectors of all tokens of the vocabulary.

        Args:
            tied: whether the vectors are also the weight of the vocabulary projection. Kernels then pack them for both uses, so
                that memory has them once.

        Raises:
            CheckpointError: the vectors have codes of which kernels cannot read a row.
        """
        if tied:
            matrix = weights.vocabulary(vocab_size, hidden_size)
            if isinstance(matrix, CodedWeight) and (matrix.scheme != Scheme(8) or matrix.order is not None):
                raise CheckpointError(
                    f"{weights.prefix}weight is the embedding and the vocabulary projection, and has"
                    f" {'act-order' if matrix.order is not None else matrix.scheme}; supported: {Scheme(8)}"
                )
            packed = weights.kernels.pack_linear(matrix, None)
        else:
            weight = weights.tensor("weight", vocab_size, hidden_size)
            packed = PackedLinear(weight, None, hidden_size, vocab_size, packed=False)
        dtype = weights.source.dtype
        return cls(packed, dtype, weights.kernels, float(torch.tensor(scale, dtype=dtype)))

    @property
    def device(self) -> torch.device:
        return self.packed.data.device

    def forward(self, out: Tensor, input_ids: Tensor) -> None:
        self.kernels.embedding(out, input_ids, self.packed)
        if self.scale != 1.0:
            out.mul_(self.scale)

    def tensors(self) -> Iterator[Tensor]:
        yield from self.packed.tensors


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """y = down(silu(gate(x)) * up(x)) (SwiGLU, arXiv 2002.05202), or the same with gelu."""

    gate_up: PackedLinear
    down: Linear
    kernels: Kernels
    gelu: bool = False  # whether gelu takes the place of silu; gate_up is then a plain linear layer

    @classmethod
    def read(
        cls, weights: WeightReader, hidden_size: int, intermediate_size: int, bias: bool = False, gelu: bool = False
    ) -> GatedMlp:
        parts, kernels = [("gate_proj", intermediate_size), ("up_proj", intermediate_size)], weights.kernels
        pack = kernels.pack_linear if gelu else kernels.pack_gated
        gate_up = pack(*weights.matrix(parts, hidden_size, bias))
        return cls(gate_up, Linear.read(weights, [("down_proj", hidden_size)], intermediate_size, bias), kernels, gelu)

    def reserve(self, take: Take) -> None:
        """Takes all buffers that forward() uses, so that they are allocated before the first step."""
        take("activated", self.down.packed.in_features)
        if self.gelu:
            take("gate_up", self.gate_up.out_features)

    def forward(self, out: Tensor, x: Tensor, context: ForwardContext) -> None:
        """Writes the output to out [T, N]. `out` may be x."""
        activated = context.take("activated", self.down.packed.in_features)
        if self.gelu:
            both = context.take("gate_up", self.gate_up.out_features)
            self.kernels.linear(both, x, self.gate_up)
            self.kernels.gelu_and_mul(activated, both)
        else:
            self.kernels.gated_linear(activated, x, self.gate_up)
        self.down.forward(out, activated)

    def tensors(self) -> Iterator[Tensor]:
        yield from self.gate_up.tensors
        yield from self.down.tensors()


class Mixer(Protocol):
    """The part of a layer that reads earlier tokens: Attention or GatedDeltaNet."""

    @property
    def cache(self) -> LayerCache: ...

    def reserve(self, take: Take) -> None: ...

    def forward(self, out: Tensor, x: Tensor, pools: tuple[Tensor, ...], context: ForwardContext) -> None: ...

    def tensors(self) -> Iterator[Tensor]: ...


class Mlp(Protocol):
    """The part of a layer that computes each token separately: GatedMlp or Experts."""

    def reserve(self, take: Take) -> None: ...

    def forward(self, out: Tensor, x: Tensor, context: ForwardContext) -> None: ...

    def tensors(self) -> Iterator[Tensor]: ...


@dataclass(frozen=True, slots=True)
class TransformerLayer:
    """A mixer and an MLP. Each of them has a norm before it, and its output is added to the residual stream.

    In some models, each of them also has a norm after it.
    """

    input_norm: RmsNorm
    mixer: Mixer
    post_norm: RmsNorm  # norm before the MLP
    mlp: Mlp
    output_norms: tuple[RmsNorm, RmsNorm] | None = None  # norms of the outputs of mixer and MLP; None: they have no norms

    @property
    def cache(self) -> LayerCache:
        return self.mixer.cache

    def reserve(self, take: Take) -> None:
        """Takes all buffers that forward() uses, so that they are allocated before the first step."""
        self.mixer.reserve(take)
        self.mlp.reserve(take)

    def forward(self, x: Tensor, pools: tuple[Tensor, ...], context: ForwardContext) -> None:
        """Adds the output of the mixer to context.residual, and writes the output of the MLP to context.update.

        Args:
            x: [T, K], the input of the mixer after its norm. It may be context.hidden.
            pools: the layer's keys and values, or its states and saved inputs, see KVPool.layer().
        """
        hidden, update = context.hidden, context.update
        if self.output_norms is None:
            self.mixer.forward(update, x, pools, context)
            self.post_norm.add(hidden, update, context.residual)
            self.mlp.forward(update, hidden, context)
            return
        after_mixer, after_mlp = self.output_norms
        self.mixer.forward(hidden, x, pools, context)
        after_mixer.forward(update, hidden)
        self.post_norm.add(hidden, update, context.residual)
        self.mlp.forward(hidden, hidden, context)
        after_mlp.forward(update, hidden)

    def tensors(self) -> Iterator[Tensor]:
        for part in (self.input_norm, self.mixer, self.post_norm, self.mlp, *(self.output_norms or ())):
            yield from part.tensors()


@dataclass(frozen=True, slots=True)
class Head:
    """The projection of hidden states to logits of the vocabulary."""

    linear: Linear
    softcap: float = 0.0  # logits become softcap * tanh(logit / softcap); 0 for no cap (Gemma 2, arXiv 2408.00118, section 2)

    @classmethod
    def read(cls, weights: WeightReader, vocab_size: int, hidden_size: int, softcap: float = 0.0) -> Head:
        packed = weights.kernels.pack_linear(weights.vocabulary(vocab_size, hidden_size), None)
        return cls(Linear(packed, weights.kernels), softcap)

    @classmethod
    def tied(cls, embedding: Embedding, softcap: float = 0.0) -> Head:
        """Returns the head that has the weight of the embedding, which was read with `tied`."""
        return cls(Linear(embedding.packed, embedding.kernels), softcap)

    @property
    def vocab_size(self) -> int:
        return self.linear.packed.out_features

    def forward(self, logits: Tensor, x: Tensor) -> None:
        """Writes the logits, float32[T, V]."""
        self.linear.forward(logits, x)
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def tensors(self) -> Iterator[Tensor]:
        yield from self.linear.tensors()


def storage_bytes(tensors: Iterable[Tensor], shared: Iterable[Tensor] = ()) -> int:
    """Returns the bytes of the tensors, except those that share storage with `shared`. Shared storage counts once."""
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    for tensor in shared:
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(sizes.values())
