"""The Responses API's routes: responses, which generate, and what is kept of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from services.gateway.api.body_errors import of_validation
from services.gateway.api.chat_preparer import ChatPreparer
from services.gateway.api.responses.background import Background
from services.gateway.api.responses.call import ResponsesCall
from services.gateway.api.responses.items import checked_items
from services.gateway.api.responses.operations import (
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
from services.gateway.api.responses.records import RESPONSE_PREFIX, Records, gone
from services.gateway.api.responses.render import failure
from services.gateway.api.responses.stream import FollowedStream
from services.gateway.api.responses.types import ConversationRequest, ConversationUpdate, ItemsRequest
from services.gateway.api.strict_json import parse_json
from services.gateway.http.answer import HttpPort, endpoint_of
from services.gateway.request.bodies import Body
from services.gateway.request.errors import AnswerForm, ApiError, bad_request, timed_out
from services.gateway.request.origin import origin_of
from services.gateway.service.sink import MakeOperation, Operation
from services.gateway.state.background_record import OPEN
from services.gateway.state.metadata import check_metadata
from services.gateway.state.owner import owner_of
from services.shared import limits

Json = dict[str, Any]
B = TypeVar("B", bound=Body)

_PAGE, _MOST = 20, 100
_NUMBER_CHARS = 12  # of an event


class ResponsesApi:
    """One per process."""

    operations = OPERATIONS
    forms: Mapping[str, AnswerForm] = {}

    def __init__(self, port: HttpPort, preparer: ChatPreparer, records: Records, background: Background | None) -> None:
        """background: None where nothing is kept."""
        self._port = port
        self._preparer = preparer
        self._records = records
        self._background = background

    def add_routes(self, app: FastAPI) -> Mapping[str, MakeOperation]:
        """Returns what generates, by path."""
        self._add_kept(app)
        self._add_conversations(app)
        self._add_items(app)
        return self._add_generation(app)

    def _add_generation(self, app: FastAPI) -> Mapping[str, MakeOperation]:
        def responses() -> Operation:
            call = ResponsesCall(self._preparer, self._records, self._background)
            return Operation(call.prepare, call.renderer)

        app.post(RESPONSES)(endpoint_of(self._port, responses))

        @app.post(INPUT_TOKENS)
        async def input_tokens(request: Request) -> Response:
            call = ResponsesCall(self._preparer, self._records, None)
            state = request.scope["state"]
            async with self._port.bodies.read(request.scope, request.receive) as body:
                count = await call.count(body, origin_of(state))
            return _json({"object": "response.input_tokens", "input_tokens": count})

        return {RESPONSES: responses}

    def _add_kept(self, app: FastAPI) -> None:
        @app.get(RESPONSE)
        async def response(request: Request, response_id: str) -> Response:
            _check_id(response_id)
            query, owner = request.query_params, _owner(request)
            after = _starting_after(query)
            found = await self._current(owner, response_id)
            if query.get("stream") not in ("true", "1"):
                return _json(found)
            if not found["background"] or self._background is None:
                message = "'stream': only a response in the background is streamed again."
                raise bad_request("stream", message, "unsupported_parameter")
            return FollowedStream(await self._background.stream(owner, response_id, after))

        @app.delete(RESPONSE)
        async def forget(request: Request, response_id: str) -> Response:
            _check_id(response_id)
            await self._forget(_owner(request), response_id)
            return _json({"id": response_id, "object": "response.deleted", "deleted": True})

        @app.post(CANCEL)
        async def cancel(request: Request, response_id: str) -> Response:
            owner = _owner(request)
            found = await self._records.response(owner, response_id)
            if not found["background"] or self._background is None:
                message = "Only responses in the background can be cancelled."
                raise bad_request("response_id", message, "unsupported_operation")
            await self._background.cancel(owner, response_id)
            return _json(await self._current(owner, response_id))

        @app.get(INPUT_ITEMS)
        async def input_items(request: Request, response_id: str) -> Response:
            return _json(_page(await self._records.input_items(_owner(request), response_id), request.query_params))

    async def _current(self, owner: str, response_id: str) -> Json:
        """As it is at the moment: what is kept of one in the background says how it began, until it is over."""
        found = await self._records.response(owner, response_id)
        if found["status"] not in OPEN or self._background is None:
            return found
        status = await self._background.status(owner, response_id)
        if status in OPEN:
            return {**found, "status": status}
        found = await self._records.response(owner, response_id)  # it may have ended since it was looked at
        if status is None and found["status"] in OPEN:  # all that it was made of has expired
            return found | failure(timed_out("The response was not made in time."))
        return found

    async def _forget(self, owner: str, response_id: str) -> None:
        if self._background is None:
            await self._records.delete_response(owner, response_id)
        elif not response_id.startswith(RESPONSE_PREFIX) or not await self._background.delete(owner, response_id):
            raise gone("response_id")

    def _add_conversations(self, app: FastAPI) -> None:
        @app.post(CONVERSATIONS)
        async def begin(request: Request) -> Response:
            given = await self._read(request, ConversationRequest)
            items = _few([] if given.items is None else given.items, self._preparer.omits_hosted_tools)
            return _json(_card(await self._records.begin_conversation(_owner(request), items, check_metadata(given.metadata))))

        @app.get(CONVERSATION)
        async def conversation(request: Request, conversation_id: str) -> Response:
            return _json(_card(await self._records.conversation(_owner(request), conversation_id)))

        @app.post(CONVERSATION)
        async def update(request: Request, conversation_id: str) -> Response:
            metadata = check_metadata((await self._read(request, ConversationUpdate)).metadata)
            return _json(_card(await self._records.update_conversation(_owner(request), conversation_id, metadata)))

        @app.delete(CONVERSATION)
        async def forget(request: Request, conversation_id: str) -> Response:
            await self._records.delete_conversation(_owner(request), conversation_id)
            return _json({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    def _add_items(self, app: FastAPI) -> None:
        @app.get(ITEMS)
        async def items(request: Request, conversation_id: str) -> Response:
            found = await self._records.conversation(_owner(request), conversation_id)
            return _json(_page(found["items"], request.query_params))

        @app.post(ITEMS)
        async def add(request: Request, conversation_id: str) -> Response:
            new = _few((await self._read(request, ItemsRequest)).items, self._preparer.omits_hosted_tools)
            await self._records.extend(_owner(request), conversation_id, new)
            return _json(_list(new, False))

        @app.get(ITEM)
        async def item(request: Request, conversation_id: str, item_id: str) -> Response:
            found = await self._records.conversation(_owner(request), conversation_id)
            return _json(_one(found["items"], item_id))

        @app.delete(ITEM)
        async def remove(request: Request, conversation_id: str, item_id: str) -> Response:
            found = await self._records.conversation(_owner(request), conversation_id)
            _one(found["items"], item_id)
            return _json(_card(await self._records.remove_item(_owner(request), conversation_id, item_id)))

    async def _read(self, request: Request, model: type[B]) -> B:
        """Raises ApiError."""
        async with self._port.bodies.read(request.scope, request.receive, limits.MAX_RECORD_BYTES) as body:
            try:
                return model.model_validate(parse_json(body.take()))
            except ValidationError as error:
                raise of_validation(error) from None


def _check_id(response_id: str) -> None:
    """A path of its own is no response's."""
    if f"{RESPONSES}/{response_id}" == INPUT_TOKENS:
        raise HTTPException(405)


