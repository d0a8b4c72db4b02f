"""Names in OpenAI's, SGLang's and vLLM's bodies that this server does not act on, by endpoint. Pure.

One that cannot change an answer is taken at any value: `unused`. One that can is taken at the values that ask for nothing and
refused with its name at any other: `neutral`. What stands in neither and in no request type is ignored on OpenAI's endpoints,
whose clients send new fields, and refused on SGLang's. Null asks for nothing, whatever the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.request.errors import ApiError

Neutral = Mapping[str, tuple[Any, ...]]  # name → values that ask for nothing


@dataclass(frozen=True, slots=True)
class KnownFields:
    unused: frozenset[str]
    neutral: Neutral


def is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    """0 is not False here: "logprobs": 0 does ask for something."""
    return any(type(value) is type(one) and value == one for one in neutral)


def refuse_unserved(body: Mapping[str, Any], known: KnownFields) -> None:
    """Raises ApiError that names the first field that asks for what there is not."""
    _refuse(body, known.neutral)
    options = body.get("stream_options")
    if isinstance(options, dict):
        _refuse(options, STREAM_OPTIONS, "stream_options.")


def _refuse(body: Mapping[str, Any], neutral: Neutral, path: str = "") -> None:
    for name in neutral.keys() & body.keys():
        value = body[name]
        if value is not None and not is_one_of(value, neutral[name]):
            raise unserved(path + name)


def unserved(name: str) -> ApiError:
    return ApiError(400, f"'{name}' is not supported by this server.", param=name, code="unsupported_parameter")


# Accounting, storage, moderators' and caches' hints, labels: none of them is part of an answer. Without a reasoning parser
# both values of separate_reasoning and stream_reasoning give the same answer.
_UNUSED = frozenset(
    (
        "custom_labels",
        "guided_decoding_backend",
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "return_mm_kwargs",
        "return_token_offsets",
        "safety_identifier",
        "separate_reasoning",
        "service_tier",
        "store",
        "stream_reasoning",
        "truncation_side",
        "user",
    )
)

_SAMPLING: Neutral = {
    "bad_words": ([],),
    "best_of": (1,),
    "custom_logit_processor": (),
    "custom_params": (),
    "early_stopping": (False,),
    "guided_whitespace_pattern": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "repetition_detection": (),
    "spaces_between_special_tokens": (True,),
    "thinking_token_budget": (-1,),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "watermarking": (False,),
}
_PROMPT: Neutral = {
    "audio": (),
    "chat_template": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "images_config": (),
    "input_ids": (),
    "lora_path": (),
    "max_dynamic_patch": (),
    "media_io_kwargs": ({},),
    "min_dynamic_patch": (),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "reasoning": (),
    "session_id": (),
    "suffix": ("",),
    "task": (),
    "tool_choice": ("none", "auto"),
    "truncate_prompt_tokens": (),
    "use_audio_in_video": (False,),
    "web_search_options": (),
}
_ANSWER: Neutral = {
    "include_reasoning": (True,),
    "modalities": ([], ["text"]),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "prompt_logprobs": (),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_prompt_text": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "routed_experts_start_len": (0,),
    "verbosity": ("medium",),
}
_PLACEMENT: Neutral = {
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "data_parallel_rank": (),
    "disagg_prefill_dp_rank": (),
    "ec_transfer_params": ({},),
    "kv_transfer_params": ({},),
    "ngram_corpus_id": (),
    "routed_dp_rank": (),
    "vllm_xargs": ({},),
}
_EVERYWHERE: Neutral = {**_SAMPLING, **_PROMPT, **_ANSWER, **_PLACEMENT}
_OF_TEMPLATES: Neutral = {
    "add_generation_prompt": (True, False),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "reasoning_effort": (),
    "tools": ([],),
}

STREAM_OPTIONS: Neutral = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}
# A chat template writes its own special tokens.
CHAT = KnownFields(_UNUSED, {**_EVERYWHERE, "add_special_tokens": (False,), "echo": (False,)})
COMPLETION = KnownFields(_UNUSED, {**_EVERYWHERE, **_OF_TEMPLATES})
EMBEDDING = KnownFields(
    _UNUSED,
    {
        **_EVERYWHERE,
        **_OF_TEMPLATES,
        "activation": (),
        "additional_data": (),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "embed_override_token_id": (),
        "embed_overrides": (),
        "is_cross_encoder_request": (False,),
        "messages": (),
        "return_pooled_hidden_states": (False,),
        "session_params": (),
        "softmax": (),
        "use_activation": (),
    },
)
# Of SGLang's GenerateReqInput and EmbeddingReqInput.
NATIVE = KnownFields(
    frozenset(("log_metrics", "no_logs")),
    {
        "audio_data": ([],),
        "background": (False,),
        "image_data": ([],),
        "is_cross_encoder_request": (False,),
        "lora_path": (),
        "modalities": ([], ["text"]),
        "need_wait_for_mm_processing": (False,),
        "require_reasoning": (False,),
        "return_bytes": (False,),
        "return_entropy": (False,),
        "return_hidden_states": (False,),
        "return_prompt_token_ids": (False,),
        "return_routed_experts": (False,),
        "routed_experts_start_len": (0,),
        "use_audio_in_video": (False,),
        "video_data": ([],),
    },
)
