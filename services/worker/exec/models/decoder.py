"""Implements the decoder of Llama, Mistral, Mixtral, Qwen, gpt-oss and Gemma. Switches of DecoderConfig select the variants.

embedding ─► layers: norm ─► mixer ─► + ─► norm ─► MLP ─► + ─► ... ─► norm ─► head

The mixer is attention or, in most layers of Qwen3.5, Gated DeltaNet. The MLP is a gated MLP or, in a mixture, a set of experts.
In Gemma, the outputs of mixer and MLP also have norms.

A DecoderModel has the weights, and a Decoder runs it over the ragged batch of a step. Neither stores anything about a request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import RaggedRows
from rootstock_llm.services.shared.served_config import LAYER_TYPES
from rootstock_llm.services.worker.core.contracts.experts import ExpertShape
from rootstock_llm.services.worker.exec.contracts.causal_model import NoVocabulary
from rootstock_llm.services.worker.exec.models.attention import Attention
from rootstock_llm.services.worker.exec.models.decoder_config import DecoderConfig
from rootstock_llm.services.worker.exec.models.experts import IDS, Experts
from rootstock_llm.services.worker.exec.models.gated_delta_net import GatedDeltaNet
from rootstock_llm.services.worker.exec.models.layers import (
    Attend,
    Embedding,
    ForwardContext,
    GatedMlp,
    Head,
    Mixer,
    Mlp,
    RmsNorm,
    Take,
    TransformerLayer,
    Workspace,
    storage_bytes,
    stream_buffers,
)
from rootstock_llm.services.worker.exec.pools.kv_pool import KVPool, LayerCache
from rootstock_llm.services.worker.exec.weights.source import WeightReader


class Decoder:
    """Implements CausalModel. Owns the activation buffers of its passes; one thread calls it at a time."""

    def __init__(self, model: DecoderModel, cos_sin: Sequence[Tensor], attend: Attend, aux_layers: tuple[int, ...] = ()) -> None:
        """
        Args:
            cos_sin: tables of the model's rotary embeddings, see ForwardContext.
            attend: Kernels.paged_attention, or attend() of an attention back end.
            aux_layers: layers whose inputs are stored for a draft head, ascending. A number equal to the number of layers stands
                for the output of the last layer.
        """
        assert all(0 <= layer <= len(model.layers) for layer in aux_layers), "aux layers are numbers of layers, or the output"
        self.model = model
        self._cos_sin, self._attend, self._aux_layers = cos_sin, attend, aux_layers
        self._hidden_size = model.config.hidden_size
        self._space = Workspace(model.embedding.dtype, model.embedding.device)
        self._last: tuple[Tensor, Tensor] | None = None  # residual and update of the last pass
        sizes, sparse = model.config.experts, model.config.sparse
        self.experts = None if sizes is None else ExpertShape(sparse, sizes.count, sizes.routing.top_k)  # see RoutedModel

    def attending(self, attend: Attend, aux_layers: tuple[int, ...] = ()) -> Decoder:
        """Returns a decoder with the same weights that calls another attention function and has separate buffers."""
        return Decoder(self.model, self._cos_sin, attend, aux_layers)

    def reserve(self, num_tokens: int, num_wanted: int) -> None:
        """Allocates the activation buffers of the largest step now. Later steps reuse them, and cannot enlarge them.

        Args:
            num_tokens: tokens of the largest step.
            num_wanted: largest number of tokens in one call of states() or logits().
        """
        self.model.reserve(lambda name, columns, dtype=None: self._space.take(name, num_tokens, columns, dtype))
        self.aux_states(num_tokens)
        self._space.take("normed", num_wanted, self._hidden_size)
        if self.model.head is not None:
            self._space.take("logits", num_wanted, self.model.head.vocab_size, torch.float32)
        self._space.fix()

    def forward(self, input_ids: Tensor, rows: RaggedRows, pool: KVPool) -> None:
        assert len(input_ids) == len(rows.positions) == len(rows.locations), (
            "each token has a position and a location in the pool"
        )
        assert len(pool.keys) == len(self.model.layers), "each layer has keys and values in the pool"
        context = ForwardContext(self._space, self._hidden_size, rows, self._cos_sin, self._attend)
        aux = dict(zip(self._aux_layers, self.aux_states(len(input_ids)), strict=True))
        self.model.forward(input_ids, pool, context, aux)
        self._last = context.residual, context.update

    def aux_states(self, num_tokens: int) -> tuple[Tensor, ...]:
        """Returns the inputs of the aux layers, [num_tokens, N] each, for the first tokens of the last pass.

        The last pass may be one that a graph replayed, because the buffers have constant addresses. The results are valid until
        the next pass.
        """
        return tuple(self._space.take(f"aux {layer}", num_tokens, self._hidden_size) for layer in self._aux_layers)

    def routed_experts(self, num_tokens: int) -> Tensor:
        """Returns the expert ids of the last pass. See RoutedModel."""
        assert self.experts is not None, "the model has experts"
        layers, chosen = len(self.experts.layers), self.experts.num_chosen
        return self._space.take(IDS, num_tokens, layers * chosen, torch.int32).view(layers, num_tokens, chosen)

    def states(self, wanted: Tensor) -> Tensor:
        """Returns the final norm of the hidden states of the wanted tokens. See TokenModel."""
        if self._last is None:
            raise RuntimeError("states() was called before the first forward()")
        assert wanted.dim() == 1, "wanted has one dimension: indices of tokens"
        normed = self._space.take("normed", len(wanted), self._hidden_size)
        if len(wanted):
            residual, update = self._last
            self.model.norm.add(normed, update[wanted], residual[wanted])
        return normed

    def logits(self, wanted: Tensor) -> Tensor:
        """Projects the states of the wanted tokens. Raises NoVocabulary. See CausalModel."""
        head = self.model.head
        if head is None:
            raise NoVocabulary("this model has no vocabulary projection: it computes embeddings and samples no tokens")
        logits = self._space.take("logits", len(wanted), head.vocab_size, torch.float32)
        if len(wanted):
            head.forward(logits, self.states(wanted))
        return logits


@dataclass(frozen=True)
class DecoderModel(ABC):
    """The weights of a decoder. Each layer has attention or a recurrence, and an MLP.

    The name of a subclass is that of its architectures without the ending: Qwen3 computes Qwen3ForCausalLM and Qwen3Model.
    """

    model_type: ClassVar[str]  # model_type in the configs
    wrapper_type: ClassVar[str] = ""  # model_type of configs of text and images; empty if there are no such models
    has_base: ClassVar[bool] = False  # whether the class also computes models without a vocabulary projection
    activation: ClassVar[str] = "silu"
    activation_key: ClassVar[str] = "hidden_act"  # attribute of the configs that names the activation
    layer_types: ClassVar[frozenset[str]] = LAYER_TYPES  # supported values in layer_types of the configs
    partial_rotation: ClassVar[bool] = False  # whether partial_rotary_factor may be below 1
    caps: ClassVar[bool] = False  # whether scores and logits may have caps

    config: DecoderConfig
    embedding: Embedding
    layers: tuple[TransformerLayer, ...]
    norm: RmsNorm
    head: Head | None  # None if the model has no vocabulary projection

    @classmethod
    @abstractmethod
    def config_of(cls, given: Any) -> DecoderConfig:
        """Reads a transformers PreTrainedConfig. Raises UnsupportedModel for sizes that no decoder can have."""

    @classmethod
    def read(cls, weights: WeightReader, config: DecoderConfig) -> Self:
        """Reads the model's tensors, each of them once, the embedding first."""
        body = weights.at(config.prefix.removesuffix(".")) if config.prefix else weights
        tied = config.has_head and config.tie_word_embeddings
        vectors = body.at("embed_tokens")
        embedding = Embedding.read(vectors, config.vocab_size, config.hidden_size, config.embedding_scale, tied)
        assert len(config.windows) == config.num_layers, "the config has a window for each layer"
        layers = [read_layer(body.at(f"layers.{index}"), config, index) for index in range(config.num_layers)]
        norm = RmsNorm.read(body.at("norm"), config.hidden_size, config.rms_norm_eps, config.centered_norms)
        head = None
        if tied:
            head = Head.tied(embedding, config.logit_softcap)
        elif config.has_head:
            head = Head.read(weights.at(config.head_name), config.vocab_size, config.hidden_size, config.logit_softcap)
        return cls(config, embedding, tuple(layers), norm, head)

    @property
    def cache(self) -> tuple[LayerCache, ...]:
        """The size of each layer's cache."""
        return tuple(layer.cache for layer in self.layers)

    def reserve(self, take: Take) -> None:
        """Takes all buffers that forward() uses, so that they are allocated before the first step."""
        stream_buffers(take, self.config.hidden_size)
        for layer in self.layers:
            layer.reserve(take)

    def forward(self, input_ids: Tensor, pool: KVPool, context: ForwardContext, aux: Mapping[int, Tensor]) -> None:
        """Computes all layers. The output of the last layer is the sum of context.residual and context.update.

        Args:
            input_ids: int64[T].
            aux: buffers [T, N] for the inputs of the aux layers, by layer, see Decoder.
        """
        residual, update, hidden = context.residual, context.update, context.hidden
        self.embedding.forward(residual, input_ids)
        for index, layer in enumerate(self.layers):
            if index == 0:
                layer.input_norm.forward(hidden, residual)
            else:
                layer.input_norm.add(hidden, update, residual)
            if index in aux:
                aux[index].copy_(residual)
            layer.forward(hidden, pool.layer(index), context)
        if len(self.layers) in aux:
            torch.add(residual, update, out=aux[len(self.layers)])

    def tensors(self) -> Iterator[Tensor]:
        for part in (self.embedding, *self.layers, self.norm, *(() if self.head is None else (self.head,))):
            yield from part.tensors()

    def num_bytes(self) -> int:
        """Returns the bytes of the weights, packed copies included. Shared storage counts once."""
        return storage_bytes(self.tensors())

    def expert_bytes(self) -> int:
        """Returns the bytes of the weights of all experts, without those of shared experts."""
        packed = [layer.mlp.packed for layer in self.layers if isinstance(layer.mlp, Experts)]
        return sum(tensor.nbytes for each in packed for part in (each.gate_up, each.down) for tensor in part.tensors)


