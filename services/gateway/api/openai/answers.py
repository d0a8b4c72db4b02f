"""Types of the responses of OpenAI's endpoints, for the OpenAPI document. render.py and logprob_forms.py write the bytes."""

from __future__ import annotations

from typing import Annotated, Literal

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

Finish = Literal["stop", "length", "abort"]
ChatFinish = Literal["stop", "length", "abort", "tool_calls"]
Byte = Annotated[int, Field(ge=0, le=255)]
_STOP_REASON = "The stop string, pattern or token id that ended the output; null if it ended for another reason."
_REASONING = "Reasoning before the text. Present if the model reasons."
_IDS = "Present if the request has return_token_ids."
_TIMELINE = "Present if the request has the header x-rootstock-report: 1 and the gateway serves the playground"
_REQUESTED = "Present if the request has logprob_token_ids."


class PromptTokensDetails(ResponseModel):
    cached_tokens: Count
    cached_tokens_details: CachedByTier = absent(
        "cached_tokens by tier. Present if a worker with tiers of KV computed the request."
    )


class CompletionTokensDetails(ResponseModel):
    reasoning_tokens: Count = absent("Tokens of the reasoning. Present if the model marks its reasoning.")
    accepted_prediction_tokens: Count = absent(
        "Accepted draft tokens of the prediction, over all choices. Present with prediction."
    )
    rejected_prediction_tokens: Count = absent(
        "Verified draft tokens of the prediction that were not accepted. Present with prediction."
    )


class CompletionUsage(ResponseModel):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = absent("Present if the model marks its reasoning, and with prediction.")


class RequestTimeline(ResponseModel):
    """Timeline of the request. Each time is the longest of any choice. Counts are sums over all choices, except cached_tokens."""

    gateway_queue_s: Annotated[float, Field(ge=0)] = Field(description="Seconds until a worker had free capacity.")
    worker_queue_s: Annotated[float, Field(ge=0)] = Field(
        description="Seconds between the arrival at the worker and the first step."
    )
    cached_tokens: Count = Field(description="Cached prompt tokens, as in usage.")
    workers: list[str] = Field(description="Ids of the workers to which a choice was sent, in the order of the first sends.")
    retractions: Count = Field(description="Number of times that a choice lost its KV pages to other requests.")
    drafted_tokens: Count = Field(description="Draft tokens that the model verified.")
    accepted_tokens: Count = Field(description="Draft tokens that were accepted.")


class TokenLogprobFields(ResponseModel):
    token: str
    logprob: Logprob
    bytes: list[Byte]


class RequestedLogprob(TokenLogprobFields):
    token_id: Count


class ChatTokenLogprob(TokenLogprobFields):
    top_logprobs: list[TokenLogprobFields]
    requested_logprobs: list[RequestedLogprob] = absent(_REQUESTED)


class ChatLogprobs(ResponseModel):
    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunction(ResponseModel):
    name: str
    arguments: str = Field(description="Arguments of the call, as JSON.")


