"""Routes of the Responses API: creation of responses, stored responses, and conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rootstock_llm.services.gateway.api.chat import ChatPreparer
from rootstock_llm.services.gateway.api.request_body import of_validation, parse_json
from rootstock_llm.services.gateway.api.responses.background import Background
from rootstock_llm.services.gateway.api.responses.call import ResponsesCall
from rootstock_llm.services.gateway.api.responses.items import checked_items, with_distinct_ids
from rootstock_llm.services.gateway.api.responses.operations import (
    CANCEL,
    CONVERSATION,
    CONVERSATIONS,
    INPUT_ITEMS,
    INPUT_TOKENS,
    ITEM,
    ITEMS,
    OPERATIONS,
    RESPONSE,
    RESPONSES,
)
from rootstock_llm.services.gateway.api.responses.records import RESPONSE_PREFIX, Context, Records, object_not_found
from rootstock_llm.services.gateway.api.responses.render import failure
from rootstock_llm.services.gateway.api.responses.stream import FollowedStream
from rootstock_llm.services.gateway.api.responses.types import ConversationRequest, ConversationUpdate, ItemsRequest
from rootstock_llm.services.gateway.generation.bodies import RequestBody
from rootstock_llm.services.gateway.generation.body_fields import Body
from rootstock_llm.services.gateway.generation.errors import AnswerForm, ApiError, bad_request, timed_out
from rootstock_llm.services.gateway.generation.origin import origin_of
from rootstock_llm.services.gateway.http.answer import HttpPort, json_response
from rootstock_llm.services.gateway.service.sink import MakeOperation, Operation
from rootstock_llm.services.gateway.store.background_record import OPEN
from rootstock_llm.services.gateway.store.metadata import check_metadata
from rootstock_llm.services.gateway.store.owner import owner_of
from rootstock_llm.services.shared import limits

Json = dict[str, Any]
B = TypeVar("B", bound=Body)
WithItems = TypeVar("WithItems", ConversationRequest, ItemsRequest)  # bodies with items

_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100  # default and maximum of the query parameter 'limit' of lists
_NUMBER_CHARS = 12  # maximum digits of the query parameter 'starting_after'


class ResponsesApi:
    """The routes of OpenAI's Responses API. Each process has one instance."""

    operations = OPERATIONS
    forms: Mapping[str, AnswerForm] = {}

    def __init__(self, port: HttpPort, preparer: ChatPreparer, records: Records, background: Background | None) -> None:
        """Makes the routes. `background` is None if the gateway has no store."""
        self._port = port
        self._preparer = preparer
        self._records = records
        self._background = background

    def generating(self) -> Mapping[str, MakeOperation]:
        """Returns the generating operations by path."""
        return {RESPONSES: self._responses}

    def routes(self) -> list[Route]:
        """Returns the routes that do not generate."""
        return [
            Route(RESPONSE, self._get_response),
            Route(RESPONSE, self._delete_response, methods=["DELETE"]),
            Route(CANCEL, self._cancel, methods=["POST"]),
            Route(INPUT_ITEMS, self._get_input_items),
            Route(CONVERSATIONS, self._begin_conversation, methods=["POST"]),
            Route(CONVERSATION, self._get_conversation),
            Route(CONVERSATION, self._update_conversation, methods=["POST"]),
            Route(CONVERSATION, self._delete_conversation, methods=["DELETE"]),
            Route(ITEMS, self._list_items),
            Route(ITEMS, self._add_items, methods=["POST"]),
            Route(ITEM, self._get_item),
            Route(ITEM, self._remove_item, methods=["DELETE"]),
            Route(INPUT_TOKENS, self._count_tokens, methods=["POST"]),
        ]

    def _responses(self) -> Operation:
        call = ResponsesCall(self._preparer, self._records, self._background)
        return Operation(call.prepare, call.renderer)

    async def _count_tokens(self, request: Request) -> Response:
        call = ResponsesCall(self._preparer, self._records, None)
        async with self._port.bodies.read(request.scope, request.receive) as body:
            count = await call.count(body, origin_of(request.scope["state"]))
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    async def _get_response(self, request: Request) -> Response:
        response_id, query, owner = _response_id(request), request.query_params, _owner(request)
        after = _starting_after(query)
        found = await self._current(owner, response_id)
        if query.get("stream") not in ("true", "1"):
            return json_response(found)
        if not found["background"] or self._background is None:
            message = "'stream' is supported only for background responses."
            raise bad_request("stream", message, "unsupported_parameter")
        return FollowedStream(await self._background.stream(owner, response_id, after))

    async def _delete_response(self, request: Request) -> Response:
        response_id, owner = _response_id(request), _owner(request)
        if self._background is None:
            await self._records.delete_response(owner, response_id)
        elif not response_id.startswith(RESPONSE_PREFIX) or not await self._background.delete(owner, response_id):
            raise object_not_found("response_id")
        return json_response({"id": response_id, "object": "response.deleted", "deleted": True})

    async def _cancel(self, request: Request) -> Response:
        owner, response_id = _owner(request), request.path_params["response_id"]
        found = await self._records.response(owner, response_id)
        if not found["background"] or self._background is None:
            message = "Only background responses can be cancelled."
            raise bad_request("response_id", message, "unsupported_operation")
        await self._background.cancel(owner, response_id)
        return json_response(await self._current(owner, response_id))

    async def _get_input_items(self, request: Request) -> Response:
        items = await self._records.input_items(_owner(request), request.path_params["response_id"])
        return json_response(_page(items, request.query_params))

    async def _current(self, owner: str, response_id: str) -> Json:
        """Returns the response with its current status.

        The stored record keeps the status `queued` until the response ends, so the status of a running response is read
        separately.
        """
        found = await self._records.response(owner, response_id)
        if found["status"] not in OPEN or self._background is None:
            return found
        status = await self._background.status(owner, response_id)
        if status in OPEN:
            return {**found, "status": status}
        found = await self._records.response(owner, response_id)  # the response may have ended since the first read
        if status is None and found["status"] in OPEN:  # the background record has expired
            return found | failure(timed_out("The response did not end within its time limit."))
        return found

    async def _begin_conversation(self, request: Request) -> Response:
        given, items = await self._parsed_items(request, ConversationRequest)
        return json_response(
            _conversation_body(await self._records.begin_conversation(_owner(request), items, check_metadata(given.metadata)))
        )

    async def _get_conversation(self, request: Request) -> Response:
        return json_response(_conversation_body(await self._conversation(request)))

    async def _update_conversation(self, request: Request) -> Response:
        metadata = check_metadata((await self._parsed_body(request, ConversationUpdate)).metadata)
        return json_response(
            _conversation_body(
                await self._records.update_conversation(_owner(request), request.path_params["conversation_id"], metadata)
            )
        )

    async def _delete_conversation(self, request: Request) -> Response:
        conversation_id = request.path_params["conversation_id"]
        await self._records.delete_conversation(_owner(request), conversation_id)
        return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def _list_items(self, request: Request) -> Response:
        return json_response(_page((await self._conversation(request))["items"], request.query_params))

    async def _add_items(self, request: Request) -> Response:
        _, new = await self._parsed_items(request, ItemsRequest)
        conversation = await self._records.extend(_owner(request), request.path_params["conversation_id"], new)
        stored = {item["id"]: item for item in conversation["items"]}
        return json_response(_list([stored[item["id"]] for item in new], False))

    async def _get_item(self, request: Request) -> Response:
        found = await self._conversation(request)
        return json_response(_item_of(found["items"], request.path_params["item_id"]))

    async def _remove_item(self, request: Request) -> Response:
        owner, conversation_id, item_id = _owner(request), request.path_params["conversation_id"], request.path_params["item_id"]
        _item_of((await self._conversation(request))["items"], item_id)
        return json_response(_conversation_body(await self._records.remove_item(owner, conversation_id, item_id)))

    async def _conversation(self, request: Request) -> Json:
        """Returns the conversation that the path names. Raises ApiError if it does not exist."""
        return await self._records.conversation(_owner(request), request.path_params["conversation_id"])

    async def _parsed_body(self, request: Request, model: type[B]) -> B:
        """Returns the parsed body. Raises ApiError if it is invalid."""
        async with self._port.bodies.read(request.scope, request.receive, limits.MAX_RECORD_BYTES) as body:
            return _parsed(body, model)

    async def _parsed_items(self, request: Request, model: type[WithItems]) -> tuple[WithItems, list[Json]]:
        """Returns the parsed body and its items, with each reference replaced by its item. Raises ApiError if it is invalid."""
        async with self._port.bodies.read(request.scope, request.receive, limits.MAX_RECORD_BYTES) as body:
            given = _parsed(body, model)
            begins_empty = given.items is None and isinstance(given, ConversationRequest)
            items = _checked_items([] if begins_empty else given.items, self._preparer.omits_hosted_tools)
            found = await self._records.resolved(_owner(request), items, Context(), body.grow_by, "items")
        return given, with_distinct_ids(found)


