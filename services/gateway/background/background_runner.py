"""Keeps the leases of the responses that this gateway has at work, and takes over those that nobody has any more.

At its drain a gateway leaves its responses at once: others go on with the tokens that are there, and workers have the prefix
cached. To wait for the end of what may take an hour would gain nothing, and what is not done by then would be left anyway.

While the store is away leases run out. Those who have them are well and keep them once it is back: so for as long as a lease
lasts only what was left to others is taken.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.request.errors import ApiError, unavailable
from services.gateway.state.background_record import BackgroundOrder, BackgroundStatus
from services.gateway.state.background_store import BackgroundStore
from services.gateway.state.lease import Lease, LeaseLost
from services.gateway.state.state_store import StoreAway
from services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

LOOK_S = 0.5  # at what there is to do, and at what is over or cancelled; leases are kept as often
SEEN = 1000  # of those that nobody has
MOST_TAKEN = 8  # at a look: other gateways may have room, too
MOST_IN_DOUBT = 4096
SLOW_S = 1.0  # a call that took longer has waited for the store
LEAVE_S = 1.0  # for ending work and giving leases back


class Run(Protocol):
    """One response, at work. opened: once it is kept, or the error for which it is not; is_kept: it is; is_in_doubt: it is not,
    as far as is known, and yet the store may have it. is_finishing: its end is being written. What it does raises LeaseLost,
    StoreAway."""

    lease: Lease
    order: BackgroundOrder
    opened: asyncio.Future[None]
    is_in_doubt: bool

    @property
    def is_kept(self) -> bool: ...

    @property
    def is_finishing(self) -> bool: ...

    async def begin(self) -> None:
        """A client's request, until it is over."""

    async def resume(self) -> None:
        """What is stored, until it is over."""

    def close(self) -> None:
        """Behind either, also where it was cancelled before its first step."""


