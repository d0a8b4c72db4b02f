"""Renders background responses: their events, their final records, and responses that end with the output stored so far.

If another gateway received the request, the gateway that renders the response has only the stored prompt and events.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from rootstock_llm.services.gateway.api.chat import ChatPreparer, PreparedChat
from rootstock_llm.services.gateway.api.responses.output import numbered
from rootstock_llm.services.gateway.api.responses.records import Records
from rootstock_llm.services.gateway.api.responses.render import Draft, failure, final_event_type, new_response, output_items
from rootstock_llm.services.gateway.api.responses.translation import chat_request
from rootstock_llm.services.gateway.api.responses.types import ResponsesRequest
from rootstock_llm.services.gateway.generation.bodies import RequestBody
from rootstock_llm.services.gateway.generation.choice import Delta
from rootstock_llm.services.gateway.generation.errors import ApiError, internal
from rootstock_llm.services.gateway.generation.origin import Origin
from rootstock_llm.services.gateway.generation.request import GenerationRequest, PromptInput
from rootstock_llm.services.gateway.generation.running import RunningRequest
from rootstock_llm.services.gateway.remote.token_texts import TokenTexts
from rootstock_llm.services.gateway.service.sink import Prepare
from rootstock_llm.services.gateway.store.background_past import pages
from rootstock_llm.services.gateway.store.background_record import BackgroundOrder, BackgroundStatus, FinalRecords, Stored
from rootstock_llm.services.shared.limits import MAX_RECORD_BYTES
from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.shared.output_formats import OutputFormats
from rootstock_llm.services.shared.sampling_parameters import API_DEFAULTS

logger = logging.getLogger(__name__)

Json = dict[str, Any]

# Stands for the input of a resumed response, because a ChatRequest must have a message. The stored prompt ids replace it.
_INPUT: list[Json] = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "."}]}]


class BackgroundEventRenderer:
    """Renders the new events of one response, which follow its stored events."""

    def __init__(self, draft: Draft, num_stored: int) -> None:
        """Makes the renderer. The next event gets the sequence number `num_stored`, the number of stored events."""
        self._draft = draft
        self._num_events = num_stored

    def restore(self, events: Sequence[bytes], texts: Sequence[str]) -> None:
        self._draft.restore(map(orjson.loads, events), texts)

    def begins(self) -> list[bytes]:
        self._draft.response["status"] = "in_progress"
        return self._numbered([{"type": "response.in_progress", "response": self._draft.response}])

    async def of(self, delta: Delta) -> list[bytes]:
        return self._numbered(await self._draft.events_of(delta))

    def ending(self) -> tuple[Json, list[bytes]]:
        response = self._draft.response
        self._draft.finish(int(time.time()))
        return response, self._numbered([{"type": final_event_type(response), "response": response}])

    def _numbered(self, events: list[Json]) -> list[bytes]:
        first, self._num_events = self._num_events, self._num_events + len(events)
        return numbered(events, first)


class BackgroundAnswers:
    """Prepares, renders and ends stored background responses. Every method may raise ApiError."""

    def __init__(self, preparer: ChatPreparer, records: Records) -> None:
        self._preparer = preparer
        self._records = records

    def prepare(self, stored: Stored) -> Prepare:
        """Returns a function that prepares the stored request for generation, with the stored prompt."""
        order = stored.order
        prepared = PreparedChat(
            PromptInput(array("I", stored.prompt), None, rendered_end=order.rendered_end),
            None if order.formats is None else OutputFormats(*order.formats),
            order.reasoning_marks,
            order.context_len,
            API_DEFAULTS.over(order.defaults),
        )

        async def prepare(_body: RequestBody, origin: Origin) -> GenerationRequest:
            chat = replace(chat_request(_parsed(order), _INPUT, streams=True), model=order.model)
            request = await self._preparer.prepare(chat, origin, prepared)
            if order.formats is not None and request.model.tokenizer != order.tokenizer and not stored.past.lengths.ids:
                raise ApiError(
                    503, "The model of this response has been replaced. Create the response again.", code="weights_not_served"
                )
            return request

        return prepare

    def event_renderer(self, stored: Stored, request: RunningRequest, token_texts: TokenTexts) -> BackgroundEventRenderer:
        """Returns the renderer of a stored response.

        The caller must pass all stored events to restore() before any other call.
        """
        order, parsed = stored.order, _parsed(stored.order)
        response = {**new_response(order.id, order.created_at, order.model, parsed), "status": stored.status.value}
        draft = Draft(request, token_texts, response, output_items(order.id, parsed))
        return BackgroundEventRenderer(draft, stored.past.lengths.events)

    async def record(self, order: BackgroundOrder, response: Json) -> FinalRecords:
        """Returns the final record of a response, and of its conversation.

        A response without output is never too large, because DetachedCall has checked the size of its request.

        Raises:
            ApiError: 404 if the response was deleted, 400 if it is too large to store.
        """
        final = await self._records.final_records(order.owner, response, order.context_bytes)
        if response["output"] and len(final.record) > MAX_RECORD_BYTES:
            raise ApiError(
                400, "The response is larger than a stored response may be. Ask for fewer tokens.", code="response_too_large"
            )
        return final

    async def given_up(self, owner: str, response_id: str) -> bytes:
        """Returns the record, with status failed, of a response that no gateway could read or end.

        Raises:
            ValueError, TypeError, LookupError: The record cannot be read.
        """
        error = internal("No gateway could continue or end this response.")
        return await self._records.changed_record(owner, response_id, failure(error))

    async def concluded(self, stored: Stored, status: BackgroundStatus, error: ApiError | None) -> tuple[Json, list[bytes]]:
        """Ends a response with the output in its stored events. Returns the response and its last events.

        If the stored events cannot be read, or if the record would be too large, the response has no output.

        Args:
            status: Final status of the response.
            error: Error of a failed response; None for another status.
        """
        order, events = stored.order, list[Json]()
        try:
            response, events = await self._from_stored_events(stored)
        except (ValueError, TypeError, LookupError):
            logger.exception("could not render the stored output of a response", extra=fields(response=order.id))
            response = await self._records.response(order.owner, order.id)
        response["status"] = status.value
        if error is not None:
            response |= failure(error)
        final = await self._records.final_records(order.owner, response, order.context_bytes)
        if len(final.record) > MAX_RECORD_BYTES:
            response["output"] = []
        events.append({"type": final_event_type(response), "response": response})
        return response, numbered(events, stored.past.lengths.events)

    async def _from_stored_events(self, stored: Stored) -> tuple[Json, list[Json]]:
        order, parsed = stored.order, _parsed(stored.order)
        output = output_items(order.id, parsed)
        async for events in pages(stored.past.events):
            output.restore(map(orjson.loads, events))
        last = list(output.finish("incomplete"))
        return {**new_response(order.id, order.created_at, order.model, parsed), "output": output.items}, last


def _parsed(order: BackgroundOrder) -> ResponsesRequest:
    return ResponsesRequest.model_validate(order.asked)
