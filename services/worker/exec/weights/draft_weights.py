"""Weights of heads that draft for a target: EAGLE-3 folders as they are published, and the extra layer (MTP) of a checkpoint.

EAGLE-3 (https://arxiv.org/abs/2503.01840): `midlayer.*` or `layers.0.*`, `fc`, `norm`, `lm_head`, `d2t`, with or without
`model.` before them; no embedding of its own, or one. MTP: `mtp.*`, as Qwen3-Next has it, or the layer behind the last one, as
DeepSeek-V3 has it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.contracts.ops import Kernels, PackedLinear
from services.worker.exec.weights.checkpoint import Checkpoint, CheckpointError, read_config
from services.worker.exec.weights.families import DecoderConfig, UnsupportedModel, architecture_of, decoder_config, model_type_of
from services.worker.exec.weights.weights import Assembly, DecoderWeights, LayerWeights, StoredTensors, linear_tensors

EAGLE3 = "Eagle3"  # how an architecture's name ends


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """Of one layer whose input is a token's embedding and a state of H numbers. embedding: of the target's tokens.

    project: PackedLinear [H, W], states from what the target gives for a token, W numbers; None where target_norm [H] makes
    them. joined: [H, 2 H], of embedding and state, in this order; None where the layer's attention is of both. lm_head: [D, H].
    ids: int64[D], the target's token of each of the head's; None where they are the same."""

    embedding: Tensor
    embedding_norm: Tensor
    state_norm: Tensor
    project: PackedLinear | None
    target_norm: Tensor | None
    joined: PackedLinear | None
    layer: LayerWeights
    norm: Tensor
    lm_head: PackedLinear
    ids: Tensor | None

    def num_bytes(self, target: DecoderWeights) -> int:
        """Bytes of distinct storage that the target does not have."""
        linears = [self.layer.qkv, self.layer.o, self.layer.gate_up, self.layer.down, self.lm_head, self.project, self.joined]
        tensors = [self.embedding, self.embedding_norm, self.state_norm, self.norm, self.layer.post_norm]
        tensors += [tensor for linear in linears if linear is not None for tensor in linear_tensors(linear)]
        held = {tensor.untyped_storage().data_ptr() for tensor in (target.embedding, *_head(target))}
        sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(size for place, size in sizes.items() if place not in held)


@dataclass(frozen=True, slots=True)
class DraftHead:
    """kept: the target's layers whose input the head reads, see Decoder; more than one are joined in this order."""

    config: DecoderConfig
    weights: DraftWeights
    kept: tuple[int, ...]


def _head(target: DecoderWeights) -> list[Tensor]:
    return [] if target.lm_head is None else linear_tensors(target.lm_head)


def load_eagle3(folder: Path, target: DecoderConfig, weights: DecoderWeights, dtype: torch.dtype, kernels: Kernels) -> DraftHead:
    """Raises CheckpointError, UnsupportedModel."""
    given = read_config(folder)
    config = _eagle3_config(folder, given, target)
    hidden, size, kept = (
        config.hidden_size,
        int(getattr(given, "draft_vocab_size", None) or target.vocab_size),
        _kept(given, target),
    )
    checkpoint = Checkpoint(folder)
    try:
        prefix = "model." if checkpoint.holds("model.norm.weight") else ""
        place = "layers.0" if checkpoint.holds(f"{prefix}layers.0.hidden_norm.weight") else "midlayer"
        source = StoredTensors(checkpoint, dtype, weights.embedding.device)
        read = Assembly(source, prefix, config, kernels)
        layer = read.layer(place, 2 * hidden)
        own = checkpoint.holds(f"{prefix}embed_tokens.weight")
        head = source.tensor("lm_head.weight", size, hidden)
        found = DraftWeights(
            embedding=read.own("embed_tokens.weight", target.vocab_size, hidden) if own else weights.embedding,
            embedding_norm=layer.input_norm,
            state_norm=read.own(f"{place}.hidden_norm.weight", hidden),
            project=kernels.pack_linear(read.own("fc.weight", hidden, target.hidden_size * len(kept)), None),
            target_norm=None,
            joined=None,
            layer=layer,
            norm=read.own("norm.weight", hidden),
            lm_head=kernels.pack_linear(head, None),
            ids=_ids(source, size, target.vocab_size),
        )
    finally:
        checkpoint.close()
    return DraftHead(config, found, kept)


