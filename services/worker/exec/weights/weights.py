"""Decoder weights, fused (q, k, v into one matrix; gate and up into one) and laid out for the kernels that will read them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.contracts.ops import Kernels, PackedLinear
from kernels.reference import layers as reference
from services.worker.exec.weights.checkpoint import Checkpoint, CheckpointError
from services.worker.exec.weights.families import DecoderConfig
from services.worker.exec.weights.load_meter import LoadMeter

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: Tensor
    qkv: PackedLinear
    qk_norms: tuple[Tensor, Tensor] | None
    o: PackedLinear
    post_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """embedding: [vocabulary, hidden], also the source of lm_head where the two are tied. lm_head: None where the checkpoint
    is of the model below its vocabulary projection."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: PackedLinear | None

    def num_bytes(self) -> int:
        """Bytes of distinct storage, packed copies included."""
        tensors = [self.embedding, self.norm, *([] if self.lm_head is None else linear_tensors(self.lm_head))]
        for layer in self.layers:
            tensors += [layer.input_norm, layer.post_norm, *(layer.qk_norms or ())]
            for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
                tensors += linear_tensors(linear)
        sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(sizes.values())


def linear_tensors(linear: PackedLinear) -> list[Tensor]:
    return [linear.data] if linear.bias is None else [linear.data, linear.bias]


def resolve_dtype(name: str, config: Any, checkpoint: Checkpoint) -> torch.dtype:
    """name: "auto" (the config's, else that of the first tensor on disk) or a dtype's name. Raises CheckpointError."""
    if name == "auto":
        named = getattr(config, "dtype", None) or checkpoint.first_dtype()
        name = str(named).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"dtype {name} is not supported; supported: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


Part = tuple[str, tuple[int, ...]]  # a tensor's name in the checkpoint, and its shape


