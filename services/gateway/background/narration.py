"""What a worker says of one response, taken as it comes, told as events and written piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from services.gateway.background.journal import PIECE_S, Journal, held
from services.gateway.background.story import Json, Story
from services.gateway.http.renderer import Narrator
from services.gateway.http.sse_comments import Silence
from services.gateway.request.choice_output import WeightsName
from services.gateway.request.errors import ApiError
from services.gateway.request.request import Choice, ClientRequest, Phase
from services.gateway.state.background_past import BackgroundPast, pages
from services.gateway.state.background_record import Kept, Status, Stored
from services.gateway.state.lease import LeaseLost

LOOK_S = 0.5  # at whether a worker has it


class Narration(Narrator):
    """Behind what is stored. record: what is kept of it once it is over. computed_by: what a choice's output is of. open: before
    anything is told; raises LeaseLost, ApiError. After narrate(): is_over, or is_lost: somebody else has the response."""

    def __init__(
        self,
        story: Story,
        journal: Journal,
        record: Callable[[Json], Awaitable[Kept]],
        stored: Stored,
        computed_by: Callable[[Choice], tuple[WeightsName | None, str]],
        open: Callable[[], Awaitable[None]],
    ) -> None:
        self._story = story
        self._journal = journal
        self._record = record
        self._computed_by = computed_by
        self._begun = stored.status is Status.IN_PROGRESS
        self._past = stored.past if stored.pieces else None
        self._open = open
        self._unwritten: list[bytes] = []  # of an answer that has ended, whose last text is to come
        self.is_over = self.is_lost = False

    async def narrate(self, request: ClientRequest) -> None:
        silence = Silence(LOOK_S, request.nudge)
        try:
            if self._past is not None:
                await self._catch_up(self._past)
            await self._open()
            while not self.is_over:
                await self._begin(request)
                await request.news()
                silence.said()
                await self._take(request)
        except LeaseLost:
            self.is_lost = True
            raise ApiError(503, "Another gateway goes on with the response.", code="lease_lost") from None
        finally:
            silence.end()

    async def _catch_up(self, past: BackgroundPast) -> None:
        async for events in pages(lambda first: held(lambda: past.events(first))):
            self._story.restore(events, ())
        async for texts in pages(lambda first: held(lambda: past.texts(first))):
            self._story.restore((), texts)

    async def _begin(self, request: ClientRequest) -> None:
        """Told once a worker has it."""
        if not self._begun and request.phase is not Phase.TOKENIZED:
            self._begun = True
            await self._journal.tell(self._story.begins(), Status.IN_PROGRESS)

    async def _take(self, request: ClientRequest) -> None:
        (choice,) = request.choices
        delta = choice.take()
        if delta is None:
            return
        said, computed_by = self._journal.said(choice), self._computed_by(choice)
        has_ended = choice.output.verdict is not None
        await self._begin(request)
        events = [*self._unwritten, *await self._story.of(delta)]
        if delta.ending is not None:
            response, last = self._story.ending()
            await self._finish(response, [*events, *last])
        elif has_ended:  # nobody could go on behind its last token: what is written ends before it
            self._unwritten = events
        else:
            await self._journal.add(said, delta.text, events, computed_by)
            await asyncio.sleep(PIECE_S)

    async def _finish(self, response: Json, events: list[bytes]) -> None:
        record = partial(self._record, response)
        await self._journal.finish(Status(response["status"]), record, events)
        self.is_over = True
