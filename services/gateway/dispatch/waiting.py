"""Choices that wait for a worker with room, in their pool's queue or, if their worker was lost, before it. Owns their timers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from services.gateway.config.settings import GatewaySettings
from services.gateway.dispatch import sessions
from services.gateway.dispatch.placement import Placement, Pool
from services.gateway.dispatch.refusals import Refusals
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.request.errors import ApiError
from services.gateway.request.generation import ModelVersion
from services.gateway.routing.fair_queue import Placed, QueueFull
from services.shared.limits import PRIORITY_RANGE

BACKGROUND = 2 * PRIORITY_RANGE[0]  # below whatever a request can ask for
OUTPUT_WEIGHT = 2  # what an output token costs its key, in prompt tokens

Place = Callable[[Placement], bool]


class Waiting:
    """place: gives it to a worker, if one with room would take it."""

    def __init__(self, settings: GatewaySettings, refusals: Refusals, metrics: GatewayMetrics, place: Place) -> None:
        self._settings = settings
        self._refusals = refusals
        self._metrics = metrics
        self._place = place

    def wait(self, pool: Pool, placements: Sequence[Placement]) -> None:
        """Queues the choices of one request.

        Raises:
            ApiError: the queue has no room for all of them, or every worker of the model refuses new requests. No other choice
                has lost its position then.
        """
        if placements and pool.refuses_new:
            raise self._refusals.refusing()
        try:
            displaced = pool.queue.push_all([(each, _key(each), self._urgency(each)) for each in placements])
        except QueueFull:
            raise self._refusals.full() from None
        for placement in placements:
            self._begin(placement, moved=False)
        for placement in displaced:
            self._end(placement)
            if placement.request.begun:
                self.wait_first(placement)
            else:
                placement.request.fail(self._refusals.full())

    def wait_first(self, placement: Placement) -> None:
        """Before the queue: somebody has been promised its answer already."""
        placement.pool.moved[placement] = None
        self._begin(placement, moved=True)

    def park(self, placement: Placement) -> None:
        """A turn whose session's worker is not connected: it waits for that one only, and keeps nobody else waiting. Raises
        ApiError if too many do."""
        parked = placement.pool.parked
        if len(parked) >= self._settings.max_waiting_requests:
            raise sessions.session_worker_away(self._settings.retry_after_s)
        parked[placement] = None
        self._begin(placement, moved=False)

    def wake_parked(self, pool: Pool) -> None:
        """A worker has connected, or goes on after a pause."""
        for placement in list(pool.parked):
            if placement in pool.parked and self._place(placement):
                self._end(placement)
                del pool.parked[placement]

    def fail_all(self, pool: Pool, error: ApiError) -> None:
        """Nobody will ever serve what waits here."""
        for placement in (*pool.queue, *pool.moved, *pool.parked):
            placement.request.fail(error)

    def give_up(self, pool: Pool, may_serve: Callable[[ModelVersion], bool]) -> None:
        """Ends begun requests whose weights no worker has or may bring back, and new requests if every worker refuses them."""
        for placement in list(pool.moved):
            version = placement.model_version if placement.has_begun else None
            if placement in pool.moved and version is not None and not may_serve(version):
                placement.request.fail(self._refusals.weights_gone())
        if pool.refuses_new:
            for placement in (*pool.queue, *pool.moved):
                if not placement.has_begun and not placement.request.begun:
                    placement.request.fail(self._refusals.refusing())

    def leave(self, placement: Placement) -> None:
        """No effect on one that does not wait."""
        if placement.wait_timer is None:
            return
        self._end(placement)
        pool = placement.pool
        for line in (pool.moved, pool.parked):
            if placement in line:
                del line[placement]
                return
        pool.queue.remove(placement)

    def pump(self, pool: Pool) -> None:
        """Gives what waits to workers that have room, on the loop's next turn."""
        if pool.num_waiting and not pool.pumping:
            pool.pumping = True
            asyncio.get_running_loop().call_soon(self._pump, pool)

    def _pump(self, pool: Pool) -> None:
        pool.pumping = False
        full = False
        for placement in list(pool.moved):
            full = full or not pool.has_room(begun=True)
            if full and placement.reader is None:
                continue  # a reader keeps room for its own
            if placement in pool.moved and self._place(placement):
                self._end(placement)
                del pool.moved[placement]
        if len(pool.queue):
            pool.queue.drain(self._place_queued)

    def _place_queued(self, placement: Placement) -> Placed:
        if self._place(placement):
            self._end(placement)
            return Placed.PLACED
        return Placed.SKIP if placement.pool.has_room(placement.has_begun) else Placed.STOP

    def charge(self, placement: Placement) -> None:
        """What has been spent on it since the last time, to its key's account."""
        choice = placement.choice
        due = placement.charge(len(choice.prompt.ids) + OUTPUT_WEIGHT * len(choice.output_ids))
        if due > 0:
            placement.pool.queue.charge(_key(placement), due)

    def _begin(self, placement: Placement, moved: bool) -> None:
        patience_s = self._settings.queue_timeout_s
        placement.begin_wait(patience_s, placement.has_begun, partial(self._expire, placement))
        if placement.choice.trace is not None:
            placement.choice.trace.waits(moved)

    def _end(self, placement: Placement) -> None:
        waited_s = placement.end_wait()
        if waited_s is not None:
            choice = placement.choice
            self._metrics.queue_time.observe(waited_s)
            if choice.trace is not None:
                choice.trace.waited()
            placement.request.choice_waited(choice, waited_s)

    def _expire(self, placement: Placement) -> None:
        pool, request = placement.pool, placement.request
        if placement.in_session and pool.links:
            request.fail(sessions.session_worker_away(self._settings.retry_after_s))
        elif not pool.usable():
            request.fail(self._refusals.paused() if pool.paused else self._refusals.no_worker())
        elif placement.has_begun and not pool.can_go_on(placement):
            request.fail(self._refusals.paused() if pool.is_held_up(placement) else self._refusals.weights_gone())
        elif request.begun:  # somebody reads what there is of it: its patience ends with the request's time
            placement.prolong_wait(self._settings.queue_timeout_s, partial(self._expire, placement))
        else:
            request.fail(self._refusals.busy())

    def _urgency(self, placement: Placement) -> int:
        if placement.request.caller.background:
            return BACKGROUND
        if not self._settings.enable_priority_scheduling:
            return 0
        priority = placement.choice.priority
        return -priority if self._settings.schedule_low_priority_values_first else priority


def _key(placement: Placement) -> str:
    """Whose it is."""
    return placement.request.key
