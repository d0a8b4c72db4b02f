"""Starts a background response, and defines the interface of the module that runs background responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import orjson
from starlette.responses import Response

from rootstock_llm.services.gateway.api.responses.output import numbered
from rootstock_llm.services.gateway.api.responses.stream import FollowedStream
from rootstock_llm.services.gateway.api.responses.types import ResponsesRequest
from rootstock_llm.services.gateway.background.follow import Follow
from rootstock_llm.services.gateway.generation.errors import ApiError
from rootstock_llm.services.gateway.generation.origin import Caller, Origin
from rootstock_llm.services.gateway.generation.request import GenerationRequest
from rootstock_llm.services.gateway.generation.running import KeyAdmission
from rootstock_llm.services.gateway.service.sink import Detached, Respond
from rootstock_llm.services.gateway.store.background_record import BackgroundOrder, BackgroundStatus
from rootstock_llm.services.gateway.store.owner import owner_of
from rootstock_llm.services.shared.limits import MAX_RECORD_BYTES
from rootstock_llm.services.shared.output_formats import OutputFormats

Json = dict[str, Any]

_MAX_REQUEST_BYTES = MAX_RECORD_BYTES - (64 << 10)  # most bytes of a stored request; 64 KiB stay for the rest of its record


class Background(Protocol):
    """Runs and stores the background responses of this gateway. Every method may raise ApiError."""

    takes_any: bool  # whether this gateway accepts background responses
    timeout_s: int  # seconds after which an unfinished response fails

    async def begin(
        self,
        order: BackgroundOrder,
        record: bytes,
        prepared: GenerationRequest,
        caller: Caller,
        admission: KeyAdmission | None,
        events: Sequence[bytes],
    ) -> None:
        """Stores a new response and starts to generate it. Takes ownership of the admission, which ends if this method raises.

        Args:
            order: The request, from which any gateway can continue the response.
            record: The record that clients read until the response ends.
            admission: Reserves the request's share of the API key's limits; None if the key has no limits.
            events: The first events of the response's stream.
        """

    async def status(self, owner: str, response_id: str) -> BackgroundStatus | None:
        """Returns the status of a background response, or None if no response has this id."""

    async def stream(self, owner: str, response_id: str, after: int) -> Follow:
        """Returns a function that sends the events after the sequence number `after`, or all events if it is -1.

        Raises:
            ApiError: Too many streams are open.
        """

    def own_stream(self, owner: str, response_id: str) -> Follow:
        """Returns a function that sends all events to the client that has just created the response."""

    async def cancel(self, owner: str, response_id: str) -> None:
        """Cancels a response. Returns when the response has ended, whether by the cancellation or not."""

    async def delete(self, owner: str, response_id: str) -> bool:
        """Deletes a stored response, and cancels it if it runs in the background. Returns whether it existed."""


class DetachedCall(Detached):
    """Stores a prepared response and starts it in the background.

    Sends the client the queued response, or a stream of its events.
    """

    def __init__(
        self,
        background: Background,
        origin: Origin,
        parsed: ResponsesRequest,
        streams: bool,
        record: Json,
        context_bytes: int,
    ) -> None:
        """Takes the data of the response that detach() starts.

        Args:
            parsed: The parsed body.
            streams: Whether the client gets a stream of events.
            record: The record that is stored until the response ends.
            context_bytes: Total size of the stored responses that precede this response.
        """
        self._background = background
        self._origin = origin
        self._parsed = parsed
        self._streams = streams
        self._record = record
        self._context_bytes = context_bytes

    async def detach(self, prepared: GenerationRequest, admission: KeyAdmission | None) -> Respond:
        response, owner = self._record["response"], owner_of(self._origin.caller.key)
        try:
            events = numbered(({"type": f"response.{kind}", "response": response} for kind in ("created", "queued")), 0)
            record, order = orjson.dumps(self._record), self._order(prepared)
            if max(len(record), len(order.dumped())) > _MAX_REQUEST_BYTES:
                message = (
                    f"The request of a background response may have at most {_MAX_REQUEST_BYTES} bytes. Send a shorter input."
                )
                raise ApiError(413, message, param="background", code="request_too_large")
        except BaseException:
            if admission is not None:
                admission.end(0)
            raise
        await self._background.begin(order, record, prepared, self._origin.caller, admission, events)
        if self._streams:
            return FollowedStream(self._background.own_stream(owner, response["id"]))
        return Response(orjson.dumps(response), media_type="application/json")

    def _order(self, prepared: GenerationRequest) -> BackgroundOrder:
        response, caller = self._record["response"], self._origin.caller
        (prompt,), (params,) = prepared.prompts, prepared.params
        parsing = params.parsing
        formats = OutputFormats() if parsing is None else parsing.formats
        return BackgroundOrder(
            id=response["id"],
            owner=owner_of(caller.key),
            key=caller.key,
            request_id=self._origin.request_id,
            routing_key=params.routing_key,
            created_at=response["created_at"],
            ends_at=response["created_at"] + self._background.timeout_s,
            model=prepared.model.name,
            asked=self._parsed.model_dump(mode="json", exclude_unset=True),
            rendered_end=prompt.rendered_end,
            context_bytes=self._context_bytes,
            tokenizer=prepared.model.tokenizer,
            formats=[formats.tools, formats.reasoning],
            reasoning_marks=[] if parsing is None else list(parsing.reasoning_marks),
            context_len=prepared.model.context_len,
            defaults=prepared.model.defaults.as_dict(),
        )
