"""Writes the output of one background response to the store in pieces. A client sees only events that are stored.

A piece has the output since the previous piece. At most one piece is written per PIECE_S, so a stream lags by about 0.1 s. While
the store is unreachable, a piece waits for up to HOLD_S, and later output waits for the piece. After HOLD_S, the attempt ends,
and the next attempt computes the unwritten output again.
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

from rootstock_llm.services.gateway.background.ports import EventRenderer, Json
from rootstock_llm.services.gateway.generation.choice import Choice, Delta, EarlierOutput
from rootstock_llm.services.gateway.generation.errors import ApiError
from rootstock_llm.services.gateway.generation.request import GenerationRequest, ModelVersion
from rootstock_llm.services.gateway.generation.running import Phase, RunningRequest
from rootstock_llm.services.gateway.observe.metrics import GatewayMetrics
from rootstock_llm.services.gateway.remote.token_texts import TokenTexts
from rootstock_llm.services.gateway.service.sink import Silence, Sink
from rootstock_llm.services.gateway.store.background_past import BackgroundPast, pages
from rootstock_llm.services.gateway.store.background_record import BackgroundOrder, BackgroundStatus, FinalRecords, Piece, Stored
from rootstock_llm.services.gateway.store.background_store import BackgroundStore, WriteResult
from rootstock_llm.services.gateway.store.lease import Lease, LeaseLost
from rootstock_llm.services.gateway.store.state_store import StoreAway
from rootstock_llm.services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

T = TypeVar("T")
PIECE_S = 0.1  # seconds between two pieces
LOOK_S = 0.5  # seconds between two checks whether a worker has the response
HOLD_S = 60.0  # seconds for which a call of an unreachable store is retried
PAUSE_S = 0.2  # seconds between two attempts of a call
MAX_CONVERSATION_TRIES = 16  # attempts to extend a conversation that other requests extend at the same time
CONVERSATION_PAUSE_S = 0.1  # longest pause between two attempts to extend a conversation, in seconds
STORE_AWAY = "store_unavailable"

_REFUSED = {
    WriteResult.STORE_FULL: (
        "The store limit of this API key leaves no space for the response. Delete stored data.",
        "store_full",
    ),
    WriteResult.TOO_LARGE: ("The response is larger than a stored response may be. Ask for fewer tokens.", "response_too_large"),
}


@dataclass(frozen=True, slots=True)
class NewOutput:
    """The output of a choice since the last piece, without its text."""

    offset: int  # number of output ids in earlier pieces
    ids: bytes  # output ids, 4 bytes each
    logprobs: bytes  # LogprobRows of `ids`; empty if not requested
    decoded: int  # see EarlierOutput
    chars: int  # see EarlierOutput
    shown: int  # see EarlierOutput


class Journal:
    """The writer of one response's pieces during one attempt.

    Every method that writes raises LeaseLost if another gateway has the lease or the response was deleted, and ApiError if the
    store refuses the piece or is unreachable.
    """

    def __init__(
        self, store: BackgroundStore, lease: Lease, stored: Stored, wrote: Callable[[], None], metrics: GatewayMetrics
    ) -> None:
        """Continues after the stored pieces.

        Args:
            stored: State of the response, with the number of stored pieces.
            wrote: Called after each new piece is stored.
        """
        self._store = store
        self._lease = lease
        self._order: BackgroundOrder = stored.order
        self._pieces = stored.pieces
        self._ids = stored.past.lengths.ids
        self._place = (stored.decoded, stored.chars, stored.shown)
        self._wrote = wrote
        self._metrics = metrics
        self.is_finishing = False  # the end of the response is being written or is stored

    def new_output(self, choice: Choice) -> NewOutput:
        """Returns the output since the last piece. Must be called directly after the text of the choice was taken."""
        offset = self._ids
        rows = choice.logprobs.rows(offset).SerializeToString() if choice.params.wants_logprobs else b""
        return NewOutput(offset, array("I", choice.output_ids[offset:]).tobytes(), rows, *choice.taken)

    async def write_events(self, events: Sequence[bytes], status: BackgroundStatus) -> None:
        """Writes a piece with events but without tokens."""
        decoded, chars, shown = self._place
        await self._write(Piece(self._pieces + 1, status, events, self._ids, decoded=decoded, chars=chars, shown=shown))

    async def add(
        self, output: NewOutput, text: str, events: Sequence[bytes], computed_by: tuple[ModelVersion | None, str]
    ) -> None:
        weights, numerics = computed_by
        place = (output.decoded, output.chars, output.shown)
        await self._write(
            Piece(
                self._pieces + 1,
                BackgroundStatus.IN_PROGRESS,
                events,
                output.offset,
                output.ids,
                text,
                output.logprobs,
                *place,
                weights,
                numerics,
            )
        )
        self._ids = output.offset + len(output.ids) // array("I").itemsize
        self._place = place

    async def finish(
        self, status: BackgroundStatus, record: Callable[[], Awaitable[FinalRecords]], events: Sequence[bytes]
    ) -> None:
        """Writes the end of the response and its last events.

        Args:
            record: Returns the records to store. Called again if another request has changed the conversation. Raises ApiError.
        """
        kept = await with_store_retries(record)
        self.is_finishing = True
        try:
            for _ in range(MAX_CONVERSATION_TRIES):
                if await with_store_retries(partial(self._finished, status, kept, events)):
                    break
                await asyncio.sleep(random.uniform(0.0, CONVERSATION_PAUSE_S))
                kept = await with_store_retries(record)
            else:
                logger.warning(
                    "did not extend a conversation, because other requests write to it", extra=fields(response=self._order.id)
                )
                await with_store_retries(partial(self._finished, status, FinalRecords(kept.record), events))
        except BaseException:
            self.is_finishing = False
            raise
        self._metrics.background_responses.labels(status.value).inc()
        self._wrote()

    async def _finished(self, status: BackgroundStatus, kept: FinalRecords, events: Sequence[bytes]) -> bool:
        return await self._store.finish(self._lease, self._order, self._pieces + 1, status, kept, events)

    async def _write(self, piece: Piece) -> None:
        result = await with_store_retries(lambda: self._store.write(self._lease, self._order, piece))
        if result is not WriteResult.YES:
            message, code = _REFUSED[result]
            raise ApiError(400, message, code=code)
        self._pieces = piece.number
        self._wrote()


class JournalSink(Sink):
    """Writes the output of one attempt to the store, in pieces that follow the stored pieces."""

    def __init__(
        self,
        make_renderer: Callable[[RunningRequest, TokenTexts], EventRenderer],
        journal: Journal,
        record: Callable[[Json], Awaitable[FinalRecords]],
        stored: Stored,
        earlier: EarlierOutput | None,
        computed_by: Callable[[Choice], tuple[ModelVersion | None, str]],
        store: Callable[[], Awaitable[None]],
    ) -> None:
        """Begins one attempt.

        Args:
            make_renderer: Makes the renderer of the response's events.
            record: Returns the records of the complete response.
            stored: State of the response before this attempt.
            earlier: Output of earlier attempts; None if they have no token.
            computed_by: Returns the model version and numerics of a choice's output.
            store: Stores the response before its first event. Raises LeaseLost, ApiError.
        """
        self.running: RunningRequest | None = None  # the request of this attempt, or None until the service has opened it
        self.failure: ApiError | None = None
        self.is_over = False  # the response is complete and stored
        self.is_lost = False  # another gateway has the lease
        self._make_renderer = make_renderer
        self._renderer: EventRenderer | None = None
        self._journal = journal
        self._record = record
        self._earlier = earlier
        self._computed_by = computed_by
        self._store = store
        self._has_begun = stored.status is BackgroundStatus.IN_PROGRESS
        self._past = stored.past if stored.pieces else None
        self._unwritten: list[bytes] = []  # events of an ended choice that wait for the last text of the choice
        self._silence: Silence | None = None

    def open(self, running: RunningRequest) -> None:
        self.running = running

    async def begin(self, prepared: GenerationRequest, texts: TokenTexts) -> bool:
        assert self.running is not None
        (choice,) = self.running.choices
        if self._earlier is not None:
            choice.resume(self._earlier)
        self._renderer = self._make_renderer(self.running, texts)
        self._silence = Silence(LOOK_S, self.running.nudge)
        return True

    async def queued(self) -> None:
        with self._lease():
            if self._past is not None:
                await self._restore(self._past)
            await self._store()
            await self._begin_events()

    async def take(self, deltas: Sequence[Delta], more: bool) -> None:
        assert self._renderer is not None and self._silence is not None
        self._silence.restart()
        with self._lease():
            if not deltas:
                await self._begin_events()
                return
            (delta,) = deltas
            choice = delta.choice
            output, computed_by = self._journal.new_output(choice), self._computed_by(choice)
            has_ended = choice.worker_ending is not None
            await self._begin_events()
            events = [*self._unwritten, *await self._renderer.of(delta)]
            if delta.ending is not None:
                response, last = self._renderer.ending()
                record = partial(self._record, response)
                await self._journal.finish(BackgroundStatus(response["status"]), record, [*events, *last])
                self.is_over = True
            elif has_ended:  # the last token is written with the end: no gateway could resume a choice that has all its tokens
                self._unwritten = events
            else:
                await self._journal.add(output, delta.text, events, computed_by)
                await asyncio.sleep(PIECE_S)

    async def end(self) -> None:
        """Writes nothing, because take() has written the end with the last delta."""

    async def fail(self, error: ApiError) -> None:
        self.failure = error

    def released(self, running: RunningRequest) -> None:
        if self._silence is not None:
            self._silence.end()

    async def _restore(self, past: BackgroundPast) -> None:
        assert self._renderer is not None
        async for events in pages(lambda first: with_store_retries(lambda: past.events(first))):
            self._renderer.restore(events, ())
        async for texts in pages(lambda first: with_store_retries(lambda: past.texts(first))):
            self._renderer.restore((), texts)

    async def _begin_events(self) -> None:
        """Writes the first events if the request has been sent to a worker and these events are not written yet."""
        assert self.running is not None and self._renderer is not None
        if not self._has_begun and self.running.phase is not Phase.TOKENIZED:
            self._has_begun = True
            await self._journal.write_events(self._renderer.begins(), BackgroundStatus.IN_PROGRESS)

    @contextmanager
    def _lease(self) -> Iterator[None]:
        """If the body of the `with` statement raises LeaseLost, raises an ApiError instead, which ends the request."""
        try:
            yield
        except LeaseLost:
            self.is_lost = True
            raise ApiError(503, "Another gateway continues the response.", code="lease_lost") from None


async def with_store_retries(call: Callable[[], Awaitable[T]]) -> T:
    """Returns the result of a call of the store. Retries for HOLD_S while the store is unreachable.

    Raises:
        LeaseLost: Another gateway has the lease, or the response was deleted.
        ApiError: The call was refused, or the store stays unreachable (STORE_AWAY).
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + HOLD_S
    while True:
        try:
            return await call()
        except (StoreAway, ApiError) as error:
            if isinstance(error, ApiError) and error.code != STORE_AWAY:
                raise LeaseLost if error.status == 404 else error from None
            if loop.time() + PAUSE_S > until:
                raise ApiError(503, "The store cannot be reached. Retry later.", code=STORE_AWAY) from None
        await asyncio.sleep(PAUSE_S)