def read_layer(weights: WeightReader, config: DecoderConfig, index: int, attention_features: int = 0) -> TransformerLayer:
    """Reads one layer.

    Args:
        weights: reader with the layer's prefix, such as "model.layers.3.".
        index: number of the layer in the config.
        attention_features: size of the attention's input, 0 for the hidden size.
    """
    hidden, eps, centered = config.hidden_size, config.rms_norm_eps, config.centered_norms

    def norm(name: str) -> RmsNorm:
        return RmsNorm.read(weights.at(name), hidden, eps, centered)

    input_norm = norm("input_layernorm")
    mixer: Mixer
    if index in config.recurrent:
        assert config.delta is not None, "a config with recurrent layers has their sizes"
        mixer = GatedDeltaNet.read(weights.at("linear_attn"), hidden, config.delta, eps)
    else:
        rope = int(index in config.local_layers)
        features, window = attention_features or hidden, config.windows[index]
        mixer = Attention.read(weights.at("self_attn"), features, hidden, config.attention, window, rope)
    if config.output_norms:
        after = norm("post_attention_layernorm"), norm("post_feedforward_layernorm")
        before_mlp = norm("pre_feedforward_layernorm")
    else:
        after, before_mlp = None, norm("post_attention_layernorm")
    mlp: Mlp
    if index in config.sparse:
        assert config.experts is not None, "a config with sparse layers has the sizes of their experts"
        mlp = Experts.read(weights, hidden, config.experts, config.sparse.index(index), len(config.sparse))
    else:
        mlp = GatedMlp.read(weights.at("mlp"), hidden, config.intermediate_size, config.mlp_bias, config.gelu)
    return TransformerLayer(input_norm, mixer, before_mlp, mlp, after)
