"""Describes the operations of the Responses API, for the OpenAPI document."""

from __future__ import annotations

from rootstock_llm.services.gateway.api.document.operation import EVENTS, JSON, ApiOperation
from rootstock_llm.services.gateway.api.responses.answers import (
    ConversationAnswer,
    Deleted,
    InputTokenCount,
    Item,
    ItemList,
    ResponseAnswer,
    ResponseEvent,
)
from rootstock_llm.services.gateway.api.responses.types import (
    ConversationRequest,
    ConversationUpdate,
    ItemsRequest,
    ResponsesRequest,
)

RESPONSES = "/v1/responses"
INPUT_TOKENS = f"{RESPONSES}/input_tokens"
RESPONSE = f"{RESPONSES}/{{response_id}}"
CANCEL = f"{RESPONSE}/cancel"
INPUT_ITEMS = f"{RESPONSE}/input_items"
CONVERSATIONS = "/v1/conversations"
CONVERSATION = f"{CONVERSATIONS}/{{conversation_id}}"
ITEMS = f"{CONVERSATION}/items"
ITEM = f"{ITEMS}/{{item_id}}"

_TAG = "Responses"
_RESPONSE = {"response_id": "Id of a stored response."}
_CONVERSATION = {"conversation_id": "Id of a conversation."}
_ITEM = {**_CONVERSATION, "item_id": "Id of an item of the conversation."}
_STORED = (404, 503)
OPERATIONS = (
    ApiOperation(
        "post",
        RESPONSES,
        _TAG,
        "Create a response",
        {JSON: ResponseAnswer, EVENTS: ResponseEvent},
        ResponsesRequest,
        generates=True,
        named_events=True,
        optional_headers=("x-rootstock-stored",),
        takes_tools=True,
        example={"input": "Count from 3 to 9.", "max_output_tokens": 64, "temperature": 0},
    ),
    ApiOperation(
        "post",
        INPUT_TOKENS,
        _TAG,
        "Count the input tokens of a response",
        {JSON: InputTokenCount},
        ResponsesRequest,
        statuses=(404, 504),
        takes_tools=True,
        example={"input": "Count from 3 to 9."},
    ),
    ApiOperation(
        "get",
        RESPONSE,
        _TAG,
        "Get a stored response",
        {JSON: ResponseAnswer, EVENTS: ResponseEvent},
        statuses=_STORED,
        parameters=_RESPONSE,
        named_events=True,
    ),
    ApiOperation("delete", RESPONSE, _TAG, "Delete a response", {JSON: Deleted}, statuses=_STORED, parameters=_RESPONSE),
    ApiOperation(
        "post", CANCEL, _TAG, "Cancel a background response", {JSON: ResponseAnswer}, statuses=_STORED, parameters=_RESPONSE
    ),
    ApiOperation(
        "get", INPUT_ITEMS, _TAG, "List the input items of a response", {JSON: ItemList}, statuses=_STORED, parameters=_RESPONSE
    ),
    ApiOperation(
        "post",
        CONVERSATIONS,
        _TAG,
        "Create a conversation",
        {JSON: ConversationAnswer},
        ConversationRequest,
        statuses=(404, 429),
        example={"items": [{"role": "user", "content": "Count from 3 to 9."}], "metadata": {"topic": "numbers"}},
    ),
    ApiOperation(
        "get", CONVERSATION, _TAG, "Get a conversation", {JSON: ConversationAnswer}, statuses=_STORED, parameters=_CONVERSATION
    ),
    ApiOperation(
        "post",
        CONVERSATION,
        _TAG,
        "Replace the metadata of a conversation",
        {JSON: ConversationAnswer},
        ConversationUpdate,
        statuses=(404, 409, 429),
        parameters=_CONVERSATION,
        example={"metadata": {"topic": "counting"}},
    ),
    ApiOperation(
        "delete", CONVERSATION, _TAG, "Delete a conversation", {JSON: Deleted}, statuses=_STORED, parameters=_CONVERSATION
    ),
    ApiOperation(
        "get", ITEMS, _TAG, "List the items of a conversation", {JSON: ItemList}, statuses=_STORED, parameters=_CONVERSATION
    ),
    ApiOperation(
        "post",
        ITEMS,
        _TAG,
        "Add items to a conversation",
        {JSON: ItemList},
        ItemsRequest,
        statuses=(404, 409, 429),
        parameters=_CONVERSATION,
        example={"items": [{"role": "user", "content": "And on to 12?"}]},
    ),
    ApiOperation("get", ITEM, _TAG, "Get an item of a conversation", {JSON: Item}, statuses=_STORED, parameters=_ITEM),
    ApiOperation(
        "delete",
        ITEM,
        _TAG,
        "Remove an item from a conversation",
        {JSON: ConversationAnswer},
        statuses=(404, 409, 503),
        parameters=_ITEM,
    ),
)
