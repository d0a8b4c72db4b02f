"""What is written of one response while it is made: everything that a client may see is in the store first.

A piece is what has come since the piece before, at most one each PIECE_S: a token costs its bytes, and a tenth of a second is
what a stream is behind. While the store is away a piece waits, and what the worker says meanwhile waits behind it, for HOLD_S;
then the try ends, and what was not written is computed again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.request.choice_output import WeightsName
from services.gateway.request.errors import ApiError
from services.gateway.request.request import Choice
from services.gateway.state.background_record import BackgroundOrder, Kept, Piece, Status, Stored
from services.gateway.state.background_store import BackgroundStore, Room
from services.gateway.state.lease import Lease, LeaseLost
from services.gateway.state.state_store import StoreAway
from services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

T = TypeVar("T")
PIECE_S = 0.1
HOLD_S = 60.0
PAUSE_S = 0.2
TURNS, TURN_S = 16, 0.1  # of writers of its conversation, which may meet, and the longest pause of one that has met another
STORE_AWAY = "store_unavailable"

_REFUSED = {
    Room.STORE_FULL: ("What may be kept for this API key has no room for the response.", "store_full"),
    Room.TOO_LARGE: ("The response is larger than what can be kept of one.", "response_too_large"),
}


@dataclass(frozen=True, slots=True)
class Said:
    """What a choice has said since the last piece, at the moment in which its text is taken."""

    offset: int
    ids: bytes
    logprobs: bytes
    decoded: int
    chars: int
    shown: int


class Journal:
    """Of one response, for as long as its lease is held. wrote: called after each piece. is_finishing: its end is being written,
    or has been. Every method that writes raises LeaseLost, and ApiError where there is no room or no store."""

    def __init__(
        self, store: BackgroundStore, lease: Lease, stored: Stored, wrote: Callable[[], None], metrics: GatewayMetrics
    ) -> None:
        self._store = store
        self._lease = lease
        self._order: BackgroundOrder = stored.order
        self._pieces = stored.pieces
        self._ids = stored.past.lengths.ids
        self._place = (stored.decoded, stored.chars, stored.shown)
        self._wrote = wrote
        self._metrics = metrics
        self.is_finishing = False

    def said(self, choice: Choice) -> Said:
        """Right after a take()."""
        output, offset = choice.output, self._ids
        rows = output.logprobs.rows(offset).SerializeToString() if choice.generation.wants_logprobs else b""
        return Said(offset, array("I", output.ids[offset:]).tobytes(), rows, *choice.text.place)

    async def tell(self, events: Sequence[bytes], status: Status) -> None:
        """What no token says."""
        decoded, chars, shown = self._place
        await self._write(Piece(self._pieces + 1, status, events, self._ids, decoded=decoded, chars=chars, shown=shown))

    async def add(self, said: Said, text: str, events: Sequence[bytes], computed_by: tuple[WeightsName | None, str]) -> None:
        weights, numerics = computed_by
        place = (said.decoded, said.chars, said.shown)
        await self._write(
            Piece(
                self._pieces + 1,
                Status.IN_PROGRESS,
                events,
                said.offset,
                said.ids,
                text,
                said.logprobs,
                *place,
                weights,
                numerics,
            )
        )
        self._ids = said.offset + len(said.ids) // array("I").itemsize
        self._place = place

    async def finish(self, status: Status, record: Callable[[], Awaitable[Kept]], events: Sequence[bytes]) -> None:
        """It is over. record: what is kept of it; raises ApiError."""
        kept = await held(record)
        self.is_finishing = True
        try:
            for _ in range(TURNS):
                if await held(partial(self._finished, status, kept, events)):
                    break
                await asyncio.sleep(random.uniform(0.0, TURN_S))
                kept = await held(record)
            else:
                logger.warning("a conversation is not extended: others write to it", extra=fields(response=self._order.id))
                await held(partial(self._finished, status, Kept(kept.record), events))
        except BaseException:
            self.is_finishing = False
            raise
        self._metrics.background_responses.labels(status.value).inc()
        self._wrote()

    async def _finished(self, status: Status, kept: Kept, events: Sequence[bytes]) -> bool:
        return await self._store.finish(self._lease, self._order, self._pieces + 1, status, kept, events)

    async def _write(self, piece: Piece) -> None:
        room = await held(lambda: self._store.write(self._lease, self._order, piece))
        if room is not Room.YES:
            message, code = _REFUSED[room]
            raise ApiError(400, message, code=code)
        self._pieces = piece.number
        self._wrote()


async def held(call: Callable[[], Awaitable[T]]) -> T:
    """What the store says, if it is there in HOLD_S. Raises LeaseLost, ApiError."""
    loop = asyncio.get_running_loop()
    until = loop.time() + HOLD_S
    while True:
        try:
            return await call()
        except (StoreAway, ApiError) as error:
            if isinstance(error, ApiError) and error.code != STORE_AWAY:
                raise LeaseLost if error.status == 404 else error from None
            if loop.time() + PAUSE_S > until:
                raise ApiError(503, "What is kept cannot be reached just now.", code=STORE_AWAY) from None
        await asyncio.sleep(PAUSE_S)
