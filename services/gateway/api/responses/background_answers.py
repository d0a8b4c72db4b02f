"""Responses in the background as events: told as they come, gone on with behind another gateway, ended where none will."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from services.gateway.api.chat import PreparedChat
from services.gateway.api.chat_preparer import ChatPreparer
from services.gateway.api.responses.output import numbered
from services.gateway.api.responses.records import Records
from services.gateway.api.responses.render import Draft, begun, end_of, failure, output_items
from services.gateway.api.responses.translation import chat_request
from services.gateway.api.responses.types import ResponsesRequest
from services.gateway.peers.token_texts import ModelTexts
from services.gateway.request.bodies import ReceivedBody
from services.gateway.request.choice import Delta
from services.gateway.request.errors import ApiError, internal
from services.gateway.request.generation import Plan, Prompt
from services.gateway.request.origin import Origin
from services.gateway.request.request import RunningRequest
from services.gateway.service.sink import Prepare
from services.gateway.state.background_past import pages
from services.gateway.state.background_record import BackgroundOrder, BackgroundStatus, FinalRecords, Stored
from services.shared.limits import MAX_RECORD_BYTES
from services.shared.observe.log_fields import fields
from services.shared.output_formats import OutputFormats
from services.shared.sampling_defaults import API_DEFAULTS

logger = logging.getLogger(__name__)

Json = dict[str, Any]

# In place of what the prompt was made of: that is stored as ids, whatever has become of the responses before it.
_INPUT: list[Json] = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "."}]}]


class BackgroundStory:
    """Of one response, told from where it stands on."""

    def __init__(self, draft: Draft, told: int) -> None:
        """told: events, which are stored."""
        self._draft = draft
        self._told = told

    def restore(self, events: Sequence[bytes], texts: Sequence[str]) -> None:
        self._draft.restore(map(orjson.loads, events), texts)

    def begins(self) -> list[bytes]:
        self._draft.response["status"] = "in_progress"
        return self._numbered([{"type": "response.in_progress", "response": self._draft.response}])

    async def of(self, delta: Delta) -> list[bytes]:
        return self._numbered(await self._draft.told(delta))

    def ending(self) -> tuple[Json, list[bytes]]:
        response = self._draft.response
        self._draft.finish(int(time.time()))
        return response, self._numbered([{"type": end_of(response), "response": response}])

    def _numbered(self, events: list[Json]) -> list[bytes]:
        first, self._told = self._told, self._told + len(events)
        return numbered(events, first)


class BackgroundAnswers:
    """Every method raises ApiError."""

    def __init__(self, preparer: ChatPreparer, records: Records) -> None:
        self._preparer = preparer
        self._records = records

    def prepare(self, stored: Stored) -> Prepare:
        """As it was prepared at first, with the prompt that is stored."""
        order = stored.order
        prepared = PreparedChat(
            Prompt(array("I", stored.prompt), None, rendered_end=order.rendered_end),
            None if order.formats is None else OutputFormats(*order.formats),
            order.reasoning_marks,
            order.context_len,
            API_DEFAULTS.over(order.defaults),
        )

        async def prepare(_body: ReceivedBody, origin: Origin) -> Plan:
            chat = replace(chat_request(_asked(order), _INPUT, streams=True), model=order.model)
            plan = await self._preparer.plan(chat, origin, prepared)
            if order.formats is not None and plan.model.tokenizer != order.tokenizer and not stored.past.lengths.ids:
                raise ApiError(503, "The model that it was asked of is not served any more.", code="weights_not_served")
            return plan

        return prepare

    def story(self, stored: Stored, request: RunningRequest, token_texts: ModelTexts) -> BackgroundStory:
        """Goes on where the stored events end, once it has been told of them."""
        order, asked = stored.order, _asked(stored.order)
        response = {**begun(order.id, order.created_at, order.model, asked), "status": stored.status.value}
        draft = Draft(request, token_texts, response, output_items(order.id, asked))
        return BackgroundStory(draft, stored.past.lengths.events)

    async def record(self, order: BackgroundOrder, response: Json) -> FinalRecords:
        """What is kept of a response that is over; of one that is gone: 404. One without output is kept whatever it has: its
        request has been."""
        kept = await self._records.over(order.owner, response, order.context_bytes)
        if response["output"] and len(kept.record) > MAX_RECORD_BYTES:
            raise ApiError(400, "The response is larger than what can be kept of one.", code="response_too_large")
        return kept

    async def given_up(self, owner: str, response_id: str) -> bytes:
        """The record of one that nobody can read or end, as it is kept; raises ValueError, TypeError or LookupError where that
        cannot be read either."""
        error = internal("None of the gateways that have taken it could go on with it, or end it.")
        return await self._records.ended(owner, response_id, failure(error))

    async def concluded(self, stored: Stored, status: BackgroundStatus, error: ApiError | None) -> tuple[Json, list[bytes]]:
        """A response that ends with what is stored, and its last events. error: of one that failed. What is too large to keep
        is left out."""
        order, events = stored.order, list[Json]()
        try:
            response, events = await self._ended(stored)
        except (ValueError, TypeError, LookupError):
            logger.exception("what is stored of a response cannot be told", extra=fields(response=order.id))
            response = await self._records.response(order.owner, order.id)
        response["status"] = status.value
        if error is not None:
            response |= failure(error)
        kept = await self._records.over(order.owner, response, order.context_bytes)
        if len(kept.record) > MAX_RECORD_BYTES:
            response["output"] = []
        events.append({"type": end_of(response), "response": response})
        return response, numbered(events, stored.past.lengths.events)

    async def _ended(self, stored: Stored) -> tuple[Json, list[Json]]:
        order, asked = stored.order, _asked(stored.order)
        output = output_items(order.id, asked)
        async for events in pages(stored.past.events):
            output.restore(map(orjson.loads, events))
        last = list(output.finish("incomplete"))
        return {**begun(order.id, order.created_at, order.model, asked), "output": output.items}, last


def _asked(order: BackgroundOrder) -> ResponsesRequest:
    return ResponsesRequest.model_validate(order.asked)