def _parsed(body: RequestBody, model: type[B]) -> B:
    """Returns the parsed content of a body. Raises ApiError if it is invalid."""
    try:
        return model.model_validate(parse_json(body.take()))
    except ValidationError as error:
        raise of_validation(error) from None


def _response_id(request: Request) -> str:
    """Returns the response id in the path. Raises HTTPException 405 if the path is INPUT_TOKENS, which allows only POST."""
    response_id: str = request.path_params["response_id"]
    if f"{RESPONSES}/{response_id}" == INPUT_TOKENS:
        raise HTTPException(405)
    return response_id


def _starting_after(query: Mapping[str, str]) -> int:
    """Returns the sequence number after which the client's stream begins; -1 if it begins with the first event."""
    given = query.get("starting_after")
    if given is None:
        return -1
    if not given.isascii() or not given.isdecimal() or len(given) > _NUMBER_CHARS:
        raise bad_request("starting_after", "'starting_after' must be the sequence number of an event.")
    if query.get("stream") not in ("true", "1"):
        raise bad_request("starting_after", "'starting_after' is allowed only with 'stream=true'.")
    return int(given)


def _owner(request: Request) -> str:
    return owner_of(request.scope["state"]["key"])


def _checked_items(given: Any, omits_hosted: bool) -> list[Json]:
    items = checked_items(given, "items", omits_hosted)
    if len(items) > limits.MAX_CONVERSATION_ITEMS:
        raise bad_request("items", f"'items' may have at most {limits.MAX_CONVERSATION_ITEMS} items.")
    return items


