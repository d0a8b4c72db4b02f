"""Types of the responses of SGLang's endpoints, for the OpenAPI document. render.py and routes.py write the bytes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rootstock_llm.services.gateway.api.document.answer import (
    CachedByTier,
    Count,
    ErrorBody,
    Logprob,
    ResponseModel,
    SamplingDefaultValues,
    absent,
)

Entry = tuple[Logprob | None, Count, str | None]  # log probability, token id, text of the token
Entries = list[Entry]
Lists = list[Entries | None]
Seconds = Annotated[float, Field(ge=0)]
_DRAFTED = "Present if the worker drafts tokens."
_TOPS, _CHOSEN = "Present with top_logprobs_num.", "Present with token_ids_logprob."


class Stopped(ResponseModel):
    type: Literal["stop"]
    matched: str | int | None = Field(description="The token id, stop string or pattern that ended the output.")


class OfLength(ResponseModel):
    type: Literal["length"]
    length: Count


class Aborted(ResponseModel):
    type: Literal["abort"]
    message: str
    status_code: None
    err_type: None


class _Meta(ResponseModel):
    """The fields of every output. In all lists of log probabilities, a token has the entry [logprob, token id, text]."""

    id: str
    prompt_tokens: Count
    weight_version: str


class _Logprobs(_Meta):
    completion_tokens: Count
    input_token_logprobs: Entries = absent("Present with return_logprob.")
    output_token_logprobs: Entries = absent("Present with return_logprob.")
    input_top_logprobs: Lists = absent(_TOPS)
    output_top_logprobs: Lists = absent(_TOPS)
    input_token_ids_logprobs: Lists = absent(_CHOSEN)
    output_token_ids_logprobs: Lists = absent(_CHOSEN)


class _Ended(_Meta):
    cached_tokens: Count
    cached_tokens_details: CachedByTier = absent("cached_tokens by tier. Present if the worker has tiers of KV.")
    e2e_latency: Seconds = Field(description="Seconds from the arrival of the request to its end.")
    queue_time: Seconds = Field(description="Seconds for which the request waited at the worker.")
    num_retractions: Count
    routed_experts: str = absent(
        "Base64 of int32 little-endian [tokens, layers, chosen]: the experts that computed each token, from the token"
        " routed_experts_start_len to the last computed token. The last output token is not computed. Present with"
        " return_routed_experts."
    )
    spec_verify_ct: Count = absent(f"Decode steps of this output that verified draft tokens. {_DRAFTED}")
    spec_draft_token_num: Count = absent(f"Verified draft tokens. {_DRAFTED}")
    spec_accept_token_num: Count = absent(f"Accepted draft tokens. {_DRAFTED}")
    spec_accept_length: float = absent(f"Mean number of output tokens per decode step that verified draft tokens. {_DRAFTED}")
    spec_accept_rate: float = absent(f"Share of the verified draft tokens that was accepted, 0 to 1. {_DRAFTED}")


class MetaInfo(_Ended, _Logprobs):
    """Metadata of a complete output."""

    finish_reason: Stopped | OfLength | Aborted


class MetaInfoSoFar(_Logprobs):
    """Metadata of an incomplete output, in the events before the last one."""

    finish_reason: None
    cached_tokens: None


class GenerateAnswer(ResponseModel):
    text: str
    output_ids: list[Count]
    meta_info: MetaInfo


class GenerateChunk(ResponseModel):
    """The data of one event of a stream. It has the whole output so far."""

    text: str
    output_ids: list[Count]
    meta_info: MetaInfo | MetaInfoSoFar
    index: Count = absent("Index of the output. Present for several prompts and with n above 1.")


class EncodeMetaInfo(_Ended):
    finish_reason: OfLength


class EncodeAnswer(ResponseModel):
    embedding: list[float]
    meta_info: EncodeMetaInfo


class AbortResult(ResponseModel):
    aborted: Count = Field(description="Aborted choices, and aborted requests without choices.")
    gateways: Annotated[int, Field(ge=1)] = Field(description="Gateways that were reached.")
    unreached: Count = Field(description="Gateways that could not be reached.")


class ModelDescription(ResponseModel):
    """The model that serves requests which name no model."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: SamplingDefaultValues
    weight_version: str
    has_image_understanding: Literal[False]
    has_audio_understanding: Literal[False]
    max_model_len: Count
    vocab_size: Count
    embedding_size: Count = Field(description="Number of elements of an embedding; 0 if the model makes none.")
    quantization: str = Field(
        description="Quantization of the weights, such as `int8` or `awq 4 bits by 128`. Empty: they are not quantized."
    )


class ScoringTokensDetails(ResponseModel):
    cached_tokens: Count
    cached_tokens_details: CachedByTier = absent("cached_tokens by tier. Present if a worker with tiers of KV computed a prompt.")


class ScoringUsage(ResponseModel):
    """Token counts over all prompts. Each item has its own prompt, so the query's tokens count once per item."""

    prompt_tokens: Count
    completion_tokens: Literal[0]
    total_tokens: Count
    prompt_tokens_details: ScoringTokensDetails


class Scoring(ResponseModel):
    object: Literal["scoring"]
    scores: list[list[Annotated[float, Field(ge=0, le=1)]]] = Field(description="For each item, the score of each label.")
    model: str
    usage: ScoringUsage


GenerateAnswers: Any = GenerateAnswer | Annotated[list[GenerateAnswer], Field(min_length=1)]
GenerateEvent: Any = GenerateChunk | ErrorBody
EncodeAnswers: Any = EncodeAnswer | Annotated[list[EncodeAnswer], Field(min_length=1)]
SessionId = Annotated[str, Field(min_length=1)]
