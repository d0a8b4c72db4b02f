"""Choices that wait for a worker with room, in their pool's queue or, if their worker was lost, before it. Owns their timers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.gateway import sessions
from services.gateway.errors import ApiError, unavailable
from services.gateway.metrics import GatewayMetrics
from services.gateway.model_pool import ModelPool
from services.gateway.request_state import Choice
from services.gateway.routing.fair_queue import Placed, QueueFull
from services.gateway.settings import GatewaySettings

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
            displaced.request.fail(self.full())

    def wait_first(self, pool: ModelPool, choice: Choice) -> None:
        """Before the queue: somebody has been promised its answer already."""
        pool.moved[choice] = None
        self._begin(choice, moved=True)

    def leave(self, pool: ModelPool, choice: Choice) -> None:
        """No effect on one that does not wait."""
        if choice.waiting is None:
            return
        self._end(choice)
        if choice in pool.moved:
            del pool.moved[choice]
        else:
            pool.queue.remove(choice)

    def pump(self, pool: ModelPool) -> None:
        """Gives what waits to workers that have room, on the loop's next turn."""
        if pool.num_waiting and not pool.pumping:
            pool.pumping = True
            asyncio.get_running_loop().call_soon(self._pump, pool)

    def _pump(self, pool: ModelPool) -> None:
        pool.pumping = False
        for choice in list(pool.moved):
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
        return unavailable("Too many requests wait for a worker.", self._settings.retry_after_s, "queue_full")

    def no_worker(self) -> ApiError:
        return unavailable("No worker is connected.", self._settings.retry_after_s, "no_worker")

    def _begin(self, choice: Choice, moved: bool) -> None:
        loop = asyncio.get_running_loop()
        choice.arrived_in_queue = loop.time()
        choice.waiting = loop.call_later(self._settings.queue_timeout_s, self._expire, choice)
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
        if not pool.usable():
            choice.request.fail(self.no_worker())
        elif choice.generation.session is not None:
            choice.request.fail(sessions.session_worker_away(self._settings.retry_after_s))
        else:
            choice.request.fail(unavailable("All workers are busy.", self._settings.retry_after_s, "queue_timeout"))

    def _urgency(self, choice: Choice) -> int:
        if not self._settings.enable_priority_scheduling:
            return 0
        priority = choice.generation.priority
        return -priority if self._settings.schedule_low_priority_values_first else priority