def _starting_after(query: Mapping[str, str]) -> int:
    """-1: from the first one."""
    given = query.get("starting_after")
    if given is None:
        return -1
    if not given.isascii() or not given.isdecimal() or len(given) > _NUMBER_CHARS:
        raise bad_request("starting_after", "'starting_after' must be the sequence number of an event.")
    if query.get("stream") not in ("true", "1"):
        raise bad_request("starting_after", "'starting_after' needs 'stream' to be true.")
    return int(given)


def _owner(request: Request) -> str:
    return owner_of(request.scope["state"]["key"])


def _few(given: Any, omits_hosted: bool) -> list[Json]:
    items = checked_items(given, "items", omits_hosted)
    if len(items) > limits.MAX_CONVERSATION_ITEMS:
        raise bad_request("items", f"'items' may have at most {limits.MAX_CONVERSATION_ITEMS} items.")
    return items


def _one(items: Sequence[Json], item_id: str) -> Json:
    found = [item for item in items if item["id"] == item_id]
    if not found:
        raise ApiError(404, "There is no such item.", param="item_id", code="item_not_found")
    return found[0]


def _card(conversation: Json) -> Json:
    kept = {name: conversation[name] for name in ("id", "created_at", "metadata")}
    return {**kept, "object": "conversation"}


def _page(items: Sequence[Json], query: Mapping[str, str]) -> Json:
    """Newest first, unless `order` is asc; those after the item `after`, `limit` of them."""
    order, after, given = query.get("order", "desc"), query.get("after"), query.get("limit", str(_PAGE))
    if order not in ("asc", "desc"):
        raise bad_request("order", "'order' must be asc or desc.")
    if not given.isdecimal() or len(given) > len(str(_MOST)) or not 1 <= int(given) <= _MOST:
        raise bad_request("limit", f"'limit' must be a number from 1 to {_MOST}.")
    ordered = list(items) if order == "asc" else list(items)[::-1]
    if after is not None:
        ordered = ordered[ordered.index(_one(ordered, after)) + 1 :]
    return _list(ordered[: int(given)], len(ordered) > int(given))


def _list(items: Sequence[Json], has_more: bool) -> Json:
    ends = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": list(items), "first_id": ends[0], "last_id": ends[1], "has_more": has_more}


def _json(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
