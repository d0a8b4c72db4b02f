"""A request of the Responses API that goes on in the background, and who has it there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import orjson
from starlette.responses import Response

from services.gateway.api.responses.output import numbered
from services.gateway.api.responses.stream import FollowedStream
from services.gateway.api.responses.types import ResponsesRequest
from services.gateway.background.follow import Follow
from services.gateway.request.caller import Caller
from services.gateway.request.errors import ApiError
from services.gateway.request.generation import Plan
from services.gateway.request.origin import Origin
from services.gateway.request.request import KeyAdmission
from services.gateway.service.sink import Detached, Respond
from services.gateway.state.background_record import BackgroundOrder, BackgroundStatus
from services.gateway.state.owner import owner_of
from services.shared.limits import MAX_RECORD_BYTES
from services.shared.output_formats import OutputFormats

Json = dict[str, Any]

_MOST_ASKED_BYTES = MAX_RECORD_BYTES - (64 << 10)  # its end, and what becomes of it, have room beside it


class Background(Protocol):
    """takes_any: responses. timeout_s: seconds in which one is over. Every method raises ApiError."""

    takes_any: bool
    timeout_s: int

    async def begin(
        self,
        order: BackgroundOrder,
        record: bytes,
        plan: Plan,
        caller: Caller,
        admission: KeyAdmission | None,
        events: Sequence[bytes],
    ) -> None:
        """Returns once it is kept. The admission has ended where it is not. record: what is kept of it until it is over."""

    async def status(self, owner: str, response_id: str) -> BackgroundStatus | None:
        """None: nothing is known of it but what is kept of every response."""

    async def stream(self, owner: str, response_id: str, after: int) -> Follow:
        """Its events behind that sequence number, -1 for all; unless too many streams are open."""

    def own_stream(self, owner: str, response_id: str) -> Follow:
        """All its events, for who has just asked for it."""

    async def cancel(self, owner: str, response_id: str) -> None:
        """Returns once it is over, as cancelled or as it was."""

    async def delete(self, owner: str, response_id: str) -> bool:
        """Of any response that is kept, which is cancelled by it. Whether there was one."""


class DetachedCall(Detached):
    """streams: its client wants its events. record: what is kept of it. context_bytes: of the responses before it."""

    def __init__(
        self,
        background: Background,
        origin: Origin,
        asked: ResponsesRequest,
        streams: bool,
        record: Json,
        context_bytes: int,
    ) -> None:
        self._background = background
        self._origin = origin
        self._asked = asked
        self._streams = streams
        self._record = record
        self._context_bytes = context_bytes

    async def detach(self, plan: Plan, admission: KeyAdmission | None) -> Respond:
        response, owner = self._record["response"], owner_of(self._origin.caller.key)
        try:
            events = numbered(({"type": f"response.{kind}", "response": response} for kind in ("created", "queued")), 0)
            record, order = orjson.dumps(self._record), self._order(plan)
            if max(len(record), len(order.dumped())) > _MOST_ASKED_BYTES:
                message = f"A response in the background may be asked for with {_MOST_ASKED_BYTES} bytes."
                raise ApiError(413, message, param="background", code="request_too_large")
        except BaseException:
            if admission is not None:
                admission.end(0)
            raise
        await self._background.begin(order, record, plan, self._origin.caller, admission, events)
        if self._streams:
            return FollowedStream(self._background.own_stream(owner, response["id"]))
        return Response(orjson.dumps(response), media_type="application/json")

    def _order(self, plan: Plan) -> BackgroundOrder:
        response, caller, (part,) = self._record["response"], self._origin.caller, plan.parts
        parsing = part.generation.parsing
        formats = OutputFormats() if parsing is None else parsing.formats
        return BackgroundOrder(
            id=response["id"],
            owner=owner_of(caller.key),
            key=caller.key,
            request_id=self._origin.request_id,
            routing_key=part.generation.routing_key,
            created_at=response["created_at"],
            ends_at=response["created_at"] + self._background.timeout_s,
            model=plan.model.name,
            asked=self._asked.model_dump(mode="json", exclude_unset=True),
            rendered_end=part.prompt.rendered_end,
            context_bytes=self._context_bytes,
            tokenizer=plan.model.tokenizer,
            formats=[formats.tools, formats.reasoning],
            reasoning_marks=[] if parsing is None else list(parsing.reasoning_marks),
            context_len=plan.model.context_len,
            defaults=plan.model.defaults.as_dict(),
        )
