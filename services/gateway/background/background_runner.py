"""Keeps the leases of the responses that this gateway has at work, and takes over those that nobody has any more.

At its drain a gateway leaves its responses at once: others go on with the tokens that are there, and workers have the prefix
cached. To wait for the end of what may take an hour would gain nothing, and what is not done by then would be left anyway.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.request.errors import ApiError, unavailable
from services.gateway.state.background_record import BackgroundOrder
from services.gateway.state.background_store import BackgroundStore
from services.gateway.state.lease import Lease, LeaseLost
from services.gateway.state.state_store import StoreAway
from services.shared.observe.log import fields

logger = logging.getLogger(__name__)

LOOK_S = 0.5  # at what there is to do, and at what is over or cancelled; leases are kept as often
SEEN = 1000  # of those that nobody has
LEAVE_S = 1.0  # for ending work and giving leases back


class Run(Protocol):
    """One response, at work. opened: once it is kept, or the error for which it is not; is_kept: it is. What it does raises
    LeaseLost, StoreAway."""

    lease: Lease
    order: BackgroundOrder
    opened: asyncio.Future[None]

    @property
    def is_kept(self) -> bool: ...

    async def begin(self) -> None:
        """A client's request, until it is over."""

    async def resume(self) -> None:
        """What is stored, until it is over."""


class BackgroundRunner:
    """taken: makes a run of what is stored. most: responses at once, those that wait for a worker among them. is_ready: this
    gateway could serve one."""

    def __init__(
        self,
        store: BackgroundStore,
        taken: Callable[[Lease, BackgroundOrder], Run],
        most: int,
        is_ready: Callable[[], bool],
        retry_after_s: int,
        metrics: GatewayMetrics,
    ) -> None:
        self._store = store
        self._taken = taken
        self._most = most
        self._is_ready = is_ready
        self._retry_after_s = retry_after_s
        self._metrics = metrics
        self._runs: dict[Run, asyncio.Task[None]] = {}
        self._left: dict[Lease, BackgroundOrder] = {}  # that the store is still to be told of
        self._stopping = False
        self._is_away = False
        metrics.watch_background(lambda: len(self._runs))

    async def run(self) -> None:
        """Until cancelled; what is unfinished then goes on elsewhere."""
        try:
            while True:
                await self._look()
                await asyncio.sleep(LOOK_S)
        finally:
            await self.drain()

    async def begin(self, run: Run) -> None:
        """Returns once it is kept. Raises ApiError."""
        self._start(run, run.begin())
        try:
            await asyncio.shield(run.opened)
        except asyncio.CancelledError:
            if run.opened.cancelled():
                raise self._shutting_down() from None
            raise

    def _start(self, run: Run, work: Coroutine[Any, Any, None]) -> None:
        self._runs[run] = asyncio.create_task(work)
        self._runs[run].add_done_callback(lambda task: self._ended(run, task))

    def check_room(self) -> None:
        """Raises ApiError."""
        if self._stopping:
            raise self._shutting_down()
        if len(self._runs) >= self._most:
            raise unavailable("Too many responses are in the background.", self._retry_after_s, "queue_full")

    def _shutting_down(self) -> ApiError:
        return unavailable("The server is shutting down.", self._retry_after_s, "shutting_down")

    async def drain(self) -> None:
        """All that it has is left to others. Again: no effect."""
        self._stopping = True
        runs = dict(self._runs)
        for task in runs.values():
            task.cancel()
        with suppress(StoreAway, TimeoutError):  # leases run out by themselves
            async with asyncio.timeout(LEAVE_S):
                if runs:
                    await asyncio.wait(runs.values())
                await self._leave()

    async def _look(self) -> None:
        try:
            await self._keep()
            await self._leave()
            if not self._stopping and len(self._runs) < self._most and self._is_ready():
                await self._find()
        except StoreAway as away:
            if not self._is_away:
                logger.warning("responses in the background wait for the store: %s", away)
            self._is_away = True
        else:
            self._is_away = False

    async def _keep(self) -> None:
        kept = {run.lease: run for run in self._runs if run.is_kept}
        for lease in await self._store.keep({lease: run.order for lease, run in kept.items()}):
            task = self._runs.get(kept[lease])
            if task is not None:
                logger.info("a response in the background is over, or another gateway's", extra=_about(kept[lease]))
                task.cancel()

    async def _leave(self) -> None:
        for lease, order in list(self._left.items()):
            await self._store.leave(lease, order)
            del self._left[lease]

    async def _find(self) -> None:
        mine = {(run.order.owner, run.order.id) for run in self._runs}
        for owner, response_id in await self._store.free(SEEN):
            if self._stopping or len(self._runs) >= self._most:
                return
            if (owner, response_id) not in mine:
                await self._take(owner, response_id)

    async def _take(self, owner: str, response_id: str) -> None:
        lease = await self._store.take(owner, response_id)
        if lease is None:
            return
        stored = await self._store.read(owner, response_id)
        if stored is None:
            return
        run = self._taken(lease, stored.order)
        logger.info("goes on with a response in the background", extra=_about(run))
        self._metrics.background_takeovers.inc()
        self._start(run, run.resume())

    def _ended(self, run: Run, task: asyncio.Task[None]) -> None:
        """After a fault its lease is left to run out: so the next try, here or elsewhere, is not at once."""
        del self._runs[run]
        is_kept = run.is_kept
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or isinstance(error, StoreAway):
            if is_kept:
                self._left[run.lease] = run.order
        elif isinstance(error, LeaseLost):
            logger.info("a response in the background is over, or another gateway's", extra=_about(run))
        elif error is not None:
            logger.error("a response in the background has met a fault", extra=_about(run), exc_info=error)


def _about(run: Run) -> dict[str, Any]:
    return fields(response=run.order.id)