class ToolCall(ResponseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(ResponseModel):
    role: Literal["assistant"]
    content: str | None = Field(description="Null if the message has calls and no text.")
    refusal: None
    reasoning_content: str = absent(_REASONING)
    reasoning: str = absent("The same as reasoning_content.")
    tool_calls: list[ToolCall] = absent("Present if the model calls tools.")


class ChatChoice(ResponseModel):
    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    stop_reason: str | int | None = Field(description=_STOP_REASON)
    token_ids: list[Count] = absent(_IDS)


class ChatCompletion(ResponseModel):
    id: str
    object: Literal["chat.completion"]
    created: Count = Field(description="Unix seconds.")
    model: str
    choices: list[ChatChoice] = Field(min_length=1)
    usage: CompletionUsage
    rootstock: RequestTimeline = absent(f"{_TIMELINE}.")
    prompt_token_ids: list[Count] = absent(_IDS)


class FunctionDelta(ResponseModel):
    name: str = absent("Present in the first event of a call.")
    arguments: str = Field(description="New part of the call's arguments. The whole arguments are JSON.")


class ToolCallDelta(ResponseModel):
    index: Count = Field(description="Index of the call in its choice.")
    id: str = absent("Present in the first event of a call.")
    type: Literal["function"] = absent("Present in the first event of a call.")
    function: FunctionDelta


class ChatDelta(ResponseModel):
    role: Literal["assistant"] = absent("Present in the first event of a choice.")
    content: str = absent("New part of the text.")
    reasoning_content: str = absent(_REASONING)
    reasoning: str = absent("The same as reasoning_content.")
    tool_calls: list[ToolCallDelta] = absent("Present if the model calls tools.")


class ChatChunkChoice(ResponseModel):
    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None = Field(description="Null until the last event of a choice.")
    stop_reason: str | int | None = absent(f"Present in the last event of a choice. {_STOP_REASON}")
    token_ids: list[Count] = absent(_IDS)


class ChatCompletionChunk(ResponseModel):
    """The data of one event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: Count
    model: str
    choices: list[ChatChunkChoice] = Field(max_length=1, description="Empty in the event with the usage.")
    usage: CompletionUsage | None = absent(
        "Present with stream_options.include_usage. Null in all events but the one before [DONE]."
    )
    rootstock: RequestTimeline = absent(f"{_TIMELINE}, in the event with the usage.")
    prompt_token_ids: list[Count] = absent("Present in the first event, with return_token_ids.")


class CompletionLogprobs(ResponseModel):
    """Parallel lists with one entry per token.

    With echo, the first token of the prompt has null, because no token precedes it.
    """

    tokens: list[str]
    token_logprobs: list[Logprob | None]
    top_logprobs: list[dict[str, Logprob] | None]
    text_offset: list[Count]
    requested_logprobs: list[dict[str, Logprob] | None] = absent(f"By token id. {_REQUESTED}")


class CompletionChoice(ResponseModel):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish
    stop_reason: str | int | None = Field(description=_STOP_REASON)
    token_ids: list[Count] = absent(_IDS)
    prompt_token_ids: list[Count] = absent(_IDS)


class Completion(ResponseModel):
    id: str
    object: Literal["text_completion"]
    created: Count = Field(description="Unix seconds.")
    model: str
    choices: list[CompletionChoice] = Field(min_length=1)
    usage: CompletionUsage
    rootstock: RequestTimeline = absent(f"{_TIMELINE}.")
    prompt_token_ids: list[Count] = absent("Present for a single prompt, with return_token_ids.")


class CompletionChunkChoice(ResponseModel):
    index: Count
    text: str = Field(description="New part of the text.")
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None = Field(description="Null until the last event of a choice.")
    stop_reason: str | int | None = absent(f"Present in the last event of a choice. {_STOP_REASON}")
    token_ids: list[Count] = absent(_IDS)
    prompt_token_ids: list[Count] = absent("Present in the first event of a choice, with return_token_ids.")


class CompletionChunk(ResponseModel):
    """The data of one event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: list[CompletionChunkChoice] = Field(max_length=1, description="Empty in the event with the usage.")
    usage: CompletionUsage | None = absent(
        "Present with stream_options.include_usage. Null in all events but the one before [DONE]."
    )
    rootstock: RequestTimeline = absent(f"{_TIMELINE}, in the event with the usage.")


class Embedding(ResponseModel):
    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str = Field(
        description="The vector as a list of numbers. With encoding_format base64: little-endian float32, encoded as base64."
    )


class EmbeddingUsage(ResponseModel):
    prompt_tokens: Count
    total_tokens: Count


class EmbeddingList(ResponseModel):
    object: Literal["list"]
    data: list[Embedding] = Field(min_length=1)
    model: str
    usage: EmbeddingUsage


class ModelCard(ResponseModel):
    id: str
    object: Literal["model"]
    created: Count = Field(description="Start of the gateway in Unix seconds.")
    owned_by: Literal["rootstock"]
    max_model_len: Count | None = Field(
        description="Largest number of tokens of prompt and output; null until a worker reports it."
    )
    sampling_defaults: SamplingDefaultValues
    type: Literal["model"] = Field(
        description="Always `model`. Anthropic's clients read this field, display_name and created_at."
    )
    display_name: str
    created_at: str = Field(description="Same time as `created`, in the format of RFC 3339.")


class ModelList(ResponseModel):
    object: Literal["list"]
    data: list[ModelCard]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


ChatEvent = ChatCompletionChunk | ErrorBody
CompletionEvent = CompletionChunk | ErrorBody
