"""Implements MLPs of experts: a router chooses a few gated MLPs for each token (arXiv 1701.06538, section 2; arXiv 2101.03961).

    x ─┬─► router ─► ids and routing weights ─┐
       ├──────────────────────────────────────┴─► experts ─► + ─► out
       └─► shared expert ─► ◦ ───────────────────────────────┘
                            └─ sigmoid of a linear layer with one output, in some models

A checkpoint stores the experts of a layer in one of three ways. E experts, hidden size N, I features of an expert:

| experts | tensors |
|---|---|
| fused | `experts.gate_up_proj` [E, 2 I, N], `experts.down_proj` [E, N, I] |
| interleaved (gpt-oss) | the same names, [E, N, 2 I] and [E, I, N]; gate and up alternate; with biases |
| separate | `experts.3.gate_proj.weight` and so on; in Mixtral `experts.3.w1.weight` |

Codes (MXFP4) of interleaved experts have the dimensions of fused experts, but rows of gate and up alternate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.coded_weight import Matrix, selected_rows
from rootstock_llm.kernels.contracts.ops import SWIGLU, Activation, Kernels, Matrices, PackedExperts, Routing
from rootstock_llm.services.worker.exec.models.layers import ForwardContext, GatedMlp, Linear, Take
from rootstock_llm.services.worker.exec.weights.checkpoint import Checkpoint, CheckpointError
from rootstock_llm.services.worker.exec.weights.source import WeightReader

# Name of the buffer with the chosen experts of all sparse layers, int32[layers, T, k]. Its content is valid until the next pass.
IDS = "expert_ids"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of a layer's experts in the checkpoint."""

    block: str  # the MLP's name in the layer
    parts: tuple[str, str, str] | None  # names of gate, up and down of an expert; None if one tensor has all experts


FUSED_NAMES = ("gate_up_proj", "down_proj")  # tensors of all experts
FUSED = ExpertNames("mlp", None)
SEPARATE = ExpertNames("mlp", ("gate_proj", "up_proj", "down_proj"))
MIXTRAL = ExpertNames("block_sparse_moe", ("w1", "w3", "w2"))


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Sizes and switches of the experts of a model."""

    count: int  # number of experts of a layer
    intermediate_size: int  # intermediate size of one expert
    routing: Routing
    activation: Activation = SWIGLU
    names: ExpertNames = SEPARATE
    router: str = "gate"  # name of the router
    router_bias: bool = False  # whether the router has biases
    interleaved: bool = False  # whether gate and up alternate, as in gpt-oss; the experts then have biases
    shared_size: int = 0  # intermediate size of the shared expert; 0 if the model has no shared expert
    shared_gate: bool = False  # whether the shared expert has a gate

    def named_as(self, checkpoint: Checkpoint, layer: str) -> ExpertSizes:
        """Returns the sizes with the checkpoint's names of the tensors. Interleaved experts always have the names FUSED.

        Args:
            layer: prefix of a layer with experts, such as "model.layers.0.".

        Raises:
            CheckpointError: one tensor has codes of all experts, in a layout that is not supported.
        """
        fused = f"{layer}mlp.experts.gate_up_proj"
        known = {fused, *(f"{fused}{suffix}" for suffix in ("_bias", "_blocks", "_scales") if self.interleaved)}
        if other := next((name for name in checkpoint.starting_with(fused) if name not in known), ""):
            raise CheckpointError(
                f"{other} belongs to one tensor with codes of all experts, which is not supported. Use a folder in which each"
                " expert has its own tensors."
            )
        if self.interleaved or checkpoint.has(fused):
            return replace(self, names=FUSED)
        if checkpoint.has_module(f"{layer}block_sparse_moe.experts.0.w1"):
            return replace(self, names=MIXTRAL)
        return replace(self, names=SEPARATE)


class Deinterleaved:
    """Reorders matrices in which rows of gate and up alternate: all rows of the gate come first. Indexing reorders one matrix."""

    def __init__(self, matrices: Matrices) -> None:
        self._matrices = matrices

    def __len__(self) -> int:
        return len(self._matrices)

    def __getitem__(self, expert: int, /) -> Matrix:
        matrix = self._matrices[expert]
        rows = torch.arange(matrix.shape[0])
        return selected_rows(matrix, torch.cat((rows[::2], rows[1::2])))


@dataclass(frozen=True, slots=True)
class Experts:
    """The router, the experts and the shared expert of a layer."""

    index: int  # index of the layer among the sparse layers
    num_layers: int  # number of sparse layers
    routing: Routing
    router: Linear
    packed: PackedExperts
    shared: GatedMlp | None
    shared_gate: Linear | None  # computes the gate of the shared expert, one feature; None if it has no gate
    kernels: Kernels

    @classmethod
    def read(cls, weights: WeightReader, hidden_size: int, sizes: ExpertSizes, index: int, num_layers: int) -> Experts:
        """Reads the MLP of a layer.

        Args:
            weights: reader with the prefix of the layer.
            index: index of the layer among the sparse layers.
            num_layers: number of sparse layers.
        """
        weights, kernels = weights.at(sizes.names.block), weights.kernels
        router = weights.tensor(f"{sizes.router}.weight", sizes.count, hidden_size)  # has no codes, also in quantized models
        router_bias = weights.tensor(f"{sizes.router}.bias", sizes.count) if sizes.router_bias else None
        shared = shared_gate = None
        if sizes.shared_size:
            shared = GatedMlp.read(weights.at("shared_expert"), hidden_size, sizes.shared_size)
        if sizes.shared_gate:
            gate = weights.tensor("shared_expert_gate.weight", 1, hidden_size)
            shared_gate = Linear(kernels.pack_linear(gate, None), kernels)
        return cls(
            index=index,
            num_layers=num_layers,
            routing=sizes.routing,
            router=Linear(kernels.pack_linear(router, router_bias), kernels),
            packed=_read_experts(weights.at("experts"), hidden_size, sizes),
            shared=shared,
            shared_gate=shared_gate,
            kernels=kernels,
        )

    def reserve(self, take: Take) -> None:
        """Takes all buffers that forward() uses, so that they are allocated before the first step."""
        self._buffers(take)
        take(IDS, self.num_layers * self.routing.top_k, torch.int32)
        if self.shared is not None:
            self.shared.reserve(take)
            take("shared", self.packed.down.out_features)
        if self.shared_gate is not None:
            take("shared_gate", 1)

    def _buffers(self, take: Take) -> tuple[Tensor, Tensor]:
        """Returns the buffers of the router's logits and of the routing weights."""
        logits = take("router_logits", self.packed.num_experts, torch.float32)
        return logits, take("expert_weights", self.routing.top_k, torch.float32)

    def forward(self, out: Tensor, x: Tensor, context: ForwardContext) -> None:
        """Writes the output to out [T, N]. `out` may be x."""
        logits, weights = self._buffers(context.take)
        ids = context.take_each(IDS, self.num_layers, self.routing.top_k, torch.int32)[self.index]
        self.router.forward(logits, x)
        self.kernels.route(weights, ids, logits, None, self.routing)
        shared = self._shared(x, context)
        self.kernels.experts(out, x, ids, weights, self.packed)
        if shared is not None:
            out.add_(shared)

    def _shared(self, x: Tensor, context: ForwardContext) -> Tensor | None:
        """Returns the output of the shared expert, [T, N], or None if there is no shared expert."""
        if self.shared is None:
            return None
        shared = context.take("shared", x.shape[1])
        self.shared.forward(shared, x, context)
        if self.shared_gate is not None:
            gate = context.take("shared_gate", 1)
            self.shared_gate.forward(gate, x)
            self.kernels.sigmoid_mul(shared, gate)
        return shared

    def tensors(self) -> Iterator[Tensor]:
        yield from self.router.tensors()
        yield from (*self.packed.gate_up.tensors, *self.packed.down.tensors)
        for part in (self.shared, self.shared_gate):
            yield from () if part is None else part.tensors()


