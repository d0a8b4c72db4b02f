"""The request bodies of the OpenAI endpoints, with the extensions that vLLM and SGLang share. They validate and document.

Ranges come from services/shared/limits.py. Unknown fields are ignored, because clients send new ones. Every optional field
accepts null as "not given". What a type cannot say is checked in validation.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from services.gateway.api.session_fields import SessionParams
from services.shared import limits

INT32 = (-(1 << 31), (1 << 31) - 1)
INT64 = (-(1 << 63), (1 << 63) - 1)
UINT32_MAX = (1 << 32) - 1
RID_CHARS = limits.MAX_REQUEST_ID_CHARS - 8  # a prompt's and a choice's number are added to it on the way to the worker

_STOP_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}], "title": "Stop"}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ],
    "title": "Prompt",
}
_MESSAGES_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "maxItems": limits.MAX_CHAT_MESSAGES,
    "title": "Messages",
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string"},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
        },
    },
}

# Checked by hand: the answer names the exact element, and a long list of ids is checked at C speed.
Stop = Annotated[Any, WithJsonSchema(_STOP_SCHEMA)]
Prompt = Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
Messages = Annotated[Any, WithJsonSchema(_MESSAGES_SCHEMA)]
Source = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]})]
Object = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Count = Annotated[int | None, BeforeValidator(lambda value: None if value is False else value)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=(), frozen=True)


class StreamOptions(_Body):
    include_usage: bool | None = Field(None, description="One more chunk before [DONE], with the usage of the whole request.")


class ConstraintBody(_Body):
    """What the output must be: at most one of these. vLLM's and SGLang's names beside OpenAI's."""

    response_format: Object = Field(None, description="text, json_object, json_schema or structural_tag.")
    structured_outputs: Object = Field(None, description="One of json, regex, choice, grammar, json_object, structural_tag.")
    guided_json: Source = Field(None, description="A JSON Schema, as an object or as text.")
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(
        None, min_length=1, max_length=limits.MAX_GUIDED_CHOICES, description="One of these texts."
    )
    guided_grammar: str | None = Field(None, description="EBNF.")
    json_schema: Source = Field(None, description="As guided_json.")
    regex: str | None = Field(None, description="As guided_regex.")
    ebnf: str | None = Field(None, description="As guided_grammar.")
    structural_tag: Source = Field(None, description="Tags that begin a structured part, and what follows them.")


class DryBody(_Body):
    """A penalty on continuing a repetition, with llama.cpp's names."""

    dry_multiplier: float | None = Field(
        None, ge=limits.DRY_MULTIPLIER_RANGE[0], le=limits.DRY_MULTIPLIER_RANGE[1], description="0: none. Default 0."
    )
    dry_base: float | None = Field(None, ge=limits.DRY_BASE_RANGE[0], le=limits.DRY_BASE_RANGE[1], description="Default 1.75.")
    dry_allowed_length: int | None = Field(None, ge=1, le=limits.MAX_DRY_ALLOWED_LENGTH, description="Default 2.")
    dry_penalty_last_n: int | None = Field(
        None, ge=-1, le=limits.MAX_DRY_WINDOW, description="Last tokens looked at. 0: no penalty. -1, the default: all."
    )
    dry_sequence_breakers: list[str] | None = Field(
        None, min_length=1, max_length=limits.MAX_DRY_BREAKERS, description="Default: line feed, colon, quote, asterisk."
    )


class NamedBody(_Body):
    """Under which names a request runs, and with whom it shares what is cached."""

    user: Any = Field(None, description="Accepted and not used.")
    rid: str | None = Field(
        None,
        min_length=1,
        max_length=RID_CHARS,
        description="The request's name for aborts and sessions. Default: x-request-id. Of several prompts: with _0, _1, …",
    )
    request_id: str | None = Field(None, min_length=1, max_length=RID_CHARS, description="The same as rid.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=limits.MAX_CACHE_SALT_CHARS, description="Cached prefixes are shared only within a salt."
    )
    extra_key: str | None = Field(
        None,
        min_length=1,
        max_length=limits.MAX_CACHE_SALT_CHARS,
        description="As cache_salt; both together are a namespace of their own.",
    )
    priority: int | None = Field(None, ge=INT32[0], le=INT32[1], description="Default 0. Without priority scheduling: no effect.")
    routing_key: str | None = Field(
        None, max_length=limits.MAX_ROUTING_KEY_CHARS, description="Also as header x-smg-routing-key; the body goes first."
    )


