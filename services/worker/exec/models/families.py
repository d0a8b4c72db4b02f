"""The families of models that the decoder computes. Each class reads the configs of its family.

The name of a class is that of its architectures without the ending, such as Qwen3 of Qwen3ForCausalLM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rootstock_llm.kernels.contracts.ops import MOST_TAPS, Activation, Routing
from rootstock_llm.services.shared.served_config import LAYER_TYPES, RECURRENT
from rootstock_llm.services.worker.exec.models.decoder import DecoderModel
from rootstock_llm.services.worker.exec.models.decoder_config import DecoderConfig, decoder_config, windows_by_layer
from rootstock_llm.services.worker.exec.models.experts import FUSED, ExpertSizes
from rootstock_llm.services.worker.exec.models.gated_delta_net import DeltaNetSizes
from rootstock_llm.services.worker.exec.weights.checkpoint import UnsupportedModel


class Llama(DecoderModel):
    """Llama 2 and 3 (arXiv 2307.09288, 2407.21783), and models that use their architecture."""

    model_type = "llama"
    has_base = True

    @classmethod
    def config_of(cls, given: Any) -> DecoderConfig:
        bias = bool(given.attention_bias)
        windows = (0,) * int(given.num_hidden_layers)
        return decoder_config(given, windows, qkv_bias=bias, o_bias=bias, mlp_bias=bool(given.mlp_bias))


class Mistral(DecoderModel):
    """Mistral (arXiv 2310.06825): a sliding window in all layers, or in none."""

    model_type = "mistral"
    has_base = True

    @classmethod
    def config_of(cls, given: Any) -> DecoderConfig:
        return decoder_config(given, (int(given.sliding_window or 0),) * int(given.num_hidden_layers))


class Mixtral(DecoderModel):
    """Mixtral (arXiv 2401.04088): Mistral with experts in all layers."""

    model_type = "mixtral"

    @classmethod
    def config_of(cls, given: Any) -> DecoderConfig:
        layers = int(given.num_hidden_layers)
        config = decoder_config(given, (int(given.sliding_window or 0),) * layers)
        routing = Routing(int(given.num_experts_per_tok), renormalize=True)
        experts = expert_sizes(int(given.num_local_experts), given.intermediate_size, routing)
        return replace(config, experts=experts, sparse=tuple(range(layers)))


class Qwen2(DecoderModel):
    """Qwen2 and Qwen2.5 (arXiv 2407.10671): biases of queries, keys and values; sliding windows in some layers."""

    model_type = "qwen2"
    has_base = True

    @classmethod
    def config_of(cls, given: Any) -> DecoderConfig:
        return decoder_config(given, windows_by_layer(given), qkv_bias=True)


class Qwen3(DecoderModel):
    """Qwen3 (arXiv 2505.09388): an RMS norm of each head's queries and keys; sliding windows in some layers."""

    model_type = "qwen3"
    has_base = True

    @classmethod
    def config_of(cls, given: Any) -> DecoderConfig:
        bias = bool(given.attention_bias)
        return decoder_config(given, windows_by_layer(given), qkv_bias=bias, o_bias=bias, qk_norm=True)


class Qwen3Moe(DecoderModel):
    """Qwen3 with experts (arXiv 2505.09388) in every decoder_sparse_step-th layer, except the layers in mlp_only_layers."""

    model_type = "qwen3_moe"

    @classmethod
    def config_of(cls, given: Any) -> DecoderConfig:
        layers, bias = int(given.num_hidden_layers), bool(given.attention_bias)
        window = int(given.sliding_window or 0)
        config = decoder_config(given, (window,) * layers, qkv_bias=bias, o_bias=bias, qk_norm=True)
        step, dense = int(given.decoder_sparse_step), set(given.mlp_only_layers or ())
        sparse = tuple(index for index in range(layers) if index not in dense and not (index + 1) % step)
        if not sparse or not given.num_experts:
            return config
        routing = Routing(int(given.num_experts_per_tok), renormalize=bool(given.norm_topk_prob))
        return replace(config, experts=expert_sizes(given.num_experts, given.moe_intermediate_size, routing), sparse=sparse)


class Qwen3_5(DecoderModel):
    """Qwen3.5 without experts: Gated DeltaNet in most layers, and attention with an output gate in the others.

    Each norm's weight is stored minus 1, and a part of each head is rotated, a quarter by default. The model's rotary embedding
    has three axes. Only text positions occur, and for them this embedding equals the usual one. The published models have no
    windows.
    """

    model_type = "qwen3_5_text"
    wrapper_type = "qwen3_5"
    layer_types = LAYER_TYPES | {RECURRENT}
    partial_rotation = True

    @classmethod
    def config_of(cls, given: Any) -> DecoderConfig:
        delta = DeltaNetSizes(
            key_heads=given.linear_num_key_heads,
            value_heads=given.linear_num_value_heads,
            key_dim=given.linear_key_head_dim,
            value_dim=given.linear_value_head_dim,
            taps=given.linear_conv_kernel_dim,
        )
        if min(delta.key_heads, delta.key_dim, delta.value_dim, delta.taps - 1) < 1 or delta.value_heads % delta.key_heads:
            raise UnsupportedModel(f"the recurrent layers have sizes that do not fit: {delta}")
        if delta.taps > MOST_TAPS:
            raise UnsupportedModel(
                f"the convolution of recurrent layers has {delta.taps} taps; at most {MOST_TAPS} are supported"
            )
        if "sliding_attention" in given.layer_types and not getattr(given, "sliding_window", None):
            raise UnsupportedModel("layers of type sliding_attention need sliding_window, which is not set")
        bias = bool(given.attention_bias)
        config = decoder_config(given, windows_by_layer(given), qkv_bias=bias, o_bias=bias, qk_norm=True)
        recurrent = tuple(index for index, kind in enumerate(given.layer_types) if kind == RECURRENT)
        if len(recurrent) == len(given.layer_types):
            raise UnsupportedModel("all layers are recurrent; at least one layer must have attention")
        return replace(config, centered_norms=True, output_gate=True, delta=delta, recurrent=recurrent)