def _item_of(items: Sequence[Json], item_id: str) -> Json:
    found = [item for item in items if item["id"] == item_id]
    if not found:
        raise ApiError(404, "The conversation or response has no item with this id.", param="item_id", code="item_not_found")
    return found[0]


def _conversation_body(conversation: Json) -> Json:
    fields = {name: conversation[name] for name in ("id", "created_at", "metadata")}
    return {**fields, "object": "conversation"}


def _page(items: Sequence[Json], query: Mapping[str, str]) -> Json:
    """Returns a page of a list: at most `limit` items after the item `after`. Newest items are first, unless `order` is asc."""
    order, after, given = query.get("order", "desc"), query.get("after"), query.get("limit", str(_DEFAULT_LIMIT))
    if order not in ("asc", "desc"):
        raise bad_request("order", "'order' must be asc or desc.")
    if not given.isdecimal() or len(given) > len(str(_MAX_LIMIT)) or not 1 <= int(given) <= _MAX_LIMIT:
        raise bad_request("limit", f"'limit' must be a number from 1 to {_MAX_LIMIT}.")
    ordered = list(items) if order == "asc" else list(items)[::-1]
    if after is not None:
        ordered = ordered[ordered.index(_item_of(ordered, after)) + 1 :]
    return _list(ordered[: int(given)], len(ordered) > int(given))


def _list(items: Sequence[Json], has_more: bool) -> Json:
    ends = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": list(items), "first_id": ends[0], "last_id": ends[1], "has_more": has_more}
