"""Llama, Mistral, Qwen2 and Qwen3: one dense decoder architecture whose variants differ in switches of DenseConfig.

embedding ─► layers: norm ─► attention ─► + ─► norm ─► gated MLP ─► + ─► ... ─► norm ─► head

A DenseModel has the weights, and a Decoder runs it over the ragged batch of a step. Neither stores anything about a request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import RaggedRows
from rootstock_llm.services.worker.exec.contracts.causal_model import NoVocabulary
from rootstock_llm.services.worker.exec.models.layers import (
    Attend,
    Attention,
    Embedding,
    ForwardContext,
    GatedMlp,
    Head,
    RmsNorm,
    Take,
    TransformerLayer,
    Workspace,
    storage_bytes,
    stream_buffers,
)
from rootstock_llm.services.worker.exec.pools.kv_pool import KVPool, LayerKV
from rootstock_llm.services.worker.exec.weights.checkpoint import Checkpoint, UnsupportedModel, architecture_of
from rootstock_llm.services.worker.exec.weights.source import WeightReader

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
CAUSAL = "ForCausalLM"  # ending of an architecture with a vocabulary projection


class Decoder:
    """Implements CausalModel. Owns the activation buffers of its passes; one thread calls it at a time."""

    def __init__(self, model: DenseModel, cos_sin: Tensor, attend: Attend, aux_layers: tuple[int, ...] = ()) -> None:
        """
        Args:
            cos_sin: float32[positions, D], see rope_table().
            attend: Kernels.paged_attention, or attend() of an attention back end.
            aux_layers: layers whose inputs are stored for a draft head, ascending. A number equal to the number of layers stands
                for the output of the last layer.
        """
        assert all(0 <= layer <= len(model.layers) for layer in aux_layers), "aux layers are numbers of layers, or the output"
        self.model = model
        self._cos_sin, self._attend, self._aux_layers = cos_sin, attend, aux_layers
        self._hidden_size = model.config.hidden_size
        self._space = Workspace(model.embedding.weight.dtype, model.embedding.weight.device)
        self._last: tuple[Tensor, Tensor] | None = None  # residual and update of the last pass

    def attending(self, attend: Attend, aux_layers: tuple[int, ...] = ()) -> Decoder:
        """Returns a decoder with the same weights that calls another attention function and has separate buffers."""
        return Decoder(self.model, self._cos_sin, attend, aux_layers)

    def reserve(self, num_tokens: int, num_wanted: int) -> None:
        """Allocates the activation buffers of the largest step now. Later steps reuse them, and cannot enlarge them.

        Args:
            num_tokens: tokens of the largest step.
            num_wanted: largest number of tokens in one call of states() or logits().
        """
        self.model.reserve(lambda name, columns: self._space.take(name, num_tokens, columns))
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

    def states(self, wanted: Tensor) -> Tensor:
        """Returns the final norm of the wanted tokens. See TokenModel."""
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
class DenseModel(ABC):
    """The weights of a decoder whose layers all have the same structure."""

    config: DenseConfig
    embedding: Embedding
    layers: tuple[TransformerLayer, ...]
    norm: RmsNorm
    head: Head | None  # None if the model has no vocabulary projection

    @classmethod
    @abstractmethod
    def config_of(cls, given: Any) -> DenseConfig:
        """Reads a transformers PreTrainedConfig. Raises UnsupportedModel for sizes that no decoder can have."""

    @classmethod
    def read(cls, weights: WeightReader, config: DenseConfig) -> Self:
        """Reads the model's tensors, each of them once, the embedding first."""
        body = weights.at(config.prefix.removesuffix(".")) if config.prefix else weights
        embedding = Embedding.read(body.at("embed_tokens"), config.vocab_size, config.hidden_size)
        layers = [read_layer(body.at(f"layers.{index}"), config, window) for index, window in enumerate(config.windows)]
        assert len(layers) == config.num_layers, "the config has a window for each layer"
        norm = RmsNorm.read(body.at("norm"), config.hidden_size, config.rms_norm_eps)
        head = None
        if config.has_head and config.tie_word_embeddings:
            head = Head.tied(embedding, weights.kernels)
        elif config.has_head:
            head = Head.read(weights.at("lm_head"), config.vocab_size, config.hidden_size)
        return cls(config, embedding, tuple(layers), norm, head)

    @property
    def cache(self) -> tuple[LayerKV, ...]:
        """The size of a token's KV in each layer."""
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


class Llama(DenseModel):
    """Llama 2 and 3 (arXiv 2307.09288, 2407.21783), and models that use their architecture."""

    @classmethod
    def config_of(cls, given: Any) -> DenseConfig:
        bias = bool(given.attention_bias)
        return _dense_config(given, _no_windows(given), qkv_bias=bias, o_bias=bias, mlp_bias=bool(given.mlp_bias))


