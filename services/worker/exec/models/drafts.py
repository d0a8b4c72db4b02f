"""Draft models: a small separate decoder, or a head of one layer that reads hidden states of the target.

A head computes a position from the embedding of its token and from a state. EAGLE-3 (https://arxiv.org/abs/2503.01840) and
multi-token prediction (MTP, https://arxiv.org/abs/2412.19437, section 2.2) differ in three points:

| | EAGLE-3 | MTP |
|---|---|---|
| state from the target | projection of the inputs of three layers | norm of the last layer's output |
| input of the layer | attention reads embedding and state | a projection joins embedding and state |
| state for the next draft token | the layer's output | the normed output |

An EAGLE-3 head has a separate folder with the tensors `midlayer.*` or `layers.0.*`, `fc`, `norm`, `lm_head` and `d2t`, with or
without the prefix `model.`, and with or without an embedding. MTP layers are in the target's checkpoint: `mtp.*` as in
Qwen3-Next, or an additional layer after the last layer as in DeepSeek-V3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import Kernels, RaggedRows
from rootstock_llm.services.worker.exec.contracts.causal_model import CausalModel
from rootstock_llm.services.worker.exec.contracts.drafter import HiddenStates
from rootstock_llm.services.worker.exec.models import registry
from rootstock_llm.services.worker.exec.models.decoder import Decoder, read_layer
from rootstock_llm.services.worker.exec.models.decoder_config import DecoderConfig
from rootstock_llm.services.worker.exec.models.layers import (
    Embedding,
    ForwardContext,
    Head,
    Linear,
    RmsNorm,
    TransformerLayer,
    Workspace,
    storage_bytes,
)
from rootstock_llm.services.worker.exec.pools.kv_pool import KVPool, LayerKV
from rootstock_llm.services.worker.exec.weights.checkpoint import (
    Checkpoint,
    CheckpointError,
    UnsupportedModel,
    architecture_of,
    read_config,
)
from rootstock_llm.services.worker.exec.weights.layouts.choose import quantization_for, read_quantization
from rootstock_llm.services.worker.exec.weights.quantization import FROM_CHECKPOINT, QuantizationOptions
from rootstock_llm.services.worker.exec.weights.source import CheckpointSource, WeightReader

EAGLE3 = "Eagle3"  # ending of the architecture of an EAGLE-3 head


class DecoderDraftModel:
    """Implements DraftModel by a separate causal model, whose vocabulary includes the target's."""

    shift = 0

    def __init__(self, decoder: CausalModel, layers: tuple[LayerKV, ...], max_context: int, vocab_size: int) -> None:
        """
        Args:
            vocab_size: size of the target's vocabulary. Tokens outside of it are never drafted.
        """
        self._decoder, self.layers, self.max_context, self._vocab_size = decoder, layers, max_context, vocab_size

    def forward(self, ids: Tensor, states: Tensor | None, rows: RaggedRows, pool: KVPool) -> None:
        assert states is None, "a draft model with shift 0 reads no states of the target"
        self._decoder.forward(ids, rows, pool)

    def entry(self, hidden: HiddenStates) -> None:
        return None

    def draft(self, wanted: Tensor) -> tuple[Tensor, None]:
        return self._decoder.logits(wanted)[:, : self._vocab_size].argmax(-1), None


