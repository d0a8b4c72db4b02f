"""Renews the leases of the background responses that this gateway runs, and takes over responses whose lease is free.

A draining gateway releases its responses immediately, because a response may take an hour. Other gateways continue them after the
stored tokens, whose KV is still in the workers' prefix caches.

While the store is unreachable, leases expire although their gateways are healthy. These gateways renew their leases when the
store is reachable again. Therefore, after an outage, this gateway takes over only released responses until one lease duration has
passed.
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
MAX_SEARCHED = 1000  # largest number of responses without a lease that one search reads
MAX_TAKEN = 8  # largest number of responses that one search takes over, so that several gateways share the responses
MAX_TO_DELETE = 4096  # largest number of responses that wait for their deletion
SLOW_S = 1.0  # a search that takes longer counts as an outage of the store
DRAIN_S = 1.0  # seconds in which a draining gateway cancels its runs and releases their leases


class Run(Protocol):
    """The work of this gateway on one response: one call of begin() or resume(), and then close()."""

    lease: Lease
    order: BackgroundOrder
    opened: asyncio.Future[None]  # result when the response is stored; ApiError if it was not stored; cancelled by close()
    may_be_stored: bool  # the write of the new response has no reply, so it is unknown whether the store has the response

    @property
    def is_stored(self) -> bool:
        """Whether the response is known to be stored."""

    @property
    def is_finishing(self) -> bool:
        """Whether the end of the response is being written or is stored."""

    async def begin(self) -> None:
        """Runs a client's request until its response is complete. Raises LeaseLost, StoreAway."""

    async def resume(self) -> None:
        """Runs a stored response until it is complete. Raises LeaseLost, StoreAway."""

    def close(self) -> None:
        """Releases the run's resources. Called even if begin() or resume() was cancelled before its first step."""


