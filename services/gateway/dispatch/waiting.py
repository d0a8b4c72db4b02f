"""Choices that wait for a worker with a free slot, the errors if the wait fails, and the rate at which choices complete.

A choice waits in its pool's `queue`. If it has lost its worker, it waits in `moved`, which goes before the queue. If the worker
of its session is not connected, it waits in `parked`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from services.gateway.config.settings import GatewaySettings
from services.gateway.dispatch import sessions
from services.gateway.dispatch.placement import Placement, Pool
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.request.errors import ApiError, unavailable
from services.gateway.request.generation import ModelVersion
from services.gateway.routing.fair_queue import Placed, QueueFull
from services.shared.limits import PRIORITY_RANGE

BACKGROUND = 2 * PRIORITY_RANGE[0]  # below every priority of a request
OUTPUT_WEIGHT = 2  # charge of an output token to its API key, in prompt tokens

WINDOW_S = 15.0  # completions are counted over one to two windows
LONGEST_S = 60  # largest Retry-After

Place = Callable[[Placement], bool]


class Refusals:
    """Makes the errors of requests that no worker serves. Each method counts one refusal and returns a 503."""

    def __init__(self, retry_after_s: int, metrics: GatewayMetrics) -> None:
        self._retry_after_s = retry_after_s
        self._counter = metrics.refusals

    def full(self) -> ApiError:
        return self._refused("Too many requests wait for a worker.", "queue_full")

    def refusing(self) -> ApiError:
        return self._refused(
            "Every worker of this model refuses new requests: an operator has set 'max_queued_requests' to 0. Retry later.",
            "queue_full",
        )

    def busy(self) -> ApiError:
        return self._refused("All workers are busy.", "queue_timeout")

    def no_worker(self) -> ApiError:
        return self._refused("No worker is connected.", "no_worker")

    def no_scores(self) -> ApiError:
        return self._refused("Every worker of this model is of a version that serves no scores. Retry later.", "no_worker")

    def weights_gone(self) -> ApiError:
        return self._refused(
            "No worker serves the model version that began the response. Send the request again.", "weights_not_served"
        )

    def paused(self) -> ApiError:
        return self._refused("All workers that could serve this are paused.", "paused")

    def _refused(self, message: str, reason: str) -> ApiError:
        self._counter.labels(reason).inc()
        return unavailable(message, self._retry_after_s, reason)


class Pace:
    """Estimates Retry-After of a 503 from the rate at which choices complete."""

    def __init__(self, waiting: Callable[[], int], least_s: int, clock: Callable[[], float]) -> None:
        """Starts the first window.

        Args:
            waiting: Returns the number of choices that wait for a worker.
            least_s: Retry-After in seconds if no choice waits.
            clock: Returns seconds.
        """
        self._waiting = waiting
        self._least_s = least_s
        self._clock = clock
        self._begun = clock()
        self._before = 0  # completed in the window before this one
        self._since = 0  # completed in this window

    def completed(self) -> None:
        """Counts a choice that has left its worker."""
        self._turn()
        self._since += 1

    def retry_after_s(self) -> int:
        """Returns the seconds until the last waiting choice is served at the recent rate, from least_s to LONGEST_S.

        If no choice has completed, the time for which completions have been counted is the estimate.
        """
        self._turn()
        waiting = self._waiting()
        if not waiting:
            return self._least_s
        counted_s = self._clock() - self._begun + WINDOW_S
        done = self._before + self._since
        seconds = counted_s * waiting / done if done else counted_s
        return int(min(max(-(-seconds // 1), self._least_s), LONGEST_S))

    def _turn(self) -> None:
        passed = self._clock() - self._begun
        if passed >= WINDOW_S:
            self._before = self._since if passed < 2 * WINDOW_S else 0
            self._since = 0
            self._begun += passed // WINDOW_S * WINDOW_S


class Waiting:
    """Moves choices into and out of the waiting lines of all pools, and owns their timers."""

    def __init__(self, settings: GatewaySettings, refusals: Refusals, metrics: GatewayMetrics, place: Place) -> None:
        """Makes empty lines. `place` submits a choice to a worker, and returns False if none with a free slot may get it."""
        self._settings = settings
        self._refusals = refusals
        self._metrics = metrics
        self._place = place

    def wait(self, pool: Pool, placements: Sequence[Placement]) -> None:
        """Queues the choices of one request.

        Raises:
            ApiError: The queue has too few free positions, or every worker of the model refuses new requests. Other choices then
                keep their positions.
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
        """Lets a choice that has lost its worker wait before the queue."""
        placement.pool.moved[placement] = None
        self._begin(placement, moved=True)

    def park(self, placement: Placement) -> None:
        """Lets a turn of a session wait for its own worker, outside of the queue. Raises ApiError if too many turns wait."""
        parked = placement.pool.parked
        if len(parked) >= self._settings.max_waiting_requests:
            raise sessions.session_worker_away(self._settings.retry_after_s)
        parked[placement] = None
        self._begin(placement, moved=False)

    def wake_parked(self, pool: Pool) -> None:
        """Places parked choices after a worker has connected or has ended a pause."""
        for placement in list(pool.parked):
            if placement in pool.parked and self._place(placement):
                self._end(placement)
                del pool.parked[placement]

    def fail_all(self, pool: Pool, error: ApiError) -> None:
        """Fails the requests of all choices that wait for a pool whose model is no longer served."""
        for placement in (*pool.queue, *pool.moved, *pool.parked):
            placement.request.fail(error)

    def give_up(self, pool: Pool, may_serve: Callable[[ModelVersion], bool]) -> None:
        """Fails begun requests whose model version no worker has or may have again, and new ones if every worker refuses them."""
        for placement in list(pool.moved):
            version = placement.model_version if placement.has_begun else None
            if placement in pool.moved and version is not None and not may_serve(version):
                placement.request.fail(self._refusals.weights_gone())
        if pool.refuses_new:
            for placement in (*pool.queue, *pool.moved):
                if not placement.has_begun and not placement.request.begun:
                    placement.request.fail(self._refusals.refusing())

    def leave(self, placement: Placement) -> None:
        """Takes a choice out of its line. No effect if it does not wait."""
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
        """Places waiting choices on the loop's next turn."""
        if pool.num_waiting and not pool.pumping:
            pool.pumping = True
            asyncio.get_running_loop().call_soon(self._pump, pool)

    def _pump(self, pool: Pool) -> None:
        pool.pumping = False
        full = False
        for placement in list(pool.moved):
            full = full or not pool.has_free_slot(begun=True)
            if full and placement.reader is None:
                continue  # only a choice with prefetched pages has a reserved slot
            if placement in pool.moved and self._place(placement):
                self._end(placement)
                del pool.moved[placement]
        if len(pool.queue):
            pool.queue.drain(self._place_queued)

    def _place_queued(self, placement: Placement) -> Placed:
        if self._place(placement):
            self._end(placement)
            return Placed.PLACED
        return Placed.SKIP if placement.pool.has_free_slot(placement.has_begun) else Placed.STOP

    def charge(self, placement: Placement) -> None:
        """Charges the tokens of a choice since the last charge to its API key."""
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
        elif request.begun:  # a request with output waits until the request times out
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
    """Returns the name of the API key of the choice."""
    return placement.request.key
