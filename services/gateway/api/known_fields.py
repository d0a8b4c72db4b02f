"""Fields of OpenAI's, SGLang's and vLLM's bodies for features that this server does not have, by endpoint. Pure.

- An `unused` field never changes a response. All its values are accepted.
- A `neutral` field changes a response on other servers, except at its neutral values. Only these values and null are accepted.
  For any other value, the request is refused with an error that names the field.
- A field that is in no list is ignored on OpenAI's endpoints, because their clients send new fields, and refused on SGLang's.

A hosted tool is a tool that the provider's server runs, such as web search. Coding agents send hosted tools together with
functions, and their users cannot change that. The gateway therefore omits hosted tools instead of refusing the request, and the
response has a header with the omitted names. The setting `omit_hosted_tools` turns this off.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rootstock_llm.services.gateway.generation.errors import ApiError
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.sampling_parameters import UNSERVED, Api, of_api

Neutral = Mapping[str, tuple[Any, ...]]  # field name → values without effect


@dataclass(frozen=True, slots=True)
class KnownFields:
    """The fields of one endpoint's bodies that this server accepts without effect."""

    unused: frozenset[str]  # fields that are accepted with any value
    neutral: Neutral  # fields that are accepted only with their neutral values
    per_prompt: bool = False  # whether a field may also have a list with one neutral value per prompt

    def has_no_effect(self, name: str, value: Any) -> bool:
        if value is None or name in self.unused:
            return True
        neutral = self.neutral.get(name)
        if neutral is None:
            return False
        many = self.per_prompt and isinstance(value, list) and len(value) <= limits.MAX_BATCH_PROMPTS
        return is_one_of(value, neutral) or (many and all(item is None or is_one_of(item, neutral) for item in value))


def is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Returns whether a value equals a neutral value of the same type.

    0 does not equal False, because `"logprobs": 0` has an effect.
    """
    return any(type(value) is type(item) and value == item for item in neutral)


def refuse_unserved(body: Mapping[str, Any], known: KnownFields) -> None:
    """Checks that no field asks for a feature that this server does not have. The ApiError names the first such field."""
    _refuse(body, known.neutral)
    options = body.get("stream_options")
    if isinstance(options, dict):
        _refuse(options, STREAM_OPTIONS, "stream_options.")


def without_neutral(body: Mapping[str, Any], served: Collection[str], known: KnownFields) -> dict[str, Any]:
    """Returns the body without fields that have no effect.

    SGLang's own client sends every field, most of them with a neutral value, and the validation refuses unknown fields.

    Args:
        served: Names of the fields that this server reads. They always stay in the body.
    """
    return {name: value for name, value in body.items() if name in served or not known.has_no_effect(name, value)}


def _refuse(body: Mapping[str, Any], neutral: Neutral, path: str = "") -> None:
    for name, value in body.items():
        if name in neutral and value is not None and not is_one_of(value, neutral[name]):
            raise unserved(path + name)


def unserved(name: str) -> ApiError:
    return ApiError(400, f"'{name}' is not supported by this server.", param=name, code="unsupported_parameter")


WEB_SEARCH = "web_search_options"  # a chat's field that turns a hosted tool on
_TOOL_TYPE = re.compile("[a-z][a-z0-9_]{0,63}")
_TOOL_NAME = re.compile("[a-zA-Z0-9_.-]{1,64}")


def hosted_type(tool: Any) -> str:
    """Returns the type of a hosted tool, or of a tool choice that names a hosted tool. "" for a function or an invalid value."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    return kind if isinstance(kind, str) and kind != "function" and _TOOL_TYPE.fullmatch(kind) else ""


def own_name(tool: Mapping[str, Any]) -> str:
    """Returns the name that a client has given to a hosted tool; "" if it has none."""
    custom = tool.get("custom")
    for name in (tool.get("name"), tool.get("server_label"), custom.get("name") if isinstance(custom, Mapping) else None):
        if isinstance(name, str) and _TOOL_NAME.fullmatch(name):
            return name
    return ""


def omitted_names(tools: Sequence[Any] | None) -> list[str]:
    """Returns the names of the hosted tools in `tools`: `type`, or `type:name` for a type that several tools can share."""
    kinds = [(hosted_type(tool), tool) for tool in tools or ()]
    named = ("custom", "mcp", "namespace")
    return [f"{kind}:{own_name(tool)}" if kind in named and own_name(tool) else kind for kind, tool in kinds if kind]


# Fields for accounting, storage and labels, and hints for moderation and caches. stream_reasoning has no effect, because
# reasoning is always streamed.
_UNUSED = frozenset(
    (
        "custom_labels",
        "guided_decoding_backend",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "return_mm_kwargs",
        "return_token_offsets",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_reasoning",
        "truncation_side",
        "user",
    )
)

