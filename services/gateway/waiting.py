"""Choices that wait for a worker with room, in their pool's queue or, if their worker was lost, before it. Owns their timers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.gateway.config.settings import GatewaySettings
from services.gateway.dispatch import sessions
from services.gateway.dispatch.model_pool import ModelPool
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.peers.weights import Weights
from services.gateway.request.errors import ApiError, unavailable
from services.gateway.request.request import Choice
from services.gateway.routing.fair_queue import Placed, QueueFull

OUTPUT_WEIGHT = 2  # what an output token costs its key, in prompt tokens

Place = Callable[[ModelPool, Choice], bool]


class Waiting:
    """place: gives a choice to a worker, if one with room would take it."""

    def __init__(self, settings: GatewaySettings, metrics: GatewayMetrics, place: Place) -> None:
        self._settings = settings
        self._metrics = metrics
        self._place = place

    def wait(self, pool: ModelPool, choice: Choice) -> None:
        """In the queue. Raises ApiError if that is full."""
        try:
            displaced = pool.queue.push(choice, choice.request.key, self._urgency(choice))
        except QueueFull:
            raise self.full() from None
        self._begin(choice, moved=False)
        if displaced is not None:
            self._end(displaced)
            if displaced.request.begun:
                self.wait_first(pool, displaced)
            else:
                displaced.request.fail(self.full())

    def wait_first(self, pool: ModelPool, choice: Choice) -> None:
        """Before the queue: somebody has been promised its answer already."""
        pool.moved[choice] = None
        self._begin(choice, moved=True)

    def park(self, pool: ModelPool, choice: Choice) -> None:
        """A turn whose session's worker is not connected: it waits for that one only, and keeps nobody else waiting. Raises
        ApiError if too many do."""
        if len(pool.parked) >= self._settings.max_waiting_requests:
            raise sessions.session_worker_away(self._settings.retry_after_s)
        pool.parked[choice] = None
        self._begin(choice, moved=False)

    def wake_parked(self, pool: ModelPool) -> None:
        """A worker has connected, or goes on after a pause."""
        for choice in list(pool.parked):
            if choice in pool.parked and self._place(pool, choice):
                self._end(choice)
                del pool.parked[choice]

    def fail_all(self, pool: ModelPool, error: ApiError) -> None:
        """Nobody will ever serve what waits here."""
        for choice in (*pool.queue, *pool.moved, *pool.parked):
            choice.request.fail(error)

    def give_up(self, pool: ModelPool, may_serve: Callable[[Weights], bool]) -> None:
        """Ends what has begun with weights that no worker has or may bring back."""
        for choice in list(pool.moved):
            if choice in pool.moved and choice.output_ids and choice.weights is not None and not may_serve(choice.weights):
                choice.request.fail(self._weights_gone())

    def leave(self, pool: ModelPool, choice: Choice) -> None:
        """No effect on one that does not wait."""
        if choice.waiting is None:
            return
        self._end(choice)
        for line in (pool.moved, pool.parked):
            if choice in line:
                del line[choice]
                return
        pool.queue.remove(choice)

    def pump(self, pool: ModelPool) -> None:
        """Gives what waits to workers that have room, on the loop's next turn."""
        if pool.num_waiting and not pool.pumping:
            pool.pumping = True
            asyncio.get_running_loop().call_soon(self._pump, pool)

    def _pump(self, pool: ModelPool) -> None:
        pool.pumping = False
        for choice in list(pool.moved):
            if not pool.has_room():
                return
            if choice in pool.moved and self._place(pool, choice):
                self._end(choice)
                del pool.moved[choice]
        if len(pool.queue):
            pool.queue.drain(lambda choice: self._place_queued(pool, choice))

    def _place_queued(self, pool: ModelPool, choice: Choice) -> Placed:
        if self._place(pool, choice):
            self._end(choice)
            return Placed.PLACED
        return Placed.SKIP if pool.has_room() else Placed.STOP

    def charge(self, pool: ModelPool, choice: Choice) -> None:
        """What has been spent on it since the last time, to its key's account."""
        due = len(choice.prompt.ids) + OUTPUT_WEIGHT * len(choice.output_ids) - choice.charged
        if due > 0:
            choice.charged += due
            pool.queue.charge(choice.request.key, due)

    def full(self) -> ApiError:
        return self._refused("Too many requests wait for a worker.", "queue_full")

    def no_worker(self) -> ApiError:
        return self._refused("No worker is connected.", "no_worker")

    def _weights_gone(self) -> ApiError:
        return self._refused("The weights that the answer was begun with are not served any more.", "weights_not_served")

    def paused(self) -> ApiError:
        return self._refused("All workers that could serve this are paused.", "paused")

    def _refused(self, message: str, reason: str) -> ApiError:
        self._metrics.refusals.labels(reason).inc()
        return unavailable(message, self._settings.retry_after_s, reason)

    def _begin(self, choice: Choice, moved: bool) -> None:
        loop = asyncio.get_running_loop()
        choice.arrived_in_queue = now = loop.time()
        if choice.patience_until == 0.0:
            choice.patience_until = now + self._settings.queue_timeout_s
        choice.waiting = loop.call_at(max(now, choice.patience_until), self._expire, choice)
        if choice.trace is not None:
            choice.trace.waits(moved)

    def _end(self, choice: Choice) -> None:
        if choice.waiting is not None:
            choice.waiting.cancel()
            choice.waiting = None
            self._metrics.queue_time.observe(asyncio.get_running_loop().time() - choice.arrived_in_queue)
            if choice.trace is not None:
                choice.trace.waited()

    def _expire(self, choice: Choice) -> None:
        pool = choice.pool
        assert pool is not None
        if choice.generation.session is not None and pool.links:
            choice.request.fail(sessions.session_worker_away(self._settings.retry_after_s))
        elif not pool.usable():
            choice.request.fail(self.paused() if pool.paused else self.no_worker())
        elif choice.output_ids and not pool.can_go_on(choice):
            choice.request.fail(self.paused() if pool.is_held_up(choice) else self._weights_gone())
        elif choice.request.begun:
            loop = asyncio.get_running_loop()  # somebody reads what there is of it: its patience ends with the request's time
            choice.patience_until = loop.time() + self._settings.queue_timeout_s
            choice.waiting = loop.call_at(choice.patience_until, self._expire, choice)
        else:
            choice.request.fail(self._refused("All workers are busy.", "queue_timeout"))

    def _urgency(self, choice: Choice) -> int:
        if not self._settings.enable_priority_scheduling:
            return 0
        priority = choice.generation.priority
        return -priority if self._settings.schedule_low_priority_values_first else priority