class BackgroundRunner:
    """The background responses that this gateway runs. Belongs to one event loop."""

    def __init__(
        self,
        store: BackgroundStore,
        make_run: Callable[[Lease, BackgroundOrder], Run],
        given_up: Callable[[str, str], Awaitable[bytes]],
        max_runs: int,
        is_ready: Callable[[], bool],
        retry_after_s: int,
        metrics: GatewayMetrics,
    ) -> None:
        """Creates a runner without responses.

        Args:
            make_run: Makes the run of a stored response whose lease this gateway has taken.
            given_up: Takes owner and id of a response that no gateway could read or end. Returns its record with status failed.
            max_runs: Largest number of responses at once, including responses that wait for a worker.
            is_ready: Returns whether this gateway has all connections that a response needs.
        """
        self._store = store
        self._make_run = make_run
        self._given_up = given_up
        self._max_runs = max_runs
        self._is_ready = is_ready
        self._retry_after_s = retry_after_s
        self._metrics = metrics
        self._runs: dict[Run, asyncio.Task[None]] = {}
        # The next _release_and_delete() sends both to the store. Each tuple is the owner and the id of a response.
        self._to_release: dict[Lease, tuple[str, str]] = {}  # leases to release to other gateways
        self._to_delete: dict[tuple[str, str], None] = {}  # responses that may be stored although their clients got an error
        self._stopping = False
        self._released_only_until = 0.0  # event-loop time until which only released responses are taken over
        metrics.watch_background(lambda: len(self._runs))

    async def run(self) -> None:
        """Runs until cancelled, and then releases unfinished responses to other gateways."""
        try:
            async with asyncio.TaskGroup() as tasks:  # two tasks, so that a long search does not delay renewals
                tasks.create_task(self._repeat(self._renew_leases))
                tasks.create_task(self._repeat(self._search))
        finally:
            await self.drain()

    async def _repeat(self, work: Callable[[], Awaitable[None]]) -> None:
        is_away = False  # whether the last `work` found the store unreachable; an outage is logged once
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
        if len(self._runs) >= self._max_runs:
            raise unavailable(
                "This gateway runs its largest number of background responses. Retry later.", self._retry_after_s, "queue_full"
            )

    def _shutting_down(self) -> ApiError:
        return unavailable("The server is shutting down.", self._retry_after_s, "shutting_down")

    async def drain(self) -> None:
        """Cancels all runs and releases their responses to other gateways. Idempotent."""
        self._stopping = True
        runs = dict(self._runs)
        for task in runs.values():
            task.cancel()
        with suppress(StoreAway, TimeoutError):  # a lease that is not released expires
            async with asyncio.timeout(DRAIN_S):
                if runs:
                    await asyncio.wait(runs.values())
                await self._release_and_delete()

    async def _search(self) -> None:
        await self._release_and_delete()
        if not self._stopping and len(self._runs) < self._max_runs and self._is_ready():
            await self._take_over_free()

    async def _renew_leases(self) -> None:
        renewable = {run.lease: run for run in self._runs if run.is_stored}
        for lease in await self._store.renew({lease: run.order for lease, run in renewable.items()}):
            run = renewable[lease]
            task = self._runs.get(run)
            # A run whose `is_finishing` is set ends without a cancellation: its write succeeds or raises LeaseLost.
            if task is not None and not run.is_finishing:
                logger.info("a background response has ended, or another gateway holds its lease", extra=_about(run))
                task.cancel()

    async def _release_and_delete(self) -> None:
        """Releases the responses in _to_release, and deletes the responses in _to_delete.

        The search for free responses and drain() may run this method at the same time.
        """
        while self._to_release:
            lease, ids = self._to_release.popitem()
            try:
                await self._store.release(lease, *ids)
            except BaseException:
                self._to_release[lease] = ids
                raise
        while self._to_delete:
            ids, _ = self._to_delete.popitem()
            try:
                await self._store.delete(*ids)
            except BaseException:
                self._to_delete[ids] = None
                raise

    async def _take_over_free(self) -> None:
        loop = asyncio.get_running_loop()
        mine = {(run.order.owner, run.order.id) for run in self._runs}
        started = loop.time()
        found = await self._store.find_unleased(MAX_SEARCHED, released_only=started < self._released_only_until)
        if loop.time() - started > SLOW_S:
            self._note_outage()
            return
        for owner, response_id in [each for each in found if each not in mine][:MAX_TAKEN]:
            if self._stopping or len(self._runs) >= self._max_runs:
                return
            await self._take(owner, response_id)

    async def _take(self, owner: str, response_id: str) -> None:
        """Takes over a response if no gateway has its lease.

        After an unexpected error, the lease is not released. Another gateway takes over only after the lease has expired.
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
            self._to_release[lease] = (owner, response_id)
            raise
        except Exception:
            logger.exception("could not read a background response", extra=fields(response=response_id))
            return
        if self._stopping:
            self._to_release[lease] = (owner, response_id)
        else:
            run = self._make_run(lease, order)
            logger.info("took over a background response", extra=_about(run))
            self._metrics.background_takeovers.inc()
            self._start(run, run.resume())

    async def _give_up(self, lease: Lease, owner: str, response_id: str) -> None:
        """Gives a response the status failed, because no gateway could run it. An unreadable record stays unchanged.

        The caller must have the lease. Raises LeaseLost, StoreAway.
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

        After an unexpected error, the lease is not released. Another gateway takes over only after the lease has expired.
        """
        del self._runs[run]
        run.close()
        ids, is_stored = (run.order.owner, run.order.id), run.is_stored
        error = None if task.cancelled() else task.exception()
        # Responses beyond MAX_TO_DELETE need no deletion: so many wait only in a long outage, and then the store has no record.
        if run.may_be_stored and len(self._to_delete) < MAX_TO_DELETE:
            self._to_delete[ids] = None
        if task.cancelled() or isinstance(error, StoreAway):
            if is_stored:
                self._to_release[run.lease] = ids
        elif isinstance(error, LeaseLost):
            logger.info("a background response has ended, or another gateway holds its lease", extra=_about(run))
        elif error is not None:
            logger.error("a background response stopped on an unexpected error", extra=_about(run), exc_info=error)


def _about(run: Run) -> dict[str, Any]:
    return fields(response=run.order.id)