def _read_experts(weights: WeightReader, hidden_size: int, sizes: ExpertSizes) -> PackedExperts:
    """Reads the weights of all experts. The reader has their common prefix. Raises CheckpointError."""
    try:
        return _packed(weights, hidden_size, sizes)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{weights.prefix.removesuffix('.')} cannot be loaded: {error}") from error


def _packed(weights: WeightReader, hidden_size: int, sizes: ExpertSizes) -> PackedExperts:
    count, inner = sizes.count, sizes.intermediate_size
    pack = weights.kernels.pack_experts
    if sizes.names.parts is not None:
        gate, up, down = sizes.names.parts
        both = [[(f"{expert}.{name}", inner) for name in (gate, up)] for expert in range(count)]
        back = [[(f"{expert}.{down}", hidden_size)] for expert in range(count)]
        return pack(weights.matrices(both, hidden_size), None, weights.matrices(back, inner), None, sizes.activation)
    shapes = (2 * inner, hidden_size), (hidden_size, inner)
    if not sizes.interleaved:
        gate_up, down_matrices = (weights.fused(name, count, *shape) for name, shape in zip(FUSED_NAMES, shapes, strict=True))
        return pack(gate_up, None, down_matrices, None, sizes.activation)
    bias, down_bias = (weights.tensor(f"{name}_bias", count, shape[0]) for name, shape in zip(FUSED_NAMES, shapes, strict=True))
    if weights.has_codes(FUSED_NAMES[0], count, *shapes[0]):  # codes are [outputs, inputs], elements are [inputs, outputs]
        gate_up, down_matrices = (weights.fused(name, count, *shape) for name, shape in zip(FUSED_NAMES, shapes, strict=True))
        gate_up = Deinterleaved(gate_up)
    else:
        pairs, ends = (weights.view(name, count, *shape[::-1]) for name, shape in zip(FUSED_NAMES, shapes, strict=True))
        gate_up = weights.in_form(FUSED_NAMES[0], Deinterleaved(pairs.transpose(1, 2)))
        down_matrices = weights.in_form(FUSED_NAMES[1], ends.transpose(1, 2))
    return pack(gate_up, torch.cat((bias[:, ::2], bias[:, 1::2]), 1), down_matrices, down_bias, sizes.activation)
