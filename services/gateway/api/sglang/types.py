"""Request bodies of SGLang's native endpoints, for validation and documentation.

Unknown fields are refused, because a client that sends one expects an effect. parse() removes fields with neutral values before
the validation. A field that accepts one value or a list with one value per prompt has the type Any; batch.py checks its values.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, WithJsonSchema

from rootstock_llm.services.gateway.api.request_body import RID_CHARS, PlacedBody, SamplingBody, SessionParams, Source, parameter
from rootstock_llm.services.gateway.generation.body_fields import Body
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.sampling_parameters import GENERATE_TOKENS, UINT32_MAX, Api

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

_QUERY = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}, "minItems": 1}]}
_ITEMS = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": limits.MAX_SCORE_ITEMS},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
            "minItems": 1,
            "maxItems": limits.MAX_SCORE_ITEMS,
        },
    ]
}

Query = Annotated[Any, WithJsonSchema(_QUERY)]
Items = Annotated[Any, WithJsonSchema(_ITEMS)]
Texts = Annotated[Any, WithJsonSchema(_TEXTS)]
Ids = Annotated[Any, WithJsonSchema(_IDS)]
Bools = Annotated[Any, WithJsonSchema(_BOOLS)]
Ints = Annotated[Any, WithJsonSchema(_INTS)]
Sampling = Annotated[Any, WithJsonSchema(_SAMPLING)]


_STRICT = ConfigDict(extra="forbid")


class _Native(Body):
    model_config = _STRICT


class NativeSampling(SamplingBody):
    """SGLang's sampling_params, with the token sets and the DRY penalty of this server's other endpoints."""

    model_config = _STRICT

    max_new_tokens: int | None = parameter("max_new_tokens", Api.GENERATE, absent=GENERATE_TOKENS)
    min_new_tokens: int | None = parameter("min_new_tokens", Api.GENERATE)
    sampling_seed: int | None = parameter("sampling_seed", Api.GENERATE)
    json_schema: Source = Field(None, description='A JSON Schema. "$$ANY$$": any JSON object.')
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Source = None


class NativeInput(PlacedBody):
    """The fields for the prompts of a request and for their request ids."""

    model_config = _STRICT

    model: str | None = Field(None, description="A name that /v1/models lists. Optional if the server has one model.")
    text: Texts = None
    input_ids: Ids = None
    rid: Texts = Field(None, description="Request id for abort_request; meta_info.id repeats it. A list has one id per prompt.")


class NativeGenerateRequest(NativeInput):
    sampling_params: Sampling = None
    stream: bool | None = None
    return_logprob: Bools = Field(None, description="Whether log probabilities are returned. Default false.")
    logprob_start_len: Ints = Field(
        None, description="Index of the first prompt token in input_token_logprobs. Default -1: no prompt tokens."
    )
    top_logprobs_num: Ints = Field(None, description="Number of most likely tokens to return per token. Default 0.")
    token_ids_logprob: Ids = Field(None, description="Token ids whose log probabilities are returned for every token.")
    return_text_in_logprobs: bool | None = Field(
        None, description="Whether entries of log probabilities have the tokens' texts. Default false."
    )
    return_routed_experts: bool | None = Field(
        None,
        description="Whether meta_info of a complete output has `routed_experts`: the experts that computed each token. Needs a"
        " model with experts, and workers with --enable-return-routed-experts. Default false.",
    )
    routed_experts_start_len: int | None = Field(
        None,
        ge=0,
        le=UINT32_MAX,
        description="Index of the first token in routed_experts, at most the number of prompt tokens. Default 0.",
    )
    session_params: SessionParams | None = None


class NativeEncodeRequest(NativeInput):
    dimensions: int | None = Field(
        None, ge=1, le=UINT32_MAX, description="Number of leading elements of the vector to return. Null: all."
    )


class ScoreRequest(PlacedBody):
    model_config = _STRICT

    query: Query = Field(description="A text or token ids. It is a part of every prompt.")
    items: Items = Field(
        description=f"A text, a list of texts, or a list of lists of token ids. At most {limits.MAX_SCORE_ITEMS} items."
    )
    label_token_ids: list[int] = Field(
        min_length=1,
        max_length=limits.MAX_LABEL_TOKEN_IDS,
        description="Token ids of the labels. The score of a label is its probability as the next token.",
    )
    apply_softmax: bool | None = Field(
        None,
        description="Whether the scores of an item are scaled to the sum 1. Default false: probabilities over the vocabulary.",
    )
    item_first: bool | None = Field(
        None, description="Whether each prompt begins with the item instead of the query. Default false."
    )
    model: str | None = Field(None, description="A name that /v1/models lists. Optional if the server has one model.")
    rid: str | None = Field(
        None,
        min_length=1,
        max_length=RID_CHARS,
        description="Request id for abort_request. If there are several items, each also has this id with a suffix: _0, _1, …",
    )


class AbortRequest(_Native):
    rid: str | None = Field(None, max_length=limits.MAX_REQUEST_ID_CHARS)
    abort_all: bool | None = Field(None, description="Refused here. Only the admin port accepts it.")


class OpenSessionRequest(_Native):
    capacity_of_str_len: int = Field(
        ge=0, le=UINT32_MAX, description="Maximum number of tokens of all turns together. 0: the worker's default."
    )
    session_id: str | None = Field(None, min_length=1, max_length=limits.MAX_SESSION_ID_CHARS)
    model: str | None = Field(None, description="Model of the session's turns. Required if several models are served.")
    timeout: float | None = Field(
        None,
        gt=0,
        le=UINT32_MAX / 1000,
        description="Seconds after the last turn until the session closes. Null: the worker's default.",
    )


class CloseSessionRequest(_Native):
    session_id: str = Field(min_length=1, max_length=limits.MAX_SESSION_ID_CHARS)
    model: str | None = None