_PREDICTED = frozenset(("prediction",))  # unused except in chats

# Neutral fields, by the part of a request that they change on other servers: sampling, prompt, response and placement.

SAMPLING: Neutral = {row.name: row.neutral for row in UNSERVED if Api.CHAT in row.apis}
PROMPT: Neutral = {
    "audio": (),
    "chat_template": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "images_config": (),
    "input_ids": (),
    "lora_path": ("",),
    "max_dynamic_patch": (),
    "media_io_kwargs": ({},),
    "min_dynamic_patch": (),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "reasoning": (),
    "session_id": (),
    "suffix": ("",),
    "task": (),
    "use_audio_in_video": (False,),
    "web_search_options": (),
}
ANSWER: Neutral = {
    "include_reasoning": (True,),
    "modalities": ([], ["text"]),
    "moderation": (),
    "prompt_logprobs": (),
    "return_cached_tokens_details": (False, True),
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
PLACEMENT: Neutral = {
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
# Fields of servers other than OpenAI's, SGLang and vLLM.
OF_OTHERS: Neutral = {
    "do_sample": (True,),
    "dynatemp_range": (0, 0.0),
    "enable_search": (False,),
    "grammar": ("",),
    "max_new_tokens": (),
    "mirostat": (0,),
    "n_predict": (-1,),
    "num_beams": (1,),
    "prompt_mode": (),
    "random_seed": (),
    "reasoning_budget": (-1,),
    "reasoning_format": ("auto",),
    "repeat_penalty": (1, 1.0),
    "safe_prompt": (False,),
    "tfs_z": (1, 1.0),
    "thinking_budget": (),
    "top_a": (0, 0.0),
}
# Fields that this server supports only in chats. Other APIs accept the listed values and refuse all others.
_OF_CHAT_ANSWERS: Neutral = {
    "ebnf": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_json": ("",),
    "guided_regex": ("",),
    "json_schema": ("",),
    "logprob_token_ids": ([],),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "regex": ("",),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "separate_reasoning": (True,),
    "session_params": ({},),
    "structural_tag": ("",),
    "structured_outputs": ({},),
    "top_logprobs": (0,),
}


def of_chats_alone(served: Collection[str]) -> Neutral:
    """Returns the neutral values of OpenAI's chat fields that another API lacks.

    Args:
        served: Names of the fields that the other API supports. They are not in the result.
    """
    sampling = {name: (*row.neutral, [], {}) for name, row in of_api(Api.CHAT).items()}
    return {name: neutral for name, neutral in {**_OF_CHAT_ANSWERS, **sampling}.items() if name not in served}


_EVERYWHERE: Neutral = {**SAMPLING, **PROMPT, **ANSWER, **PLACEMENT, **OF_OTHERS}
# Fields for chat templates, on endpoints without a template.
OF_TEMPLATES: Neutral = {
    "add_generation_prompt": (True, False),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "enable_thinking": (),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": (),
    "separate_reasoning": (True, False),
    "think": (),
    "thinking": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}

_CUT: Neutral = {"truncate_prompt_tokens": ()}  # only /v1/embeddings supports this field
OF_CHAT: Neutral = {
    "add_special_tokens": (False,),  # a chat template writes the special tokens
    "best_of": (1,),
    "echo": (False,),
}
OF_EMBEDDINGS: Neutral = {
    "activation": (),
    "additional_data": (),
    "best_of": (1,),
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
}

STREAM_OPTIONS: Neutral = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}
CHAT = KnownFields(_UNUSED, {**_EVERYWHERE, **OF_CHAT, **_CUT})
COMPLETION = KnownFields(_UNUSED | _PREDICTED, {**_EVERYWHERE, **OF_TEMPLATES, **_CUT})
EMBEDDING = KnownFields(_UNUSED | _PREDICTED, {**_EVERYWHERE, **OF_TEMPLATES, **OF_EMBEDDINGS})
# SGLang's GenerateReqInput and EmbeddingReqInput.
NATIVE = KnownFields(
    frozenset(("log_metrics", "no_logs")),
    {
        "audio_data": ([],),
        "background": (False,),
        "image_data": ([],),
        "is_cross_encoder_request": (False,),
        "lora_path": ("",),
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
    per_prompt=True,
)
# SGLang's ScoringRequest.
SCORE = KnownFields(
    NATIVE.unused | {"user"},
    {**NATIVE.neutral, "embed_override_token_id": (), "embed_overrides": (), "return_pooled_hidden_states": (False,)},
)
NATIVE_SAMPLING = KnownFields(
    NATIVE.unused, {**NATIVE.neutral, **{row.name: row.neutral for row in UNSERVED if Api.GENERATE in row.apis}}
)
