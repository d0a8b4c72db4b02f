"""Renews the leases of the background responses that this gateway runs, and takes over responses whose lease is free.

A draining gateway releases its responses at once. Other gateways continue them after the stored tokens, whose prefix the workers
have cached. The gateway does not wait for them, because a response may take an hour.

While the store is unreachable, leases expire although their gateways are healthy. These gateways renew their leases when the
store is back. So for the duration of a lease after an outage, this gateway takes only responses that a gateway has released.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

from rootstock_llm.services.gateway.generation.errors import ApiError, internal, unavailable
from rootstock_llm.services.gateway.observe.metrics import GatewayMetrics
from rootstock_llm.services.gateway.store.background_record import BackgroundOrder, BackgroundStatus
from rootstock_llm.services.gateway.store.background_store import BackgroundStore
from rootstock_llm.services.gateway.store.lease import Lease, LeaseLost
from rootstock_llm.services.gateway.store.state_store import StoreAway
from rootstock_llm.services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

LOOK_S = 0.5  # seconds between two searches for responses, and between two renewals of the leases
SEEN = 1000  # largest number of responses without a lease that one search reads
MAX_TAKEN = 8  # largest number of responses that one search takes over; other gateways get the others
MAX_IN_DOUBT = 4096  # largest number of responses that wait for their deletion
SLOW_S = 1.0  # seconds after which a call counts as delayed by an unreachable store
LEAVE_S = 1.0  # seconds in which a draining gateway ends its work and releases its leases


class Run(Protocol):
    """The work of this gateway on one response. Ends after begin() or resume(), and close()."""

    lease: Lease
    order: BackgroundOrder
    opened: asyncio.Future[None]  # done when the response is stored; ApiError if it was not stored; cancelled by close()
    is_in_doubt: bool  # the write had no reply, so the store may have the response

    @property
    def is_kept(self) -> bool:
        """Whether the response is known to be stored."""

    @property
    def is_finishing(self) -> bool:
        """Whether the end of the response is being written, or has been."""

    async def begin(self) -> None:
        """Runs a client's request until its response is complete. Raises LeaseLost, StoreAway."""

    async def resume(self) -> None:
        """Runs a stored response until it is complete. Raises LeaseLost, StoreAway."""

    def close(self) -> None:
        """Releases the run's resources. Called after begin() or resume(), even if that was cancelled before its first step."""


