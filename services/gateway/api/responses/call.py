"""Prepares one request of the Responses API, with the stored items that precede its input, and stores its response."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from rootstock_llm.services.gateway.api.chat import ChatPreparer
from rootstock_llm.services.gateway.api.known_fields import omitted_names
from rootstock_llm.services.gateway.api.request_body import parse_json
from rootstock_llm.services.gateway.api.responses.background import Background, DetachedCall
from rootstock_llm.services.gateway.api.responses.items import checked_items, with_distinct_ids
from rootstock_llm.services.gateway.api.responses.records import NOT_FINISHED, RESPONSE_PREFIX, Context, Records, record_of
from rootstock_llm.services.gateway.api.responses.render import ResponseRenderer, new_response
from rootstock_llm.services.gateway.api.responses.translation import as_served, chat_request, parse, prompt_request
from rootstock_llm.services.gateway.api.responses.types import ResponsesRequest
from rootstock_llm.services.gateway.generation.bodies import Hold, RequestBody
from rootstock_llm.services.gateway.generation.errors import ApiError, bad_request
from rootstock_llm.services.gateway.generation.origin import Origin
from rootstock_llm.services.gateway.generation.request import GenerationRequest
from rootstock_llm.services.gateway.generation.running import RunningRequest
from rootstock_llm.services.gateway.remote.token_texts import TokenTexts
from rootstock_llm.services.gateway.store.background_record import BackgroundStatus
from rootstock_llm.services.gateway.store.owner import owner_of

logger = logging.getLogger(__name__)

Json = dict[str, Any]

_FIXED = frozenset(("system", "developer"))  # roles of messages that truncation keeps


class ResponsesCall:
    """Prepares, renders and stores one response. The caller calls prepare() once and then renderer(), or only count()."""

    _parsed: ResponsesRequest  # the parsed body
    _before: Context  # stored items that precede the input
    _items: list[Json]  # items of the input
    _owner: str  # owner of the stored records; see owner_of()
    _origin: Origin
    _streams: bool  # whether the client gets a stream of a background response; unset for other responses

    def __init__(self, preparer: ChatPreparer, records: Records, background: Background | None) -> None:
        self._preparer = preparer
        self._records = records
        self._background = background

    async def prepare(self, body: RequestBody, origin: Origin) -> GenerationRequest:
        """Parses the body, tokenizes its prompts and returns the generation request. Raises ApiError."""
        await self._read(body, origin)
        if self._parsed.background:
            self._check_background()
        before = self._before.items
        self._before = replace(self._before, items=[])  # frees up to 16 MiB
        request = await self._prepare_truncated([*before, *self._items], origin)
        self._parsed = as_served(self._parsed)
        return request

    async def count(self, body: RequestBody, origin: Origin) -> int:
        """Returns the number of tokens of the prompt. Raises ApiError."""
        await self._read(body, origin)
        return await self._preparer.count(prompt_request(self._parsed, [*self._before.items, *self._items]), origin)

    def renderer(
        self, request: RunningRequest, created: int, model: str, token_texts: TokenTexts
    ) -> ResponseRenderer | DetachedCall:
        response_id = f"{RESPONSE_PREFIX}{secrets.token_hex(16)}"
        if self._parsed.background:
            assert self._background is not None
            response = new_response(response_id, created, model, self._parsed) | {"status": BackgroundStatus.QUEUED.value}
            try:
                record = record_of(response, self._items, self._before.chain, self._before.num_bytes)
            except (orjson.JSONEncodeError, RecursionError):
                raise bad_request(
                    "background", "The request is nested too deeply for the store. Send it without 'background'."
                ) from None
            return DetachedCall(self._background, self._origin, self._parsed, self._streams, record, self._before.num_bytes)
        return ResponseRenderer(
            request, created, model, token_texts, response_id, self._parsed, self._store, self._records.has_store
        )

    async def _read(self, body: RequestBody, origin: Origin) -> None:
        self._owner = owner_of(origin.caller.key)
        self._origin = origin
        omits = self._preparer.omits_hosted_tools
        self._parsed = parsed = parse(parse_json(body.take()), omits)
        if omits:
            origin.omit(omitted_names(parsed.tools))
        if parsed.stream and not parsed.background:
            origin.stream()
        items = checked_items([] if parsed.input is None else parsed.input, "input", omits)
        self._before = await self._context(parsed, body.grow_by)
        self._items = with_distinct_ids(await self._records.resolved(self._owner, items, self._before, body.grow_by))
        self._parsed = parsed.model_copy(update={"input": None})  # frees up to 64 MiB; `_items` has a copy

    def _check_background(self) -> None:
        """Checks that the response may run in the background, and sets a random seed if the client sent none. Raises ApiError.

        With a stored seed, another worker that resumes the response samples the same tokens.
        """
        parsed = self._parsed
        if parsed.store is False:
            message = "Background sampling requires store=true; stateless requests are rejected."
            raise bad_request("background", message)
        if self._origin.caller.background:
            raise bad_request("background", "'background' cannot be used in a batch.", "unsupported_parameter")
        if self._background is None:
            raise ApiError(
                400,
                "This server has no store, which background responses need. Send the request without 'background'.",
                param="background",
                code="no_store",
            )
        if not self._background.takes_any:
            raise bad_request(
                "background",
                "This server runs no background responses. Send the request without 'background'.",
                "unsupported_parameter",
            )
        self._streams = bool(parsed.stream)  # the client's stream reads the stored events; the generation itself has no stream
        seed = secrets.randbits(63) if parsed.seed is None else parsed.seed
        self._parsed = parsed.model_copy(update={"seed": seed, "stream": None})

    async def _context(self, parsed: ResponsesRequest, reserve: Hold) -> Context:
        conversation = self._conversation(parsed)
        if parsed.previous_response_id is not None:
            return await self._after(parsed.previous_response_id, reserve)
        return Context() if conversation is None else await self._records.of_conversation(self._owner, conversation, reserve)

    async def _after(self, response_id: str, reserve: Hold) -> Context:
        try:
            return await self._records.after(self._owner, response_id, reserve)
        except ApiError as error:
            if error.code != NOT_FINISHED or self._background is None:
                raise
            if await self._background.status(self._owner, response_id) is not None:
                raise
        message = "The previous response has failed, because it did not end within its time limit."
        raise bad_request("previous_response_id", message, "previous_response_failed")

    @staticmethod
    def _conversation(parsed: ResponsesRequest) -> str | None:
        given = parsed.conversation
        return given if isinstance(given, str | None) else given.id

    async def _prepare_truncated(self, items: Sequence[Json], origin: Origin) -> GenerationRequest:
        """Returns the prepared request.

        With truncation `auto`, removes the oldest items until the prompt fits into the context.
        """
        streams = bool(self._parsed.stream or self._parsed.background)
        while True:
            try:
                return await self._preparer.prepare(chat_request(self._parsed, items, streams), origin)
            except ApiError as error:
                fewer = _without_oldest(items)
                if error.code != "context_length_exceeded" or self._parsed.truncation != "auto" or len(fewer) == len(items):
                    raise
                items = fewer

    async def _store(self, response: Json) -> bool:
        """Stores the response unless the client turned this off, and adds its items to the conversation if it has one.

        Returns:
            Whether the response is stored and its conversation, if any, is extended.
        """
        is_extended = True
        conversation = self._conversation(self._parsed)
        if conversation is not None:
            try:
                await self._records.extend(self._owner, conversation, [*self._items, *response["output"]])
            except ApiError as error:
                logger.warning("did not extend a conversation: %s", error.message)
                is_extended = False
        if not response["store"]:
            return False
        before = self._before if self._parsed.previous_response_id is not None else Context()
        return await self._records.store_response(self._owner, response, self._items, before) and is_extended


def _without_oldest(items: Sequence[Json]) -> list[Json]:
    """Removes the oldest quarter of the removable items, at least one, and returns the rest.

    System messages, developer messages and the last item stay. If the last item is a tool result, its call also stays. If the
    call of another tool result is removed, the result is removed, too.
    """
    if not items:
        return []
    *before, last = items
    call_id = last.get("call_id")
    fixed = [item.get("role") in _FIXED or (item["type"] == "function_call" and item["call_id"] == call_id) for item in before]
    removable = [index for index, is_fixed in enumerate(fixed) if not is_fixed]
    removed = set(removable[: max(1, len(removable) // 4)])
    rest = [item for index, item in enumerate(before) if index not in removed]
    calls = {item["call_id"] for item in rest if item["type"] == "function_call"}
    return [*(item for item in rest if item["type"] != "function_call_output" or item["call_id"] in calls), last]
