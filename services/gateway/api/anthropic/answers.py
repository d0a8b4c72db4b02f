"""Types of the Messages API's responses, for the OpenAPI document. render.py and errors.py write the bytes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rootstock_llm.services.gateway.api.document.answer import Count, ResponseModel, absent

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class ContentBlock(ResponseModel):
    type: Literal["text", "thinking", "tool_use"]
    text: str = absent("Present in text blocks.")
    thinking: str = absent("Present in thinking blocks.")
    signature: str = absent("Present in thinking blocks. If a client sends it back, it is not checked.")
    id: str = absent("Present in tool_use blocks.")
    name: str = absent("Present in tool_use blocks.")
    input: dict[str, Any] = absent("Present in tool_use blocks.")


class MessageUsage(ResponseModel):
    """Token counts of a message."""

    input_tokens: Count = Field(description="Prompt tokens that were not cached.")
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: Count
    output_tokens: Count


class Message(ResponseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None = Field(description="Null in a stream's first event.")
    stop_sequence: str | None
    usage: MessageUsage


class BlockDelta(ResponseModel):
    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]
    text: str = absent("Present in text_delta.")
    thinking: str = absent("Present in thinking_delta.")
    signature: str = absent("Present in signature_delta.")
    partial_json: str = absent("Present in input_json_delta.")


class MessageEnd(ResponseModel):
    stop_reason: StopReason
    stop_sequence: str | None


class MessagesFailure(ResponseModel):
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
        "overloaded_error",
        "timeout_error",
    ]
    message: str


class MessagesError(ResponseModel):
    type: Literal["error"]
    error: MessagesFailure
    request_id: str


class MessageEvent(ResponseModel):
    """An event of a stream. Its type is also the name of the server-sent event."""

    type: Literal[
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"
    ]
    message: Message = absent("Present in message_start.")
    index: Count = absent("Index of the content block. Present in content_block events.")
    content_block: ContentBlock = absent("Present in content_block_start.")
    delta: BlockDelta | MessageEnd = absent("Present in content_block_delta and message_delta.")
    usage: MessageUsage = absent("Present in message_delta.")


class Ping(ResponseModel):
    type: Literal["ping"]


Event = MessageEvent | MessagesError | Ping


class TokenCount(ResponseModel):
    input_tokens: Count
