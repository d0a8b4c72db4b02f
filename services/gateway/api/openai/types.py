"""Bodies of OpenAI's endpoints, with the extensions that vLLM and SGLang share, for validation and documentation.

parse() validates a body. chat.py and preparation.py make the checks that a type cannot make. Error messages never repeat a value
that the client sent.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema

from rootstock_llm.services.gateway.api.known_fields import KnownFields, refuse_unserved
from rootstock_llm.services.gateway.api.request_body import (
    RID_CHARS,
    ConstraintBody,
    Effort,
    PlacedBody,
    SamplingBody,
    SessionParams,
    ThinkingBody,
    of_validation,
    parameter,
)
from rootstock_llm.services.gateway.generation.body_fields import AnswerBody, Body
from rootstock_llm.services.gateway.generation.errors import bad_request
from rootstock_llm.services.gateway.generation.origin import Origin
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.shared.sampling_parameters import UINT32_MAX, Api

logger = logging.getLogger(__name__)

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
_PREDICTION_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "required": ["type", "content"],
            "properties": {
                "type": {"const": "content"},
                "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
            },
        },
        {"type": "null"},
    ],
    "title": "Prediction",
}

# pydantic accepts any value of these types. Functions check the values, so that an error names the element, and so that a long
# list of ids needs no Python loop.
Prompt = Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
Messages = Annotated[Any, WithJsonSchema(_MESSAGES_SCHEMA)]
Prediction = Annotated[Any, WithJsonSchema(_PREDICTION_SCHEMA)]
Count = Annotated[int | None, BeforeValidator(lambda value: None if value is False else value)]  # false means null


B = TypeVar("B", bound="NamedBody")


class StreamOptions(Body):
    include_usage: bool | None = Field(
        None, description="Whether the stream has an event with the token counts of the whole request before [DONE]."
    )


class NamedBody(PlacedBody):
    """The fields for the request id and for cached prefixes."""

    user: Any = Field(None, description="Accepted without effect.")
    rid: str | None = Field(
        None,
        min_length=1,
        max_length=RID_CHARS,
        description="Request id for aborts and sessions. Default: x-request-id. Several prompts get the suffixes _0, _1, …",
    )
    request_id: str | None = Field(None, min_length=1, max_length=RID_CHARS, description="The same as rid.")
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=limits.MAX_CACHE_SALT_CHARS,
        description="Only requests with the same cache_salt share cached prefixes.",
    )

    @property
    def request_name(self) -> str | None:
        """The request id that the client chose, or None."""
        return self.request_id if self.rid is None else self.rid


class GenerationBody(ConstraintBody, SamplingBody, AnswerBody, NamedBody):
    """The fields that chat completions and completions share."""

    model: str | None = Field(None, description="A name that /v1/models lists. Optional if the server has one model.")
    stream: bool | None = Field(None, description="Whether the output is sent as server-sent events while it is generated.")
    stream_options: StreamOptions | None = None
    seed: int | None = parameter("seed")
    max_tokens: int | None = parameter("max_tokens")
    max_completion_tokens: int | None = parameter("max_completion_tokens")
    min_tokens: int | None = parameter("min_tokens")
    include_stop_str_in_output: bool | None = parameter("include_stop_str_in_output")
    logprob_token_ids: list[int] | None = Field(
        None,
        max_length=limits.MAX_LOGPROB_TOKEN_IDS,
        description="Token ids whose log probabilities are returned for every output token.",
    )
    session_params: SessionParams | None = Field(None, description="Session of which the request is a turn.")


class ChatCompletionRequest(ThinkingBody, GenerationBody):
    messages: Messages
    tools: list[dict[str, Any]] | None = Field(
        None, fail_fast=True, description="Functions that the model may call. The chat template receives them."
    )
    parallel_tool_calls: bool | None = Field(None, description="Whether an output may have several calls. Default true.")
    separate_reasoning: bool | None = Field(None, description="Whether reasoning is separate from the text. Default true.")
    documents: list[dict[str, Any]] | None = Field(
        None, fail_fast=True, description="Passed to the chat template, which must read a variable of this name."
    )
    reasoning_effort: Effort | None = Field(None, description="Passed to the chat template.")
    tool_choice: str | dict[str, Any] | None = Field(
        None,
        description=(
            "Calls that the output may have: none, auto (the default), required, a function or "
            "allowed_tools. With none, the template does not receive the tools."
        ),
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="Whether the prompt ends with the beginning of an assistant message. Default: not continue_final_message.",
    )
    continue_final_message: bool | None = Field(None, description="Whether the output continues the last message. Default false.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Additional variables of the chat template.")
    prediction: Prediction = Field(
        None,
        description=(
            "Text that the client expects as the output, `{type: content, content}`. Workers that draft by "
            "n-grams generate matching text faster. The output does not change."
        ),
    )
    logprobs: bool | None = Field(None, description="Whether log probabilities of the output tokens are returned. Default false.")
    top_logprobs: int | None = Field(
        None, ge=0, le=limits.MAX_TOP_LOGPROBS, description="Number of most likely tokens to return per output token. Default 0."
    )


class CompletionRequest(GenerationBody):
    prompt: Prompt
    add_special_tokens: bool | None = Field(
        None,
        description="Whether the tokenizer adds special tokens to a prompt that is text. Default true; false for a session turn"
        " that continues an earlier turn.",
    )
    max_tokens: int | None = parameter("max_tokens", Api.COMPLETION)
    best_of: int | None = parameter("best_of", Api.COMPLETION)
    echo: bool | None = Field(
        None,
        description="Whether text and log probabilities of the output begin with those of the prompt. Default false.",
    )
    logprobs: Count = Field(
        None,
        ge=0,
        le=limits.MAX_TOP_LOGPROBS,
        description="Returns the log probability of each output token, and this number of most likely tokens per output token."
        " Null: no log probabilities.",
    )


class EmbeddingRequest(NamedBody):
    model: str | None = Field(None, description="A name that /v1/models lists. Optional if the server has one model.")
    input: Prompt
    add_special_tokens: bool | None = Field(
        None, description="Whether the tokenizer adds special tokens to an input that is text. Default true."
    )
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=UINT32_MAX,
        description="Cuts each input to this number of its last tokens. -1: to the model's context.",
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="float (the default): a list of numbers. base64: little-endian float32, encoded as base64."
    )
    dimensions: int | None = Field(
        None, ge=1, le=UINT32_MAX, description="Number of leading elements of the vector to return. Default: all."
    )
    normalize: bool | None = Field(
        None, description="Whether the vector is scaled to length 1. Default: as the model's files say."
    )


def parse(model: type[B], body: dict[str, Any], known: KnownFields, origin: Origin) -> B:
    """Returns the validated body. Logs unknown fields at level debug. Raises ApiError."""
    refuse_unserved(body, known)
    if logger.isEnabledFor(logging.DEBUG):
        unknown = body.keys() - model.model_fields.keys() - known.neutral.keys() - known.unused
        if unknown:
            names = sorted(name[:64] for name in unknown)
            logger.debug("ignored unknown fields", extra=fields(**origin.log_fields, names=names))
    try:
        request = model.model_validate(body)
    except ValidationError as error:
        raise of_validation(error) from None
    if request.rid is not None and request.request_id not in (None, request.rid):
        raise bad_request("request_id", "'rid' and 'request_id' are different. Send only one.")
    return request


def check_stream_options(request: GenerationBody) -> None:
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options", "'stream_options' requires 'stream' to be true.")


def include_stop(request: GenerationBody) -> bool:
    """Returns whether the text keeps a matched stop string. Raises ApiError if two fields contradict each other."""
    keeps, no_trim = request.include_stop_str_in_output, request.no_stop_trim
    if None not in (keeps, no_trim) and keeps != no_trim:
        raise bad_request("no_stop_trim", "'no_stop_trim' and 'include_stop_str_in_output' are different. Send only one.")
    return bool(keeps or no_trim)
