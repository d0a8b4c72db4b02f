"""The sizes and switches of decoders, as read from a transformers config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rootstock_llm.services.worker.exec.models.attention import AttentionSizes
from rootstock_llm.services.worker.exec.models.experts import ExpertSizes
from rootstock_llm.services.worker.exec.models.gated_delta_net import DeltaNetSizes
from rootstock_llm.services.worker.exec.models.rope import rope_table
from rootstock_llm.services.worker.exec.weights.checkpoint import Checkpoint, UnsupportedModel, architecture_of

EMBEDDING = "embed_tokens.weight"
# Prefixes of all tensor names, except those of the vocabulary projection. In order: a model without its projection, a causal
# model, and two variants of a causal model in a model of text and images.
PREFIXES = ("", "model.", "model.language_model.", "language_model.model.")
HEADS = ("lm_head", "language_model.lm_head")  # names of the vocabulary projection
CAUSAL = "ForCausalLM"  # ending of an architecture with a vocabulary projection


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and switches of a decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # size of the MLPs without experts; 0 if the config has none, because all layers have experts
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: dict[str, Any]  # rope_parameters of the config: rope_type, rope_theta and the parameters of this type
    windows: tuple[int, ...]  # per layer: number of last tokens, the token included, to which a token attends; 0 for all
    qkv_bias: bool = False  # whether the projections to queries, keys and values have biases
    o_bias: bool = False  # whether the output projection of attention has a bias
    mlp_bias: bool = False  # whether the projections of the MLP have biases
    qk_norm: bool = False  # whether an RMS norm is applied to each head's queries and keys
    has_head: bool = True  # whether the model has a vocabulary projection, which may be the embedding
    prefix: str = "model."  # one of PREFIXES
    head_name: str = HEADS[0]  # one of HEADS
    rotary_dim: int = 0  # number of a head's first elements that are rotated; 0 for all
    local_rope: dict[str, Any] | None = None  # rope of the layers in local_layers; None if all layers use `rope`
    local_layers: tuple[int, ...] = ()
    score_scale: float = 0.0  # factor of attention scores; 0 for 1 / sqrt(head_dim)
    score_softcap: float = 0.0  # cap of attention scores, see ScoreRule; 0 for none
    logit_softcap: float = 0.0  # cap of logits, see Head; 0 for none
    has_sinks: bool = False  # whether attention heads have sinks, see ScoreRule
    embedding_scale: float = 1.0  # factor of the embeddings
    centered_norms: bool = False  # whether the checkpoint has the norms' weights minus 1
    output_norms: bool = False  # whether the outputs of attention and MLP have norms
    output_gate: bool = False  # whether the attention result is multiplied by a sigmoid of its input
    gelu: bool = False  # whether the MLP uses gelu instead of silu
    delta: DeltaNetSizes | None = None  # sizes of the recurrent layers, if the model has any
    recurrent: tuple[int, ...] = ()  # layers with Gated DeltaNet instead of attention
    experts: ExpertSizes | None = None  # sizes of the layers with experts; None without such layers
    sparse: tuple[int, ...] = ()  # layers with experts instead of one MLP

    @property
    def attention(self) -> AttentionSizes:
        return AttentionSizes(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim or self.head_dim,
            scale=self.score_scale or self.head_dim**-0.5,
            eps=self.rms_norm_eps,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
            qk_norm=self.qk_norm,
            centered_norms=self.centered_norms,
            has_gate=self.output_gate,
            softcap=self.score_softcap,
            has_sinks=self.has_sinks,
        )

    def rope_tables(self, num_positions: int) -> tuple[Tensor, ...]:
        """Returns the tables of `rope` and of `local_rope`, see rope_table()."""
        ropes = (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)
        return tuple(rope_table(rope, self.head_dim, num_positions, self.rotary_dim) for rope in ropes)

    def within(self, context_len: int) -> DecoderConfig:
        """Returns the config for a context in tokens, without the windows that are not shorter than the context."""
        return replace(self, windows=tuple(window if window < context_len else 0 for window in self.windows))

    def of_one_layer(self) -> DecoderConfig:
        """Returns the config of a model with one layer of full attention, such as a draft head.

        The layer has experts if the last layer has some.
        """
        sparse = (0,) if self.num_layers - 1 in self.sparse else ()
        none: dict[str, Any] = {"local_rope": None, "local_layers": (), "delta": None, "recurrent": ()}
        return replace(self, num_layers=1, windows=(0,), sparse=sparse, **none)

    def with_experts_of(self, checkpoint: Checkpoint, layer: str) -> DecoderConfig:
        """Returns the config with the checkpoint's names of the tensors of experts.

        Args:
            layer: prefix of a layer with experts, such as "model.layers.0.".
        """
        return self if self.experts is None else replace(self, experts=self.experts.named_as(checkpoint, layer))

    def resolved(self, checkpoint: Checkpoint, dtype: torch.dtype) -> DecoderConfig:
        """Returns the config, corrected by what the checkpoint's tensors show, as transformers does it.

        - If tensor names lack "model.", the model was saved without its vocabulary projection. It then has a projection only if
          the config ties it to the embedding.
        - If the checkpoint has a projection that differs from the embedding, the projection is not tied, even if
          tie_word_embeddings is set.
        - The names of the experts are those of the first layer with experts.
        """
        prefix = next((each for each in PREFIXES if checkpoint.has(each + EMBEDDING)), "model.")
        head = next((each for each in HEADS if checkpoint.has(f"{each}.weight")), HEADS[0])
        config = replace(self, prefix=prefix, head_name=head)
        if config.sparse:
            config = config.with_experts_of(checkpoint, f"{prefix}layers.{config.sparse[0]}.")
        in_checkpoint = checkpoint.has(f"{head}.weight")
        if config.has_head and not config.tie_word_embeddings and not config.prefix and not in_checkpoint:
            return replace(config, has_head=False)
        name = config.prefix + EMBEDDING
        if config.tie_word_embeddings and in_checkpoint and checkpoint.has(name):
            shape = (config.vocab_size, config.hidden_size)
            embedding, projection = (checkpoint.tensor(each, shape, dtype) for each in (name, f"{head}.weight"))
            return replace(config, tie_word_embeddings=torch.equal(embedding, projection))
        return config


def windows_by_layer(given: Any) -> tuple[int, ...]:
    """Returns the window of each layer; 0 for a layer with full attention or with a recurrence."""
    return tuple(
        (getattr(given, "sliding_window", None) or 0) if kind == "sliding_attention" else 0 for kind in given.layer_types
    )


def _rope(given: Any) -> dict[str, Any]:
    """Returns the rope parameters of a config that has one set of them.

    With yarn, a factor of None stands for the context divided by the original context, as in transformers.
    """
    rope = dict(given.rope_parameters or {})
    if rope.get("rope_type") == "yarn" and rope.get("factor") is None:
        rope["factor"] = given.max_position_embeddings / rope["original_max_position_embeddings"]
    return rope


def decoder_config(
    given: Any,
    windows: tuple[int, ...],
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> DecoderConfig:
    head_dim = getattr(given, "head_dim", None) or given.hidden_size // given.num_attention_heads
    rotary_dim = int(head_dim * float((given.rope_parameters or {}).get("partial_rotary_factor", 1.0)))
    if head_dim % 2 or rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise UnsupportedModel(
            f"head_dim is {head_dim} and its rotated part {rotary_dim}; both must be even, and the part between 2 and head_dim"
        )
    return DecoderConfig(
        architecture=architecture_of(given),
        vocab_size=given.vocab_size,
        hidden_size=given.hidden_size,
        intermediate_size=getattr(given, "intermediate_size", 0),
        num_layers=given.num_hidden_layers,
        num_heads=given.num_attention_heads,
        num_kv_heads=given.num_key_value_heads or given.num_attention_heads,
        head_dim=head_dim,
        rms_norm_eps=given.rms_norm_eps,
        max_position_embeddings=given.max_position_embeddings,
        tie_word_embeddings=bool(given.tie_word_embeddings),
        rope=_rope(given),
        windows=windows,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        has_head=architecture_of(given).endswith(CAUSAL),
        rotary_dim=rotary_dim,
    )
