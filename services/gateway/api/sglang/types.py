"""The request bodies of SGLang's native endpoints. They validate and document.

A name that is not here is refused: an option that would be dropped in silence changes the answer. What asks for nothing has
been taken out before (sglang_neutral.py). Ranges come from services/shared/limits.py. Fields that may be one value or a list
with one value per prompt are typed Any here and spread over the prompts in sglang_batch.py; each value is then checked as if
it had come alone.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from services.gateway.api.openai.types import INT32, INT64, UINT32_MAX, DryBody, Source, Stop
from services.gateway.api.session_fields import SessionParams
from services.shared import limits

DEFAULT_NEW_TOKENS = 128

_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_IDS = {
    "anyOf": [
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        {"type": "null"},
    ]
}
_BOOLS = {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "boolean"}}, {"type": "null"}]}
_INTS = {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}, {"type": "null"}]}
_SAMPLING = {
    "anyOf": [
        {"$ref": "#/components/schemas/NativeSampling"},
        {"type": "array", "items": {"$ref": "#/components/schemas/NativeSampling"}},
        {"type": "null"},
    ]
}

Texts = Annotated[Any, WithJsonSchema(_TEXTS)]
Ids = Annotated[Any, WithJsonSchema(_IDS)]
Bools = Annotated[Any, WithJsonSchema(_BOOLS)]
Ints = Annotated[Any, WithJsonSchema(_INTS)]
Sampling = Annotated[Any, WithJsonSchema(_SAMPLING)]


_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), frozen=True)


class _Native(BaseModel):
    model_config = _STRICT


class NativeSampling(DryBody):
    """SGLang's sampling_params, with the token sets and the DRY penalty of this server's other endpoints."""

    model_config = _STRICT

    max_new_tokens: int | None = Field(
        DEFAULT_NEW_TOKENS, ge=0, le=UINT32_MAX, description="Null: what the context leaves. 0: only the prompt is computed."
    )
    min_new_tokens: int | None = Field(None, ge=0, le=UINT32_MAX, description="No end of sequence before so many tokens.")
    n: int | None = Field(None, ge=1, le=limits.MAX_N, description="Answers per prompt. Default 1; the same for all prompts.")
    temperature: float | None = Field(None, ge=limits.TEMPERATURE_RANGE[0], le=limits.TEMPERATURE_RANGE[1])
    top_p: float | None = Field(None, ge=limits.TOP_P_RANGE[0], le=limits.TOP_P_RANGE[1])
    top_k: int | None = Field(None, ge=-1, le=limits.MAX_TOP_K, description="0 or -1: all tokens.")
    min_p: float | None = Field(None, ge=limits.MIN_P_RANGE[0], le=limits.MIN_P_RANGE[1])
    frequency_penalty: float | None = Field(None, ge=limits.FREQUENCY_PENALTY_RANGE[0], le=limits.FREQUENCY_PENALTY_RANGE[1])
    presence_penalty: float | None = Field(None, ge=limits.PRESENCE_PENALTY_RANGE[0], le=limits.PRESENCE_PENALTY_RANGE[1])
    repetition_penalty: float | None = Field(None, ge=limits.REPETITION_PENALTY_RANGE[0], le=limits.REPETITION_PENALTY_RANGE[1])
    logit_bias: dict[str, float] | None = Field(None, max_length=limits.MAX_LOGIT_BIAS_ENTRIES)
    sampling_seed: int | None = Field(None, ge=INT64[0], le=INT64[1], description="Answer i of a prompt samples with seed + i.")
    stop: Stop = Field(None, description=f"Up to {limits.MAX_STOP_STRINGS} strings that end the answer.")
    stop_token_ids: list[int] | None = Field(None, max_length=limits.MAX_STOP_TOKEN_IDS)
    stop_regex: Stop = Field(None, description=f"Up to {limits.MAX_STOP_REGEXES} patterns (RE2) that end the answer.")
    allowed_token_ids: list[int] | None = Field(None, min_length=1, max_length=limits.MAX_TOKEN_ID_SET)
    banned_token_ids: list[int] | None = Field(None, max_length=limits.MAX_TOKEN_ID_SET)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = Field(None, description="Default true.")
    spaces_between_special_tokens: bool | None = Field(None, description="Only true, the default.")
    no_stop_trim: bool | None = Field(None, description="The matched stop string stays in the text. Default false.")
    json_schema: Source = Field(None, description='A JSON Schema. "$$ANY$$": any JSON object.')
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Source = None
    stream_interval: int | None = Field(None, ge=1, le=UINT32_MAX, description="Tokens between two messages of the worker.")


class NativeInput(_Native):
    """What is computed, and under which names."""

    model: str | None = Field(None, description="A name that /v1/models lists; may be left out.")
    text: Texts = None
    input_ids: Ids = None
    rid: Texts = Field(None, description="Names for abort_request, echoed in meta_info.id.")
    priority: int | None = Field(None, ge=INT32[0], le=INT32[1])
    extra_key: str | None = Field(
        None, min_length=1, max_length=limits.MAX_CACHE_SALT_CHARS, description="Cached prefixes are shared only within a key."
    )
    routing_key: str | None = Field(None, max_length=limits.MAX_ROUTING_KEY_CHARS)


class NativeGenerateRequest(NativeInput):
    sampling_params: Sampling = None
    stream: bool | None = None
    return_logprob: Bools = Field(None, description="Default false.")
    logprob_start_len: Ints = Field(None, description="First prompt position with a log probability. -1: none of the prompt.")
    top_logprobs_num: Ints = Field(None, description="Default 0.")
    token_ids_logprob: Ids = Field(None, description="Further ids whose log probabilities are wanted.")
    return_text_in_logprobs: bool | None = Field(None, description="Tokens' texts beside their ids. Default false.")
    session_params: SessionParams | None = None


class NativeEncodeRequest(NativeInput):
    dimensions: int | None = Field(None, ge=1, le=UINT32_MAX, description="The first so many numbers of the vector. Null: all.")


class AbortRequest(_Native):
    rid: str | None = Field(None, max_length=limits.MAX_REQUEST_ID_CHARS)
    abort_all: bool | None = Field(None, description="Refused here: for operators, on the admin port.")


class OpenSessionRequest(_Native):
    capacity_of_str_len: int = Field(ge=0, le=UINT32_MAX, description="Tokens of all turns together; 0: the worker's default.")
    session_id: str | None = Field(None, min_length=1, max_length=limits.MAX_SESSION_ID_CHARS)
    model: str | None = Field(None, description="Where several are served: the one that its turns are for.")
    timeout: float | None = Field(
        None, gt=0, le=UINT32_MAX / 1000, description="Seconds after the last turn. Null: the worker's."
    )


class CloseSessionRequest(_Native):
    session_id: str = Field(min_length=1, max_length=limits.MAX_SESSION_ID_CHARS)
    model: str | None = None
