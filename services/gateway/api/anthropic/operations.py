"""Describes the operations of Anthropic's API for the OpenAPI document."""

from __future__ import annotations

from rootstock_llm.services.gateway.api.anthropic.answers import Event, Message, MessagesError, TokenCount
from rootstock_llm.services.gateway.api.anthropic.errors import OVERLOADED
from rootstock_llm.services.gateway.api.anthropic.types import CountTokensRequest, MessagesRequest
from rootstock_llm.services.gateway.api.document.operation import EVENTS, JSON, ApiOperation, ErrorFamily

MESSAGES = "/v1/messages"
COUNT_TOKENS = f"{MESSAGES}/count_tokens"

_TAG = "Anthropic"
_ERRORS = ErrorFamily("Messages", MessagesError, (OVERLOADED,), ("request-id",))
OPERATIONS = (
    ApiOperation(
        "post",
        MESSAGES,
        _TAG,
        "Create a message",
        {JSON: Message, EVENTS: Event},
        MessagesRequest,
        generates=True,
        named_events=True,
        errors=_ERRORS,
        takes_tools=True,
        example={"messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 64, "temperature": 0},
    ),
    ApiOperation(
        "post",
        COUNT_TOKENS,
        _TAG,
        "Count the tokens of a prompt",
        {JSON: TokenCount},
        CountTokensRequest,
        statuses=(404, 504),
        errors=_ERRORS,
        takes_tools=True,
        example={"messages": [{"role": "user", "content": "What is 17 + 25?"}]},
    ),
)
