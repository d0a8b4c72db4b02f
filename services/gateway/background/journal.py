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
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from services.gateway.background.ports import Json, Story
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.peers.token_texts import ModelTexts
from services.gateway.request.choice import Choice, Delta, EarlierOutput
from services.gateway.request.errors import ApiError
from services.gateway.request.generation import ModelVersion, Plan
from services.gateway.request.request import Phase, RunningRequest
from services.gateway.request.silence import Silence
from services.gateway.service.sink import Sink
from services.gateway.state.background_past import BackgroundPast, pages
from services.gateway.state.background_record import BackgroundOrder, BackgroundStatus, Kept, Piece, Stored
from services.gateway.state.background_store import BackgroundStore, Room
from services.gateway.state.lease import Lease, LeaseLost
from services.gateway.state.state_store import StoreAway
from services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

T = TypeVar("T")
PIECE_S = 0.1
LOOK_S = 0.5  # seconds between two looks whether a worker has the response
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
        offset = self._ids
        rows = choice.logprobs.rows(offset).SerializeToString() if choice.generation.wants_logprobs else b""
        return Said(offset, array("I", choice.output_ids[offset:]).tobytes(), rows, *choice.taken)

    async def tell(self, events: Sequence[bytes], status: BackgroundStatus) -> None:
        """What no token says."""
        decoded, chars, shown = self._place
        await self._write(Piece(self._pieces + 1, status, events, self._ids, decoded=decoded, chars=chars, shown=shown))

    async def add(self, said: Said, text: str, events: Sequence[bytes], computed_by: tuple[ModelVersion | None, str]) -> None:
        weights, numerics = computed_by
        place = (said.decoded, said.chars, said.shown)
        await self._write(
            Piece(
                self._pieces + 1,
                BackgroundStatus.IN_PROGRESS,
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

    async def finish(self, status: BackgroundStatus, record: Callable[[], Awaitable[Kept]], events: Sequence[bytes]) -> None:
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

    async def _finished(self, status: BackgroundStatus, kept: Kept, events: Sequence[bytes]) -> bool:
        return await self._store.finish(self._lease, self._order, self._pieces + 1, status, kept, events)

    async def _write(self, piece: Piece) -> None:
        room = await held(lambda: self._store.write(self._lease, self._order, piece))
        if room is not Room.YES:
            message, code = _REFUSED[room]
            raise ApiError(400, message, code=code)
        self._pieces = piece.number
        self._wrote()


class JournalSink(Sink):
    """Writes the output of one try of a response to the store, piece by piece, behind what is stored of it."""

    def __init__(
        self,
        make_story: Callable[[RunningRequest, ModelTexts], Story],
        journal: Journal,
        record: Callable[[Json], Awaitable[Kept]],
        stored: Stored,
        earlier: EarlierOutput | None,
        computed_by: Callable[[Choice], tuple[ModelVersion | None, str]],
        store: Callable[[], Awaitable[None]],
    ) -> None:
        """Begins one try.

        Args:
            record: Returns the record of the complete response.
            earlier: Output of earlier tries; None if there is none.
            computed_by: Returns the model version and numerics of a choice's output.
            store: Stores the response before its first event. Raises LeaseLost, ApiError.
        """
        self.running: RunningRequest | None = None  # None until the service has opened the request
        self.failure: ApiError | None = None
        self.is_over = False  # the response is complete and stored
        self.is_lost = False  # another gateway has the lease
        self._make_story = make_story
        self._story: Story | None = None
        self._journal = journal
        self._record = record
        self._earlier = earlier
        self._computed_by = computed_by
        self._store = store
        self._has_begun = stored.status is BackgroundStatus.IN_PROGRESS
        self._past = stored.past if stored.pieces else None
        self._unwritten: list[bytes] = []  # events of a choice that has ended, whose last text is to come
        self._silence: Silence | None = None

    def open(self, running: RunningRequest) -> None:
        self.running = running

    async def begin(self, plan: Plan, texts: ModelTexts) -> bool:
        assert self.running is not None
        (choice,) = self.running.choices
        if self._earlier is not None:
            choice.resume(self._earlier)
        self._story = self._make_story(self.running, texts)
        self._silence = Silence(LOOK_S, self.running.nudge)
        return True

    async def queued(self) -> None:
        with self._lease():
            if self._past is not None:
                await self._restore(self._past)
            await self._store()
            await self._begin_events()

    async def take(self, deltas: Sequence[Delta], more: bool) -> None:
        assert self._story is not None and self._silence is not None
        self._silence.said()
        with self._lease():
            if not deltas:
                await self._begin_events()
                return
            (delta,) = deltas
            choice = delta.choice
            said, computed_by = self._journal.said(choice), self._computed_by(choice)
            has_ended = choice.worker_ending is not None
            await self._begin_events()
            events = [*self._unwritten, *await self._story.of(delta)]
            if delta.ending is not None:
                response, last = self._story.ending()
                record = partial(self._record, response)
                await self._journal.finish(BackgroundStatus(response["status"]), record, [*events, *last])
                self.is_over = True
            elif has_ended:  # no gateway could go on behind the last token: what is written ends before it
                self._unwritten = events
            else:
                await self._journal.add(said, delta.text, events, computed_by)
                await asyncio.sleep(PIECE_S)

    async def end(self) -> None:
        """The last delta has written the end."""

    async def fail(self, error: ApiError) -> None:
        self.failure = error

    def released(self, running: RunningRequest) -> None:
        if self._silence is not None:
            self._silence.end()

    async def _restore(self, past: BackgroundPast) -> None:
        assert self._story is not None
        async for events in pages(lambda first: held(lambda: past.events(first))):
            self._story.restore(events, ())
        async for texts in pages(lambda first: held(lambda: past.texts(first))):
            self._story.restore((), texts)

    async def _begin_events(self) -> None:
        """Writes the first events once a worker has the response."""
        assert self.running is not None and self._story is not None
        if not self._has_begun and self.running.phase is not Phase.TOKENIZED:
            self._has_begun = True
            await self._journal.tell(self._story.begins(), BackgroundStatus.IN_PROGRESS)

    @contextmanager
    def _lease(self) -> Iterator[None]:
        """Ends the request if another gateway has the response."""
        try:
            yield
        except LeaseLost:
            self.is_lost = True
            raise ApiError(503, "Another gateway goes on with the response.", code="lease_lost") from None


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
