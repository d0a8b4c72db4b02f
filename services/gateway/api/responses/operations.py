"""The Responses API as the OpenAPI document has it."""

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
_RESPONSE = {"response_id": "Of a response that is kept."}
_CONVERSATION = {"conversation_id": "Of a conversation."}
_ITEM = {**_CONVERSATION, "item_id": "Of one of its items."}
_KEPT = (404, 503)
OPERATIONS = (
    ApiOperation(
        "post",
        RESPONSES,
        _TAG,
        "Response",
        {JSON: ResponseAnswer, EVENTS: ResponseEvent},
        ResponsesRequest,
        generates=True,
        named=True,
        sometimes=("x-rootstock-stored",),
        takes_tools=True,
        example={"input": "Count from 3 to 9.", "max_output_tokens": 64, "temperature": 0},
    ),
    ApiOperation(
        "post",
        INPUT_TOKENS,
        _TAG,
        "Tokens of its input",
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
        "A response that is kept",
        {JSON: ResponseAnswer, EVENTS: ResponseEvent},
        statuses=_KEPT,
        parameters=_RESPONSE,
        named=True,
    ),
    ApiOperation("delete", RESPONSE, _TAG, "Forget it", {JSON: Deleted}, statuses=_KEPT, parameters=_RESPONSE),
    ApiOperation(
        "post", CANCEL, _TAG, "Cancel one in the background", {JSON: ResponseAnswer}, statuses=_KEPT, parameters=_RESPONSE
    ),
    ApiOperation("get", INPUT_ITEMS, _TAG, "Its input", {JSON: ItemList}, statuses=_KEPT, parameters=_RESPONSE),
    ApiOperation(
        "post",
        CONVERSATIONS,
        _TAG,
        "Begin a conversation",
        {JSON: ConversationAnswer},
        ConversationRequest,
        statuses=(429,),
        example={"items": [{"role": "user", "content": "Count from 3 to 9."}], "metadata": {"topic": "numbers"}},
    ),
    ApiOperation(
        "get", CONVERSATION, _TAG, "A conversation", {JSON: ConversationAnswer}, statuses=_KEPT, parameters=_CONVERSATION
    ),
    ApiOperation(
        "post",
        CONVERSATION,
        _TAG,
        "Change its metadata",
        {JSON: ConversationAnswer},
        ConversationUpdate,
        statuses=(404, 409, 429),
        parameters=_CONVERSATION,
        example={"metadata": {"topic": "counting"}},
    ),
    ApiOperation("delete", CONVERSATION, _TAG, "Forget it", {JSON: Deleted}, statuses=_KEPT, parameters=_CONVERSATION),
    ApiOperation("get", ITEMS, _TAG, "Its items", {JSON: ItemList}, statuses=_KEPT, parameters=_CONVERSATION),
    ApiOperation(
        "post",
        ITEMS,
        _TAG,
        "Add items",
        {JSON: ItemList},
        ItemsRequest,
        statuses=(404, 409, 429),
        parameters=_CONVERSATION,
        example={"items": [{"role": "user", "content": "And on to 12?"}]},
    ),
    ApiOperation("get", ITEM, _TAG, "One item", {JSON: Item}, statuses=_KEPT, parameters=_ITEM),
    ApiOperation("delete", ITEM, _TAG, "Remove it", {JSON: ConversationAnswer}, statuses=(404, 409, 503), parameters=_ITEM),
)