class BackgroundRunner:
    """taken: makes a run of what is stored. given_up: makes the record of one that nobody can read or end, by owner and id. most:
    responses at once, those that wait for a worker among them. is_ready: this gateway could serve one."""

    def __init__(
        self,
        store: BackgroundStore,
        taken: Callable[[Lease, BackgroundOrder], Run],
        given_up: Callable[[str, str], Awaitable[bytes]],
        most: int,
        is_ready: Callable[[], bool],
        retry_after_s: int,
        metrics: GatewayMetrics,
    ) -> None:
        self._store = store
        self._taken = taken
        self._given_up = given_up
        self._most = most
        self._is_ready = is_ready
        self._retry_after_s = retry_after_s
        self._metrics = metrics
        self._runs: dict[Run, asyncio.Task[None]] = {}
        # What the store is still to be told of: owner and id of those that are left, and of those whose client was refused.
        self._left: dict[Lease, tuple[str, str]] = {}
        self._in_doubt: dict[tuple[str, str], None] = {}
        self._stopping = False
        self._quiet_until = 0.0
        metrics.watch_background(lambda: len(self._runs))

    async def run(self) -> None:
        """Until cancelled; what is unfinished then goes on elsewhere."""
        try:
            async with asyncio.TaskGroup() as tasks:  # however long a look takes, leases are kept
                tasks.create_task(self._repeat(self._keep))
                tasks.create_task(self._repeat(self._look))
        finally:
            await self.drain()

    async def _repeat(self, work: Callable[[], Awaitable[None]]) -> None:
        is_away = False  # of this work: one that has nothing to ask does not find out
        while True:
            try:
                await work()
            except StoreAway as away:
                self._missed_it()
                if not is_away:
                    logger.warning("responses in the background wait for the store: %s", away)
                is_away = True
            else:
                is_away = False
            await asyncio.sleep(LOOK_S)

    def _missed_it(self) -> None:
        self._quiet_until = asyncio.get_running_loop().time() + self._store.lease_s + LOOK_S

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
                await self._tell()

    async def _look(self) -> None:
        await self._tell()
        if not self._stopping and len(self._runs) < self._most and self._is_ready():
            await self._find()

    async def _keep(self) -> None:
        kept = {run.lease: run for run in self._runs if run.is_kept}
        for lease in await self._store.keep({lease: run.order for lease, run in kept.items()}):
            run = kept[lease]
            task = self._runs.get(run)
            if task is not None and not run.is_finishing:  # it may have written its end, or it learns of its loss there
                logger.info("a response in the background is over, or another gateway's", extra=_about(run))
                task.cancel()

    async def _tell(self) -> None:
        """Two may do so at once."""
        while self._left:
            lease, of = self._left.popitem()
            try:
                await self._store.leave(lease, *of)
            except BaseException:
                self._left[lease] = of
                raise
        while self._in_doubt:
            of, _ = self._in_doubt.popitem()
            try:
                await self._store.delete(*of)
            except BaseException:
                self._in_doubt[of] = None
                raise

    async def _find(self) -> None:
        loop = asyncio.get_running_loop()
        mine = {(run.order.owner, run.order.id) for run in self._runs}
        asked = loop.time()
        found = await self._store.free(SEEN, left=asked < self._quiet_until)
        if loop.time() - asked > SLOW_S:
            self._missed_it()
            return
        for owner, response_id in [each for each in found if each not in mine][:MOST_TAKEN]:
            if self._stopping or len(self._runs) >= self._most:
                return
            await self._take(owner, response_id)

    async def _take(self, owner: str, response_id: str) -> None:
        """One that cannot be read stays taken until its lease has run out: so the next try is not at once."""
        lease = await self._store.take(owner, response_id)
        if lease is None:
            return
        try:
            order = await self._store.order(lease, owner, response_id)
            if order is None:
                await self._give_up(lease, owner, response_id)
                return
        except LeaseLost:
            return
        except (StoreAway, asyncio.CancelledError):
            self._left[lease] = (owner, response_id)
            raise
        except Exception:
            logger.exception("a response in the background cannot be read", extra=fields(response=response_id))
            return
        if self._stopping:
            self._left[lease] = (owner, response_id)
        else:
            run = self._taken(lease, order)
            logger.info("goes on with a response in the background", extra=_about(run))
            self._metrics.background_takeovers.inc()
            self._start(run, run.resume())

    async def _give_up(self, lease: Lease, owner: str, response_id: str) -> None:
        """By who has its lease: it has failed. A record that cannot be read stays as it is. Raises LeaseLost, StoreAway."""
        logger.error("a response in the background is given up", extra=fields(response=response_id))
        try:
            record = await self._given_up(owner, response_id)
        except ApiError as error:
            if error.status != 404:
                raise StoreAway(error.message) from None
            record = b""  # it has expired
        except (ValueError, TypeError, LookupError):
            logger.exception("the record of a response cannot be read", extra=fields(response=response_id))
            record = b""
        await self._store.give_up(lease, owner, response_id, record)
        self._metrics.background_responses.labels(BackgroundStatus.FAILED.value).inc()

    def _ended(self, run: Run, task: asyncio.Task[None]) -> None:
        """After a fault its lease is left to run out: so the next try, here or elsewhere, is not at once."""
        del self._runs[run]
        run.close()
        of, is_kept = (run.order.owner, run.order.id), run.is_kept
        error = None if task.cancelled() else task.exception()
        if run.is_in_doubt and len(self._in_doubt) < MOST_IN_DOUBT:  # while it is away for long, none of them has got there
            self._in_doubt[of] = None
        if task.cancelled() or isinstance(error, StoreAway):
            if is_kept:
                self._left[run.lease] = of
        elif isinstance(error, LeaseLost):
            logger.info("a response in the background is over, or another gateway's", extra=_about(run))
        elif error is not None:
            logger.error("a response in the background has met a fault", extra=_about(run), exc_info=error)


def _about(run: Run) -> dict[str, Any]:
    return fields(response=run.order.id)
