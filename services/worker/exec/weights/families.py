"""The model families that one dense decoder covers, and what tells them apart.

A family is read off the Hugging Face config into a DecoderConfig; nothing after this module knows family names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.shared.served_config import LAYER_TYPES


class UnsupportedModel(ValueError):
    """The checkpoint asks for something that this worker does not do; the message names it."""


class NotCovered(UnsupportedModel):
    """Beyond our own decoder; another way of running the model may do it."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shapes and switches of a dense decoder. windows: per layer, tokens a token may see (its own included), 0 for all.

    rope: the config's rope parameters: rope_type, rope_theta (base) and what the type needs. has_head: the checkpoint has a
    vocabulary projection.
    """

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
    rope: dict[str, Any]
    windows: tuple[int, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    has_head: bool = True

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Family:
    """Each switch is read from the config; see DecoderConfig for their meaning."""

    qkv_bias: Callable[[Any], bool]
    o_bias: Callable[[Any], bool]
    mlp_bias: Callable[[Any], bool]
    qk_norm: bool
    windows: Callable[[Any], tuple[int, ...]]


def _no(_: Any) -> bool:
    return False


def _attention_bias(config: Any) -> bool:
    return bool(config.attention_bias)


def _no_window(config: Any) -> tuple[int, ...]:
    return (0,) * int(config.num_hidden_layers)


def _window_everywhere(config: Any) -> tuple[int, ...]:
    return (int(config.sliding_window or 0),) * int(config.num_hidden_layers)


def _window_by_layer(config: Any) -> tuple[int, ...]:
    return tuple((config.sliding_window or 0) if kind == "sliding_attention" else 0 for kind in config.layer_types)


FAMILIES: dict[str, Family] = {
    "Llama": Family(_attention_bias, _attention_bias, lambda c: bool(c.mlp_bias), False, _no_window),
    "Mistral": Family(_no, _no, _no, False, _window_everywhere),
    "Qwen2": Family(lambda _: True, _no, _no, False, _window_by_layer),
    "Qwen3": Family(_attention_bias, _attention_bias, _no, True, _window_by_layer),
}
HEAD, NO_HEAD = "ForCausalLM", "Model"  # how an architecture's name ends
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def architecture_of(config: Any) -> str:
    """The first architecture that the config names."""
    return str((config.architectures or ["(none)"])[0])


def model_type_of(architecture: str) -> str:
    """Of a family of ours: as transformers calls it in configs."""
    return architecture.removesuffix(HEAD).removesuffix(NO_HEAD).lower()


def _family(config: Any) -> Family:
    """Raises NotCovered, naming what the decoder does not do."""
    architecture = architecture_of(config)
    family = FAMILIES.get(architecture.removesuffix(HEAD).removesuffix(NO_HEAD))
    if family is None or not architecture.endswith((HEAD, NO_HEAD)):
        raise NotCovered(f"architecture {architecture} is not one of {', '.join(sorted(FAMILIES))}")
    if config.model_type != model_type_of(architecture):
        raise NotCovered(f"model type {config.model_type} is not that of {architecture}")
    if config.hidden_act != "silu":
        raise NotCovered(f"hidden_act {config.hidden_act} is not supported; supported: silu")
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        raise NotCovered("attention in both directions is not supported")
    if unknown := set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES:
        raise NotCovered(f"layers of type {', '.join(sorted(unknown))} are not supported")
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        raise NotCovered(f"rope type {rope['rope_type']} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise NotCovered("partial_rotary_factor other than 1 is not supported")
    return family


def _check_shapes(config: Any) -> None:
    """Raises UnsupportedModel for numbers that no decoder can have."""
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if not isinstance(getattr(config, name), int) or getattr(config, name) < 1:
            raise UnsupportedModel(f"{name} {getattr(config, name)} is no positive number")
    if config.num_attention_heads % (config.num_key_value_heads or config.num_attention_heads):
        raise UnsupportedModel(
            f"{config.num_attention_heads} heads are no multiple of {config.num_key_value_heads} key/value heads"
        )


def decoder_config(config: Any) -> DecoderConfig:
    """config: a transformers PreTrainedConfig. Raises NotCovered for what another way of running the model may do, and
    UnsupportedModel for what is wrong; both name it."""
    family = _family(config)
    _check_shapes(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim % 2:
        raise UnsupportedModel(f"head_dim {head_dim} is odd, rotary embedding needs it even")
    return DecoderConfig(
        architecture=architecture_of(config),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        rope=dict(config.rope_parameters or {}),
        windows=family.windows(config),
        qkv_bias=family.qkv_bias(config),
        o_bias=family.o_bias(config),
        mlp_bias=family.mlp_bias(config),
        qk_norm=family.qk_norm,
        has_head=architecture_of(config).endswith(HEAD),
    )
