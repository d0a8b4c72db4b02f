"""Types of the Responses API's responses, for the OpenAPI document. render.py and output.py write the bytes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rootstock_llm.services.gateway.api.document.answer import Count, Logprob, ResponseModel, absent

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
    text: str = absent("Text of all parts except refusals.")
    refusal: str = absent("Text of a refusal.")
    annotations: list[Any] = absent("Always an empty list. Present in output_text parts.")
    logprobs: list[OutputLogprob] = absent(
        "Log probabilities of the text. Present in output_text parts if `include` has message.output_text.logprobs."
    )


class Item(ResponseModel):
    """A message, reasoning, a call, or the result of a call."""

    id: str
    type: Literal["message", "reasoning", "function_call", "function_call_output"]
    status: ItemStatus = absent("Absent only from reasoning items that a client sent.")
    role: Literal["user", "system", "developer", "assistant"] = absent("Role of a message.")
    content: list[ContentPart] = absent("Parts of a message or of new reasoning.")
    summary: list[ContentPart] = absent("Summary of reasoning.")
    encrypted_content: str = absent(
        "Reasoning in an opaque form, which clients may send back. Present if `include` has reasoning.encrypted_content."
    )
    call_id: str = absent("Id of the call. Present in calls and in results of calls.")
    name: str = absent("Name of the called function.")
    arguments: str = absent("Arguments of a call as JSON.")
    output: str | list[ContentPart] = absent("Result of a call.")


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
    """A response, with the parameters of its request."""

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
    store: bool = Field(description="Whether the response is stored.")
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
    response: ResponseAnswer = absent("Present in the events created, queued, in_progress, completed, incomplete and failed.")
    output_index: Count = absent("Index in `output` of the item that the event belongs to.")
    item: Item = absent("Present in output_item.added and output_item.done.")
    item_id: str = absent("Id of the item that the event belongs to.")
    content_index: Literal[0] = absent("Index of the content part that the event belongs to. An item has one part.")
    part: ContentPart = absent("Present in content_part.added and content_part.done.")
    delta: str = absent("New text or arguments since the previous event.")
    text: str = absent("Complete text.")
    name: str = absent("Name of the called function.")
    arguments: str = absent("Complete arguments.")
    logprobs: list[OutputLogprob] = absent("Log probabilities of a text. Present if `include` has message.output_text.logprobs.")


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