class Mistral(DenseModel):
    """Mistral (arXiv 2310.06825): a sliding window in all layers, or in none."""

    @classmethod
    def config_of(cls, given: Any) -> DenseConfig:
        return _dense_config(given, (int(given.sliding_window or 0),) * int(given.num_hidden_layers))


class Qwen2(DenseModel):
    """Qwen2 and Qwen2.5 (arXiv 2407.10671): biases of queries, keys and values; sliding windows in some layers."""

    @classmethod
    def config_of(cls, given: Any) -> DenseConfig:
        return _dense_config(given, _windows_by_layer(given), qkv_bias=True)


class Qwen3(DenseModel):
    """Qwen3 (arXiv 2505.09388): an RMS norm of each head's queries and keys; sliding windows in some layers."""

    @classmethod
    def config_of(cls, given: Any) -> DenseConfig:
        bias = bool(given.attention_bias)
        return _dense_config(given, _windows_by_layer(given), qkv_bias=bias, o_bias=bias, qk_norm=True)


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """Sizes and switches of a dense decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: dict[str, Any]  # rope_parameters of the config: rope_type, rope_theta and the parameters of this type
    windows: tuple[int, ...]  # per layer: number of last tokens, itself included, to which a token attends; 0 for all
    qkv_bias: bool = False  # whether the projections to queries, keys and values have biases
    o_bias: bool = False  # whether the output projection of attention has a bias
    mlp_bias: bool = False  # whether the projections of the MLP have biases
    qk_norm: bool = False  # whether an RMS norm is applied to each head's queries and keys
    has_head: bool = True  # whether the model has a vocabulary projection, which may be the embedding
    prefix: str = "model."  # prefix of all tensor names except the vocabulary projection's: "model." or empty

    def resolved(self, checkpoint: Checkpoint, dtype: torch.dtype) -> DenseConfig:
        """Returns the config, corrected by what the checkpoint's tensors show, as transformers does it.

        - If tensor names lack "model.", the model was saved without its vocabulary projection. It then has a projection only if
          the config ties it to the embedding.
        - If the checkpoint has a projection that differs from the embedding, the projection is not tied, even if
          tie_word_embeddings is set.
        """
        config = replace(self, prefix="" if checkpoint.has(EMBEDDING) else "model.")
        in_checkpoint = checkpoint.has(HEAD)
        if config.has_head and not config.tie_word_embeddings and not config.prefix and not in_checkpoint:
            return replace(config, has_head=False)
        name = config.prefix + EMBEDDING
        if config.tie_word_embeddings and in_checkpoint and checkpoint.has(name):
            shape = (config.vocab_size, config.hidden_size)
            embedding, head = (checkpoint.tensor(each, shape, dtype) for each in (name, HEAD))
            return replace(config, tie_word_embeddings=torch.equal(embedding, head))
        return config


def read_layer(weights: WeightReader, config: DenseConfig, window: int, attention_features: int = 0) -> TransformerLayer:
    """Reads one layer.

    Args:
        weights: reader with the layer's prefix, such as "model.layers.3.".
        window: sliding window of the layer in tokens, 0 for none.
        attention_features: size of the attention's input, 0 for the hidden size.
    """
    hidden, eps = config.hidden_size, config.rms_norm_eps
    return TransformerLayer(
        input_norm=RmsNorm.read(weights.at("input_layernorm"), hidden, eps),
        attention=Attention.read(
            weights.at("self_attn"),
            attention_features or hidden,
            hidden,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            window=window,
            eps=eps,
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            qk_norm=config.qk_norm,
        ),
        post_norm=RmsNorm.read(weights.at("post_attention_layernorm"), hidden, eps),
        mlp=GatedMlp.read(weights.at("mlp"), hidden, config.intermediate_size, config.mlp_bias),
    )


def _no_windows(given: Any) -> tuple[int, ...]:
    return (0,) * int(given.num_hidden_layers)


def _windows_by_layer(given: Any) -> tuple[int, ...]:
    return tuple((given.sliding_window or 0) if kind == "sliding_attention" else 0 for kind in given.layer_types)


def _dense_config(
    given: Any,
    windows: tuple[int, ...],
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> DenseConfig:
    head_dim = getattr(given, "head_dim", None) or given.hidden_size // given.num_attention_heads
    if head_dim % 2:
        raise UnsupportedModel(f"head_dim {head_dim} is odd; rotary embedding needs an even head_dim")
    return DenseConfig(
        architecture=architecture_of(given),
        vocab_size=given.vocab_size,
        hidden_size=given.hidden_size,
        intermediate_size=given.intermediate_size,
        num_layers=given.num_hidden_layers,
        num_heads=given.num_attention_heads,
        num_kv_heads=given.num_key_value_heads or given.num_attention_heads,
        head_dim=head_dim,
        rms_norm_eps=given.rms_norm_eps,
        max_position_embeddings=given.max_position_embeddings,
        tie_word_embeddings=bool(given.tie_word_embeddings),
        rope=dict(given.rope_parameters or {}),
        windows=windows,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        has_head=architecture_of(given).endswith(CAUSAL),
    )