@dataclass(frozen=True)
class DraftHead(ABC):
    """The weights of a head of one layer, and the formulas in which EAGLE-3 and MTP differ. N is the hidden size."""

    config: DecoderConfig  # sizes and switches of the layer
    embedding: Embedding
    embedding_norm: RmsNorm  # norm of the token's embedding
    state_norm: RmsNorm  # norm of the state
    layer: TransformerLayer
    norm: RmsNorm  # norm of the layer's output, before the vocabulary projection
    head: Head  # vocabulary projection
    aux_layers: tuple[int, ...]  # layers of the target whose inputs the head reads, see Decoder

    @abstractmethod
    def entry(self, out: Tensor, aux: tuple[Tensor, ...]) -> None:
        """Computes the states [T, N] of T tokens into `out`, from the target's hidden states `aux`, [T, N] per aux layer."""

    @abstractmethod
    def layer_input(self, both: Tensor, states: Tensor, context: ForwardContext) -> Tensor:
        """Sets context.residual, and returns the input of the layer's attention.

        Args:
            both: [T, 2 N], normed embeddings, then normed states.
            states: [T, N], the states before the norm.
        """

    @abstractmethod
    def next_states(self, output: Tensor, normed: Tensor) -> Tensor:
        """Returns the states [W, N] for the entries of the draft tokens: `output`, or `normed`, its norm."""

    def tokens(self, draft_ids: Tensor) -> Tensor:
        """Converts token ids of the head's vocabulary to those of the target's."""
        return draft_ids

    def tensors(self) -> Iterator[Tensor]:
        for part in (self.embedding, self.embedding_norm, self.state_norm, self.layer, self.norm, self.head):
            yield from part.tensors()

    def num_bytes(self, target: Decoder) -> int:
        """Returns the bytes of the head's weights that it does not share with the target."""
        return storage_bytes(self.tensors(), target.model.tensors())