def _eagle3_config(folder: Path, given: Any, target: DecoderConfig) -> DecoderConfig:
    """Of the head's one layer, whose family its architecture names. Raises UnsupportedModel."""
    architecture = architecture_of(given)
    if not architecture.endswith(EAGLE3):
        raise UnsupportedModel(f"{folder} holds {architecture}, and no EAGLE-3 head, whose architecture ends in {EAGLE3}")
    given.architectures, given.num_hidden_layers = [architecture.removesuffix(EAGLE3)], 1
    given.model_type = model_type_of(architecture_of(given))  # its layer's, whatever the folder says
    if getattr(given, "layer_types", None):
        given.layer_types = given.layer_types[:1]
    config = decoder_config(given)
    if config.hidden_size != target.hidden_size or config.vocab_size != target.vocab_size:
        raise UnsupportedModel(
            f"{folder} is for a model of {config.vocab_size} tokens and hidden size {config.hidden_size}, not of"
            f" {target.vocab_size} and {target.hidden_size}"
        )
    return config


def _kept(given: Any, target: DecoderConfig) -> tuple[int, ...]:
    """Layers that the config names by their outputs, or a low one, the middle one and a high one by their inputs."""
    named = (getattr(given, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids")
    layers = tuple(int(layer) + 1 for layer in named) if named else (2, target.num_layers // 2, target.num_layers - 3)
    if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] <= target.num_layers:
        raise UnsupportedModel(f"an EAGLE-3 head cannot read layers {layers} of a model that has {target.num_layers}")
    return layers


def _ids(source: StoredTensors, size: int, vocab_size: int) -> Tensor | None:
    """d2t holds what is to be added to a token of the head. Raises CheckpointError."""
    checkpoint = source.checkpoint
    if size == vocab_size and not checkpoint.holds("d2t"):
        return None
    ids = torch.arange(size) + checkpoint.integers("d2t", (size,))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise CheckpointError(f"d2t leads beyond the {vocab_size} tokens of the target")
    return ids.to(source.device)


def load_mtp(folder: Path, config: DecoderConfig, weights: DecoderWeights, dtype: torch.dtype, kernels: Kernels) -> DraftHead:
    """Raises CheckpointError where the folder has none."""
    hidden, behind, checkpoint = config.hidden_size, f"layers.{config.num_layers}", Checkpoint(folder)
    try:
        if checkpoint.holds("mtp.fc.weight"):
            prefix, place = "mtp.", "layers.0"
            embedding_norm, state_norm, joined, norm = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"
        elif checkpoint.holds(f"model.{behind}.eh_proj.weight"):
            prefix, place = "model.", behind
            embedding_norm, state_norm, joined, norm = (
                f"{behind}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
            )
        else:
            raise CheckpointError(f"{folder} has no layer for multi-token prediction: neither mtp.* nor model.{behind}.eh_proj")
        if weights.lm_head is None:
            raise CheckpointError(f"{folder} has no vocabulary projection to draft with")
        read = Assembly(StoredTensors(checkpoint, dtype, weights.embedding.device), prefix, config, kernels)
        found = DraftWeights(
            embedding=weights.embedding,
            embedding_norm=read.own(f"{embedding_norm}.weight", hidden),
            state_norm=read.own(f"{state_norm}.weight", hidden),
            project=None,
            target_norm=weights.norm,
            joined=kernels.pack_linear(read.own(f"{joined}.weight", hidden, 2 * hidden), None),
            layer=read.layer(place),
            norm=read.own(f"{norm}.weight", hidden),
            lm_head=weights.lm_head,
            ids=None,
        )
    finally:
        checkpoint.close()
    return DraftHead(replace(config, num_layers=1, windows=(0,)), found, (config.num_layers,))