class Qwen3_5Moe(Qwen3_5):
    """Qwen3.5 with experts in all layers, and a shared expert with a gate."""

    model_type = "qwen3_5_moe_text"
    wrapper_type = "qwen3_5_moe"

    @classmethod
    def config_of(cls, given: Any) -> DecoderConfig:
        config = super().config_of(given)
        routing = Routing(int(given.num_experts_per_tok), renormalize=True)
        experts = expert_sizes(int(given.num_experts), given.moe_intermediate_size, routing)
        shared = int(given.shared_expert_intermediate_size)
        if shared < 1:
            raise UnsupportedModel(f"shared_expert_intermediate_size is {shared}; it must be at least 1")
        experts = replace(experts, shared_size=shared, shared_gate=True)
        return replace(config, experts=experts, sparse=tuple(range(config.num_layers)))


class GptOss(DecoderModel):
    """gpt-oss (arXiv 2508.10925): experts in all layers, attention sinks, and windows in every other layer.

    Router and experts have biases. An expert's gate and up projection have limits.
    """

    model_type = "gpt_oss"

    @classmethod
    def config_of(cls, given: Any) -> DecoderConfig:
        bias = bool(given.attention_bias)
        config = decoder_config(given, windows_by_layer(given), qkv_bias=bias, o_bias=bias)
        routing = Routing(int(given.num_experts_per_tok), renormalize=True)
        experts = replace(
            expert_sizes(int(given.num_local_experts), given.intermediate_size, routing),
            # Configs of older versions of transformers lack both numbers, because its code had them as constants.
            activation=Activation(getattr(given, "swiglu_alpha", 1.702), getattr(given, "swiglu_limit", 7.0), shift=1.0),
            names=FUSED,
            router="router",
            router_bias=True,
            interleaved=True,
        )
        return replace(config, has_sinks=True, experts=experts, sparse=tuple(range(config.num_layers)))


class Gemma2(DecoderModel):
    """Gemma 2 (arXiv 2408.00118): caps of scores and logits, and windows in every other layer.

    Attention and MLP have norms before and after them. Each norm's weight is stored minus 1, and the embedding is multiplied by
    the root of its size.
    """

    model_type = "gemma2"
    activation = "gelu_pytorch_tanh"
    activation_key = "hidden_activation"
    caps = True

    @classmethod
    def config_of(cls, given: Any) -> DecoderConfig:
        bias = bool(given.attention_bias)
        return replace(
            decoder_config(given, windows_by_layer(given), qkv_bias=bias, o_bias=bias),
            score_scale=given.query_pre_attn_scalar**-0.5,
            score_softcap=given.attn_logit_softcapping or 0.0,
            logit_softcap=given.final_logit_softcapping or 0.0,
            embedding_scale=given.hidden_size**0.5,
            centered_norms=True,
            output_norms=True,
            gelu=True,
        )


class Gemma3(DecoderModel):
    """Gemma 3 (arXiv 2503.19786): five of six layers have a window, and a rotary base that only these layers use.

    Attention and MLP have norms before and after them. Each norm's weight is stored minus 1, and the embedding is multiplied by
    the root of its size.
    """

    model_type = "gemma3_text"
    wrapper_type = "gemma3"
    activation = "gelu_pytorch_tanh"
    activation_key = "hidden_activation"

    @classmethod
    def config_of(cls, given: Any) -> DecoderConfig:
        bias = bool(given.attention_bias)
        ropes = given.rope_parameters or {}
        if missing := LAYER_TYPES - ropes.keys():
            raise UnsupportedModel(f"rope_parameters has no entry for layers of type {', '.join(sorted(missing))}")
        config = decoder_config(given, windows_by_layer(given), qkv_bias=bias, o_bias=bias, qk_norm=True)
        return replace(
            config,
            rope=dict(ropes["full_attention"]),
            local_rope=dict(ropes["sliding_attention"]),
            local_layers=tuple(index for index, kind in enumerate(given.layer_types) if kind == "sliding_attention"),
            score_scale=given.query_pre_attn_scalar**-0.5,
            embedding_scale=given.hidden_size**0.5,
            centered_norms=True,
            output_norms=True,
            gelu=True,
        )


MODELS: tuple[type[DecoderModel], ...] = (
    Llama,
    Mistral,
    Mixtral,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    Qwen3_5,
    Qwen3_5Moe,
    GptOss,
    Gemma2,
    Gemma3,
)


def expert_sizes(count: int, intermediate_size: int, routing: Routing) -> ExpertSizes:
    """Returns the sizes of experts. Raises UnsupportedModel if num_experts_per_tok or the intermediate size is out of range."""
    if not routing.fits(count):
        raise UnsupportedModel(f"num_experts_per_tok is {routing.top_k}; a token chooses from 1 to {count} experts")
    if intermediate_size < 1:
        raise UnsupportedModel(f"the intermediate size of experts is {intermediate_size}; it must be at least 1")
    return ExpertSizes(count, intermediate_size, routing)
