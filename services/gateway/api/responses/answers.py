"""Types of the Responses API's responses, for the OpenAPI document. render.py and output.py write the bytes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from services.gateway.api.document.answer import Count, Logprob, ResponseModel, absent

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["completed", "incomplete", "in_progress"]


class TopLogprob(ResponseModel):
    token: str
    logprob: Logprob
    bytes: list[Count]


class OutputLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ContentPart(ResponseModel):
    """A part of a message or of reasoning."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "refusal"]
    text: str = absent("Of all but refusals.")
    refusal: str = absent("Of refusals.")
    annotations: list[Any] = absent("Of output_text: none.")
    logprobs: list[OutputLogprob] = absent("Of output_text, with include.")


class Item(ResponseModel):
    """A message, reasoning, a call, or a call's result."""

    id: str
    type: Literal["message", "reasoning", "function_call", "function_call_output"]
    status: ItemStatus = absent("Of all but reasoning that a client has sent.")
    role: Literal["user", "system", "developer", "assistant"] = absent("Of messages.")
    content: list[ContentPart] = absent("Of messages, and of reasoning that the model has just made.")
    summary: list[ContentPart] = absent("Of reasoning.")
    encrypted_content: str = absent("Of reasoning, with include: what a client sends back without reading it.")
    call_id: str = absent("Of calls and their results.")
    name: str = absent("Of calls.")
    arguments: str = absent("Of calls: JSON.")
    output: str | list[ContentPart] = absent("Of results.")


class IncompleteDetails(ResponseModel):
    reason: Literal["max_output_tokens"]


class ResponseFailure(ResponseModel):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class ConversationId(ResponseModel):
    id: str


class ReasoningUsed(ResponseModel):
    effort: str | None
    summary: None


class TextUsed(ResponseModel):
    format: dict[str, Any]
    verbosity: Literal["low", "medium", "high"]


class InputTokens(ResponseModel):
    cached_tokens: Count
    cache_write_tokens: Count


class OutputTokens(ResponseModel):
    reasoning_tokens: Count


class ResponseUsage(ResponseModel):
    input_tokens: Count
    input_tokens_details: InputTokens
    output_tokens: Count
    output_tokens_details: OutputTokens
    total_tokens: Count


class ResponseAnswer(ResponseModel):
    """A response. It repeats the parameters of the request."""

    id: str
    object: Literal["response"]
    created_at: Count = Field(description="Unix seconds.")
    completed_at: Count | None
    status: Status
    background: bool
    conversation: ConversationId | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningUsed
    service_tier: Literal["default"]
    store: bool = Field(description="Whether it is kept: true only once it is.")
    temperature: float | None
    text: TextUsed
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Count
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None


class ResponseEvent(ResponseModel):
    """An event of a stream. Its type is also the name of the server-sent event."""

    type: str = Field(pattern=r"^response\.[a-z_.]+$")
    sequence_number: Count
    response: ResponseAnswer = absent("Of created, queued, in_progress, completed, incomplete and failed.")
    output_index: Count = absent("Of what is told of an item.")
    item: Item = absent("Of an item's begin and end.")
    item_id: str = absent("Of what is told of an item's parts.")
    content_index: Literal[0] = absent("Of what is told of a text.")
    part: ContentPart = absent("Of a part's begin and end.")
    delta: str = absent("What is new.")
    text: str = absent("All of it.")
    name: str = absent("Of a call.")
    arguments: str = absent("All of them.")
    logprobs: list[OutputLogprob] = absent("Of a text, with include.")


class ItemList(ResponseModel):
    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(ResponseModel):
    id: str
    object: Literal["response.deleted", "conversation.deleted"]
    deleted: Literal[True]


class ConversationAnswer(ResponseModel):
    id: str
    object: Literal["conversation"]
    created_at: Count = Field(description="Unix seconds.")
    metadata: dict[str, str]


class InputTokenCount(ResponseModel):
    object: Literal["response.input_tokens"]
    input_tokens: Count