class TensorSource(Protocol):
    """Where the tensors come from, in the dtype and on the device that they are wanted in."""

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Contiguous; may be part of what the source holds. Raises CheckpointError."""

    def stacked(self, parts: Sequence[Part]) -> Tensor:
        """The parts one after the other along the first dimension, in memory of its own. Raises CheckpointError."""


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The TensorSource that reads a checkpoint."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device = HOST

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.checkpoint.tensor(name, shape, self.dtype).to(self.device)

    def stacked(self, parts: Sequence[Part]) -> Tensor:
        return torch.cat([self.tensor(name, *shape) for name, shape in parts])


@dataclass(frozen=True, slots=True)
class Assembly:
    """prefix: what stands before the names of the tensors below the vocabulary projection."""

    source: TensorSource
    prefix: str
    config: DecoderConfig
    kernels: Kernels

    def own(self, name: str, *shape: int) -> Tensor:
        return self.source.stacked([(self.prefix + name, shape)])

    def stacked(self, prefix: str, parts: list[tuple[str, int]], in_features: int, bias: bool) -> tuple[Tensor, Tensor | None]:
        """The parts (name, out features) as one matrix, and their biases."""
        place = f"{self.prefix}{prefix}"
        weight = self.source.stacked([(f"{place}.{name}.weight", (size, in_features)) for name, size in parts])
        stacked = self.source.stacked([(f"{place}.{name}.bias", (size,)) for name, size in parts]) if bias else None
        assert len(weight) == sum(size for _, size in parts), "the parts lie one after the other"
        assert stacked is None or len(stacked) == len(weight), "a bias for each row"
        return weight, stacked

    def linear(self, prefix: str, parts: list[tuple[str, int]], in_features: int, bias: bool) -> PackedLinear:
        return self.kernels.pack_linear(*self.stacked(prefix, parts, in_features, bias))

    def layer(self, place: str, attended: int = 0) -> LayerWeights:
        """place: as "layers.3". attended: numbers that its attention is of; 0: the hidden size."""
        config = self.config
        attention, mlp, hidden = f"{place}.self_attn", f"{place}.mlp", config.hidden_size
        qkv = [("q_proj", config.q_size), ("k_proj", config.kv_size), ("v_proj", config.kv_size)]
        gate_up = [("gate_proj", config.intermediate_size), ("up_proj", config.intermediate_size)]
        norms = [self.own(f"{attention}.{name}.weight", config.head_dim) for name in ("q_norm", "k_norm") if config.qk_norm]
        assert len(norms) in (0, 2), "queries and keys are both normed, or neither"
        return LayerWeights(
            input_norm=self.own(f"{place}.input_layernorm.weight", hidden),
            qkv=self.linear(attention, qkv, attended or hidden, config.qkv_bias),
            qk_norms=(norms[0], norms[1]) if norms else None,
            o=self.linear(attention, [("o_proj", hidden)], config.q_size, config.o_bias),
            post_norm=self.own(f"{place}.post_attention_layernorm.weight", hidden),
            gate_up=self.kernels.pack_gated(*self.stacked(mlp, gate_up, hidden, config.mlp_bias)),
            down=self.linear(mlp, [("down_proj", hidden)], config.intermediate_size, config.mlp_bias),
        )

    def head(self, embedding: Tensor) -> PackedLinear | None:
        if not self.config.has_head:
            return None
        if self.config.tie_word_embeddings:
            return self.kernels.pack_linear(embedding, None)
        return self.kernels.pack_linear(self.source.tensor(HEAD, *embedding.shape), None)


def tensor_prefix(checkpoint: Checkpoint) -> str:
    """ "model." or nothing: checkpoints of embedding models may have been saved from the model below its projection."""
    return "" if checkpoint.holds(EMBEDDING) else "model."


def resolved(config: DecoderConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> DecoderConfig:
    """With what only the tensors say, as transformers takes them: a model that was saved from below its projection, whatever it
    calls itself, has none; and one whose projection is there, and another than its embedding, has the two apart."""
    prefix, holds_head = tensor_prefix(checkpoint), checkpoint.holds(HEAD)
    if config.has_head and not config.tie_word_embeddings and not prefix and not holds_head:
        return replace(config, has_head=False)
    if config.tie_word_embeddings and holds_head and checkpoint.holds(prefix + EMBEDDING):
        shape = (config.vocab_size, config.hidden_size)
        embedding, head = (checkpoint.tensor(name, shape, dtype) for name in (prefix + EMBEDDING, HEAD))
        return replace(config, tie_word_embeddings=torch.equal(embedding, head))
    return config


class _Asked:
    """A TensorSource with nothing behind it: shapes without memory. Remembers the names."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.stacked([(name, shape)])

    def stacked(self, parts: Sequence[Part]) -> Tensor:
        self.names += (name for name, _ in parts)
        rows, rest = sum(shape[0] for _, shape in parts), parts[0][1][1:]
        return torch.empty((rows, *rest), device="meta")


def required_tensors(config: DecoderConfig, prefix: str) -> list[str]:
    """Names of every tensor that `assemble` asks for."""
    asked = _Asked()
    assemble(asked, config, prefix, reference)
    return asked.names


def load_weights(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    dtype: torch.dtype,
    kernels: Kernels,
    progress: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> DecoderWeights:
    """Reads, converts, fuses and packs. progress: told every few seconds, and at the end. Raises CheckpointError."""
    prefix = tensor_prefix(checkpoint)
    checkpoint.require(required_tensors(config, prefix))
    meter = LoadMeter(config.num_layers, clock, progress, "layers")
    weights = assemble(StoredTensors(checkpoint, dtype), config, prefix, kernels, lambda index: meter.added(1))
    meter.end()
    return weights


def assemble(
    source: TensorSource,
    config: DecoderConfig,
    prefix: str,
    kernels: Kernels,
    after_layer: Callable[[int], None] = lambda _: None,
) -> DecoderWeights:
    """Asks the source for every tensor once, the embedding first, and packs. after_layer: called with the index of each."""
    assembly = Assembly(source, prefix, config, kernels)
    embedding = assembly.own(EMBEDDING, config.vocab_size, config.hidden_size)
    assert embedding.shape == (config.vocab_size, config.hidden_size), "a vector for each token"
    layers = []
    for index in range(config.num_layers):
        layers.append(assembly.layer(f"layers.{index}"))
        after_layer(index)
    assert len(layers) == config.num_layers, "each layer has its weights"
    norm = assembly.own("norm.weight", config.hidden_size)
    return DecoderWeights(embedding, tuple(layers), norm, assembly.head(embedding))