class GenerationBody(ConstraintBody, DryBody, NamedBody):
    """What chat and plain completions have in common."""

    model: str = Field(description="A name that /v1/models lists.")
    stream: bool | None = Field(None, description="Answer with server-sent events as tokens are made.")
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=limits.MAX_N, description="Choices per prompt. Default 1.")
    stop: Stop = Field(None, description=f"Up to {limits.MAX_STOP_STRINGS} strings that end the answer.")
    seed: int | None = Field(None, ge=INT64[0], le=INT64[1], description="Choice i samples with seed + i.")
    temperature: float | None = Field(None, ge=limits.TEMPERATURE_RANGE[0], le=limits.TEMPERATURE_RANGE[1])
    top_p: float | None = Field(None, ge=limits.TOP_P_RANGE[0], le=limits.TOP_P_RANGE[1], description="Default 1.")
    top_k: int | None = Field(None, ge=-1, le=limits.MAX_TOP_K, description="0 or -1: all tokens.")
    min_p: float | None = Field(None, ge=limits.MIN_P_RANGE[0], le=limits.MIN_P_RANGE[1])
    frequency_penalty: float | None = Field(None, ge=limits.FREQUENCY_PENALTY_RANGE[0], le=limits.FREQUENCY_PENALTY_RANGE[1])
    presence_penalty: float | None = Field(None, ge=limits.PRESENCE_PENALTY_RANGE[0], le=limits.PRESENCE_PENALTY_RANGE[1])
    repetition_penalty: float | None = Field(None, ge=limits.REPETITION_PENALTY_RANGE[0], le=limits.REPETITION_PENALTY_RANGE[1])
    logit_bias: dict[str, float] | None = Field(
        None, max_length=limits.MAX_LOGIT_BIAS_ENTRIES, description="Token id → value added to its logit."
    )
    max_tokens: int | None = Field(None, ge=1, description="Tokens of an answer at most; never more than the context leaves.")
    max_completion_tokens: int | None = Field(None, ge=1, description="Goes before max_tokens.")
    min_tokens: int | None = Field(None, ge=0, le=UINT32_MAX, description="No end of sequence before so many tokens.")
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=limits.MAX_STOP_TOKEN_IDS)
    stop_regex: Stop = Field(
        None, description=f"Up to {limits.MAX_STOP_REGEXES} patterns (RE2) that end the answer; what they match stays in it."
    )
    allowed_token_ids: list[int] | None = Field(None, min_length=1, max_length=limits.MAX_TOKEN_ID_SET)
    banned_token_ids: list[int] | None = Field(None, max_length=limits.MAX_TOKEN_ID_SET)
    logprob_token_ids: list[int] | None = Field(
        None, max_length=limits.MAX_LOGPROB_TOKEN_IDS, description="Further tokens whose log probabilities are wanted."
    )
    skip_special_tokens: bool | None = Field(None, description="Default true.")
    include_stop_str_in_output: bool | None = Field(None, description="Default false.")
    return_token_ids: bool | None = Field(None, description="Choices carry token_ids, and the prompt's ids come with them.")
    no_stop_trim: bool | None = Field(None, description="SGLang's name for include_stop_str_in_output.")
    stream_interval: int | None = Field(
        None, ge=1, le=UINT32_MAX, description="Tokens between two messages of a stream. Default: the worker's setting."
    )
    session_params: SessionParams | None = Field(None, description="The request is a turn of this session.")


class ChatCompletionRequest(GenerationBody):
    messages: Messages
    tools: list[dict[str, Any]] | None = Field(None, description="Given to the chat template.")
    documents: list[dict[str, Any]] | None = Field(None, description="Given to the chat template.")
    reasoning_effort: Effort | None = Field(None, description="Given to the chat template.")
    tool_choice: Literal["none", "auto"] | None = Field(None, description="none: the template does not see the tools.")
    add_generation_prompt: bool | None = Field(None, description="Default true, unless continue_final_message is set.")
    continue_final_message: bool | None = Field(None, description="The answer continues the last message. Default false.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the chat template.")
    logprobs: bool | None = Field(None, description="Log probabilities of the answer's tokens. Default false.")
    top_logprobs: int | None = Field(None, ge=0, le=limits.MAX_TOP_LOGPROBS, description="Of the likeliest tokens too.")


class CompletionRequest(GenerationBody):
    prompt: Prompt
    add_special_tokens: bool | None = Field(None, description="Around a prompt that is text. Default true.")
    max_tokens: int | None = Field(
        None,
        ge=0,
        description="Tokens of an answer at most; never more than the context leaves. 0, with echo: none, the prompt alone.",
    )
    echo: bool | None = Field(None, description="The text begins with the prompt, and logprobs with the prompt's.")
    logprobs: Count = Field(
        None, ge=0, le=limits.MAX_TOP_LOGPROBS, description="Log probabilities of the tokens, and of so many likeliest ones."
    )


class EmbeddingRequest(NamedBody):
    model: str = Field(description="A name that /v1/models lists.")
    input: Prompt
    add_special_tokens: bool | None = Field(None, description="Around an input that is text. Default true.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of little-endian float32. Default float."
    )
    dimensions: int | None = Field(None, ge=1, le=UINT32_MAX, description="The first so many numbers. Default: all.")
    normalize: bool | None = Field(None, description="To length 1. Default: as the model's files say.")