class BackgroundRunner:
    """The background responses that this gateway runs. Belongs to one event loop."""

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
        """Creates a runner without responses.

        Args:
            taken: Makes a run of a stored response whose lease was taken.
            given_up: Returns the record of a response that cannot be read or ended, by owner and id.
            most: Largest number of responses at once, including responses that wait for a worker.
            is_ready: Returns whether this gateway can serve a response.
        """
        self._store = store
        self._taken = taken
        self._given_up = given_up
        self._most = most
        self._is_ready = is_ready
        self._retry_after_s = retry_after_s
        self._metrics = metrics
        self._runs: dict[Run, asyncio.Task[None]] = {}
        # Owner and id of responses that wait for a call of the store:
        self._left: dict[Lease, tuple[str, str]] = {}  # for their release to other gateways
        self._in_doubt: dict[tuple[str, str], None] = {}  # for their deletion, because their clients got an error
        self._stopping = False
        self._released_only_until = 0.0  # event-loop time until which only released responses are taken over
        metrics.watch_background(lambda: len(self._runs))

    async def run(self) -> None:
        """Runs until cancelled. Unfinished responses are then released for other gateways."""
        try:
            async with asyncio.TaskGroup() as tasks:  # two tasks, so that a long search does not delay renewals
                tasks.create_task(self._repeat(self._keep))
                tasks.create_task(self._repeat(self._look))
        finally:
            await self.drain()

    async def _repeat(self, work: Callable[[], Awaitable[None]]) -> None:
        is_away = False  # per task, because a task without calls of the store does not notice an outage
        while True:
            try:
                await work()
            except StoreAway as away:
                self._note_outage()
                if not is_away:
                    logger.warning("background responses wait for the store: %s", away)
                is_away = True
            else:
                is_away = False
            await asyncio.sleep(LOOK_S)

    def _note_outage(self) -> None:
        """Restricts takeovers to released responses until other gateways have had time to renew their leases."""
        self._released_only_until = asyncio.get_running_loop().time() + self._store.lease_s + LOOK_S

    async def begin(self, run: Run) -> None:
        """Starts a run and returns when its response is stored. Raises ApiError."""
        self._start(run, run.begin())
        try:
            await asyncio.shield(run.opened)
        except asyncio.CancelledError:
            if run.opened.cancelled():
                raise (self._shutting_down() if self._stopping else internal()) from None
            raise

    def _start(self, run: Run, work: Coroutine[Any, Any, None]) -> None:
        self._runs[run] = asyncio.create_task(work)
        self._runs[run].add_done_callback(lambda task: self._ended(run, task))

    def check_capacity(self) -> None:
        """Raises ApiError if the gateway is draining or already runs its largest number of responses."""
        if self._stopping:
            raise self._shutting_down()
        if len(self._runs) >= self._most:
            raise unavailable(
                "This gateway runs its largest number of background responses. Retry later.", self._retry_after_s, "queue_full"
            )

    def _shutting_down(self) -> ApiError:
        return unavailable("The server is shutting down.", self._retry_after_s, "shutting_down")

    async def drain(self) -> None:
        """Cancels all runs and releases their responses for other gateways. A second call has no effect."""
        self._stopping = True
        runs = dict(self._runs)
        for task in runs.values():
            task.cancel()
        with suppress(StoreAway, TimeoutError):  # the leases expire in any case
            async with asyncio.timeout(LEAVE_S):
                if runs:
                    await asyncio.wait(runs.values())
                await self._release_and_delete()

    async def _look(self) -> None:
        await self._release_and_delete()
        if not self._stopping and len(self._runs) < self._most and self._is_ready():
            await self._find()

    async def _keep(self) -> None:
        kept = {run.lease: run for run in self._runs if run.is_kept}
        for lease in await self._store.keep({lease: run.order for lease, run in kept.items()}):
            run = kept[lease]
            task = self._runs.get(run)
            if task is not None and not run.is_finishing:  # a finishing run has ended its response, or its write raises LeaseLost
                logger.info("a background response has ended, or another gateway holds its lease", extra=_about(run))
                task.cancel()

    async def _release_and_delete(self) -> None:
        """Releases the responses in _left and deletes those in _in_doubt. A search and drain() may call it at the same time."""
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
        started = loop.time()
        found = await self._store.free(SEEN, left=started < self._released_only_until)
        if loop.time() - started > SLOW_S:
            self._note_outage()
            return
        for owner, response_id in [each for each in found if each not in mine][:MAX_TAKEN]:
            if self._stopping or len(self._runs) >= self._most:
                return
            await self._take(owner, response_id)

    async def _take(self, owner: str, response_id: str) -> None:
        """Takes over a response if its lease is free.

        The lease of a response that cannot be read is not released, so that the next attempt waits for its expiry.
        """
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
            logger.exception("could not read a background response", extra=fields(response=response_id))
            return
        if self._stopping:
            self._left[lease] = (owner, response_id)
        else:
            run = self._taken(lease, order)
            logger.info("took over a background response", extra=_about(run))
            self._metrics.background_takeovers.inc()
            self._start(run, run.resume())

    async def _give_up(self, lease: Lease, owner: str, response_id: str) -> None:
        """Ends a response that cannot be run, with status failed. Its record stays unchanged if it cannot be read.

        The caller holds the lease. Raises LeaseLost, StoreAway.
        """
        logger.error("gave up a background response", extra=fields(response=response_id))
        try:
            record = await self._given_up(owner, response_id)
        except ApiError as error:
            if error.status != 404:
                raise StoreAway(error.message) from None
            record = b""  # the record has expired
        except (ValueError, TypeError, LookupError):
            logger.exception("could not read the record of a background response", extra=fields(response=response_id))
            record = b""
        await self._store.give_up(lease, owner, response_id, record)
        self._metrics.background_responses.labels(BackgroundStatus.FAILED.value).inc()

    def _ended(self, run: Run, task: asyncio.Task[None]) -> None:
        """Removes an ended run.

        After an unexpected error, the lease is not released, so that the next attempt waits for its expiry.
        """
        del self._runs[run]
        run.close()
        of, is_kept = (run.order.owner, run.order.id), run.is_kept
        error = None if task.cancelled() else task.exception()
        if (
            run.is_in_doubt and len(self._in_doubt) < MAX_IN_DOUBT
        ):  # more are created only in a long outage, in which no write reaches the store
            self._in_doubt[of] = None
        if task.cancelled() or isinstance(error, StoreAway):
            if is_kept:
                self._left[run.lease] = of
        elif isinstance(error, LeaseLost):
            logger.info("a background response has ended, or another gateway holds its lease", extra=_about(run))
        elif error is not None:
            logger.error("a background response stopped on an unexpected error", extra=_about(run), exc_info=error)


def _about(run: Run) -> dict[str, Any]:
    return fields(response=run.order.id)