@dataclass(frozen=True)
class Eagle3Head(DraftHead):
    """An EAGLE-3 head. Its embedding norm is the layer's input norm, and its attention reads 2 N features."""

    fc: Linear  # [N, N * number of aux layers], projects the hidden states of the aux layers to a state
    ids: Tensor | None  # int64[draft vocabulary], the target's id of each token of the head; None if both vocabularies are equal

    def entry(self, out: Tensor, aux: tuple[Tensor, ...]) -> None:
        self.fc.forward(out, torch.cat(aux, 1))

    def layer_input(self, both: Tensor, states: Tensor, context: ForwardContext) -> Tensor:
        context.residual.copy_(states)
        return both

    def next_states(self, output: Tensor, normed: Tensor) -> Tensor:
        return output

    def tokens(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.ids is None else self.ids[draft_ids]

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        yield from self.fc.tensors()


@dataclass(frozen=True)
class MtpHead(DraftHead):
    """The layer for multi-token prediction in the target's checkpoint.

    It uses the target's embedding and vocabulary projection.
    """

    joined: Linear  # [N, 2 N], joins the normed embedding and the normed state
    target_norm: RmsNorm  # the target's final norm; it turns the output of the target's last layer into a state

    def entry(self, out: Tensor, aux: tuple[Tensor, ...]) -> None:
        (last,) = aux
        self.target_norm.forward(out, last.contiguous())

    def layer_input(self, both: Tensor, states: Tensor, context: ForwardContext) -> Tensor:
        self.joined.forward(context.residual, both)
        self.layer.input_norm.forward(context.hidden, context.residual)
        return context.hidden

    def next_states(self, output: Tensor, normed: Tensor) -> Tensor:
        return normed

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        yield from self.joined.tensors()


class HeadDraftModel:
    """Implements DraftModel by a draft head. Its activation buffers are separate from the target's."""

    shift = 1

    def __init__(self, head: DraftHead, kernels: Kernels, context_len: int) -> None:
        """
        Args:
            context_len: context length of the target.
        """
        config, device = head.config, head.embedding.device
        self.max_context = min(context_len, config.max_position_embeddings)
        cache = head.layer.cache
        assert isinstance(cache, LayerKV), "a draft head has attention"
        self.layers: tuple[LayerKV, ...] = (cache,)
        self._head, self._attend, self._hidden_size = head, kernels.paged_attention, config.hidden_size
        self._cos_sin = [table.to(device) for table in config.rope_tables(self.max_context + 1)]
        self._space = Workspace(head.embedding.dtype, device)
        self._last: tuple[Tensor, Tensor] | None = None  # residual and update of the last pass

    def entry(self, hidden: HiddenStates) -> Tensor:
        states = torch.empty((len(hidden[0]), self._hidden_size), dtype=hidden[0].dtype, device=hidden[0].device)
        self._head.entry(states, hidden)
        return states

    def forward(self, ids: Tensor, states: Tensor | None, rows: RaggedRows, pool: KVPool) -> None:
        assert states is not None and len(states) == len(ids), "each token has a state"
        head = self._head
        context = ForwardContext(self._space, self._hidden_size, rows, self._cos_sin, self._attend)
        head.embedding.forward(context.residual, ids)
        head.embedding_norm.forward(context.hidden, context.residual)
        head.state_norm.forward(context.update, states)
        both = torch.cat((context.hidden, context.update), 1)
        head.layer.forward(head.layer_input(both, states, context), pool.layer(0), context)
        self._last = context.residual, context.update

    def draft(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        assert self._last is not None, "draft() is called after forward()"
        head = self._head
        output, update = (each[wanted] for each in self._last)
        normed = torch.empty_like(output)
        head.norm.add(normed, update, output)
        logits = self._space.take("logits", len(wanted), head.head.vocab_size, torch.float32)
        head.head.forward(logits, normed)
        return head.tokens(logits.argmax(-1)), head.next_states(output, normed)


def load_eagle3(folder: Path, target: Decoder, dtype: torch.dtype, kernels: Kernels) -> DraftHead:
    """Loads an EAGLE-3 head onto the target's device. Raises CheckpointError, UnsupportedModel."""
    given, model = read_config(folder), target.model
    if read_quantization(folder, FROM_CHECKPOINT) is not None:
        raise CheckpointError(f"{folder} is quantized, which is not supported for an EAGLE-3 head")
    config = _eagle3_config(folder, given, model.config)
    aux_layers = _eagle3_aux_layers(given, len(model.layers))
    hidden, eps = config.hidden_size, config.rms_norm_eps
    draft_vocab = int(getattr(given, "draft_vocab_size", None) or config.vocab_size)
    with closing(Checkpoint(folder)) as checkpoint:
        weights = WeightReader(CheckpointSource(checkpoint, dtype, model.embedding.device), kernels)
        body = weights.at("model") if checkpoint.has("model.norm.weight") else weights
        name = "layers.0" if checkpoint.has(f"{body.prefix}layers.0.hidden_norm.weight") else "midlayer"
        layer = read_layer(body.at(name), config.of_one_layer(), 0, 2 * hidden)
        has_embedding = checkpoint.has(f"{body.prefix}embed_tokens.weight")
        return Eagle3Head(
            config=config,
            embedding=Embedding.read(body.at("embed_tokens"), config.vocab_size, hidden) if has_embedding else model.embedding,
            embedding_norm=layer.input_norm,
            state_norm=RmsNorm.read(body.at(f"{name}.hidden_norm"), hidden, eps, config.centered_norms),
            layer=layer,
            norm=RmsNorm.read(body.at("norm"), hidden, eps, config.centered_norms),
            head=Head.read(weights.at("lm_head"), draft_vocab, hidden),
            aux_layers=aux_layers,
            fc=Linear.read(body, [("fc", hidden)], hidden * len(aux_layers)),
            ids=_target_ids(checkpoint, draft_vocab, config.vocab_size, model.embedding.device),
        )


def _eagle3_config(folder: Path, given: Any, target: DecoderConfig) -> DecoderConfig:
    """Returns the config of the head's layer, read as that of the architecture without its ending Eagle3.

    Raises UnsupportedModel.
    """
    architecture = architecture_of(given)
    if not architecture.endswith(EAGLE3):
        raise UnsupportedModel(
            f"{folder} has the architecture {architecture}; the architecture of an EAGLE-3 head ends in {EAGLE3}"
        )
    given.architectures, given.num_hidden_layers = [architecture.removesuffix(EAGLE3)], 1
    given.model_type = registry.model_type_of(architecture_of(given))  # the config of a head may have another model_type
    if getattr(given, "layer_types", None):
        given.layer_types = given.layer_types[:1]
    config = registry.config_of(given)
    if config.hidden_size != target.hidden_size or config.vocab_size != target.vocab_size:
        raise UnsupportedModel(
            f"{folder} drafts for a model with a vocabulary of {config.vocab_size} tokens and hidden size {config.hidden_size};"
            f" this model has {target.vocab_size} and {target.hidden_size}"
        )
    return config


def _eagle3_aux_layers(given: Any, num_layers: int) -> tuple[int, ...]:
    """Returns the layers of the target whose inputs the head reads. Raises UnsupportedModel if the target lacks one of them.

    The config lists the layers whose outputs the head reads. The output of layer i is the input of layer i + 1. The default is an
    early, the middle and a late layer.
    """
    named = (getattr(given, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids")
    layers = tuple(int(layer) + 1 for layer in named) if named else (2, num_layers // 2, num_layers - 3)
    if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] <= num_layers:
        raise UnsupportedModel(f"an EAGLE-3 head cannot read the inputs of layers {layers} of a model with {num_layers} layers")
    return layers


def _target_ids(checkpoint: Checkpoint, draft_vocab: int, vocab_size: int, device: torch.device) -> Tensor | None:
    """Returns Eagle3Head.ids. The tensor d2t has the target's id minus the head's id of each token. Raises CheckpointError."""
    if draft_vocab == vocab_size and not checkpoint.has("d2t"):
        return None
    ids = torch.arange(draft_vocab) + checkpoint.integers("d2t", (draft_vocab,))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise CheckpointError(f"the tensor d2t has tokens outside of the target's vocabulary of {vocab_size} tokens")
    return ids.to(device)


def load_mtp(
    folder: Path, target: Decoder, dtype: torch.dtype, kernels: Kernels, options: QuantizationOptions = FROM_CHECKPOINT
) -> DraftHead:
    """Loads the MTP layer of the target's checkpoint. Its weights get the form of the target's weights.

    Raises CheckpointError if the folder has no such layer, or if the target has no vocabulary projection.
    """
    model = target.model
    config = model.config.of_one_layer()
    hidden, eps, additional = config.hidden_size, config.rms_norm_eps, f"layers.{len(model.layers)}"
    quantized = read_quantization(folder, options)
    with closing(Checkpoint(folder, has_codes=quantized is not None)) as checkpoint:
        if checkpoint.has("mtp.fc.weight"):
            prefix, name = "mtp", "layers.0"
            embedding_norm, state_norm, joined, norm = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"
        elif checkpoint.has(f"model.{additional}.eh_proj.weight"):
            prefix, name = "model", additional
            embedding_norm, state_norm, joined, norm = (
                f"{additional}.{each}" for each in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
            )
        else:
            raise CheckpointError(
                f"{folder} has no layer for multi-token prediction: neither mtp.* nor model.{additional}.eh_proj"
            )
        if model.head is None:
            raise CheckpointError(f"{folder} has no vocabulary projection, which an MTP layer needs to draft tokens")
        config = config.with_experts_of(checkpoint, f"{prefix}.{name}.")
        quantization = quantization_for(quantized, options, checkpoint)
        source = CheckpointSource(checkpoint, dtype, model.embedding.device, quantization=quantization)
        body = WeightReader(source, kernels).at(prefix)
        return MtpHead(
            config=config,
            embedding=model.embedding,
            embedding_norm=RmsNorm.read(body.at(embedding_norm), hidden, eps, config.centered_norms),
            state_norm=RmsNorm.read(body.at(state_norm), hidden, eps, config.centered_norms),
            layer=read_layer(body.at(name), config, 0),
            norm=RmsNorm.read(body.at(norm), hidden, eps, config.centered_norms),
            head=model.head,
            aux_layers=(len(model.layers),),
            joined=Linear.read(body, [(joined, hidden)], 2 * hidden),
            target_norm=model.norm,
        )
