"""Requests that wait for the first worker of their model, choices that wait for a free slot, and the rate of completion.

ModelCatalog finds the model of a request. The request waits there if no worker of the model has connected yet. A choice waits in
its pool's `queue`. If it has lost its worker, it waits in `moved`, which goes before the queue. If the worker of its session is
not connected, it waits in `parked`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial

from rootstock_llm.services.gateway.config.settings import GatewaySettings
from rootstock_llm.services.gateway.dispatch import sessions
from rootstock_llm.services.gateway.dispatch.placement import Placement, Pool
from rootstock_llm.services.gateway.dispatch.refusals import Refusals
from rootstock_llm.services.gateway.dispatch.sessions import SessionWorker
from rootstock_llm.services.gateway.generation.errors import ApiError, model_not_allowed, unknown_model
from rootstock_llm.services.gateway.generation.origin import Caller
from rootstock_llm.services.gateway.generation.request import ModelInfo, ModelVersion
from rootstock_llm.services.gateway.observe.metrics import GatewayMetrics
from rootstock_llm.services.gateway.routing.fair_queue import Placed, QueueFull
from rootstock_llm.services.shared.limits import PRIORITY_RANGE

LOOK_S = 0.5  # seconds between two checks for an unknown model that a worker may still add
BACKGROUND = 2 * PRIORITY_RANGE[0]  # below every priority of a request
OUTPUT_WEIGHT = 2  # charge of an output token to its API key, in prompt tokens
WINDOW_S = 15.0  # seconds; completions of this window and of the previous one are counted
LONGEST_S = 60  # largest Retry-After, in seconds

Place = Callable[[Placement], bool]


class ModelCatalog:
    """The models that clients may name: the models of connected workers, and the models that the settings expect.

    A request of a model without a worker waits until the first worker of the model connects.
    """

    def __init__(
        self, settings: GatewaySettings, pools: Mapping[str, Pool], may_grow: Callable[[], bool], refusals: Refusals
    ) -> None:
        """Makes the catalog of a fleet.

        Args:
            pools: By the model name that clients use.
            may_grow: Returns whether a worker may still connect for the first time and add a model.
        """
        self._settings = settings
        self._pools = pools
        self._may_grow = may_grow
        self._refusals = refusals
        self._grown = asyncio.Event()
        self.expected = settings.expected_models  # names of models that may have no worker yet
        self.unplaced: Counter[str] = Counter()  # waiting requests by the expected model that they name; "" for other names

    @property
    def default(self) -> ModelInfo | None:
        """The model of requests without a model name: the first connected one of the setting `models`, else the first by name."""
        name = self._first_known(self._pools)
        return self._pools[name].model if name else None

    def models(self) -> list[ModelInfo]:
        return [pool.model for pool in self._pools.values()]

    def names(self) -> list[str]:
        """Returns the names of all models that clients may name, with or without a worker."""
        return list(dict.fromkeys((*self.expected, *self._pools)))

    def listed(self) -> list[ModelInfo]:
        """Returns the models of names(). The context length of a model without a worker is 0."""
        return [self._pools[name].model if name in self._pools else ModelInfo(name, 0, 0) for name in self.names()]

    def waiting(self) -> dict[str, int]:
        """Returns the number of waiting choices of every model of names(); "" for requests of other names."""
        waiting = {name: self.unplaced[name] for name in ("", *self.names())}
        for name, pool in self._pools.items():
            waiting[name] += pool.num_waiting
        return waiting

    def workers_of(self, name: str | None = None) -> list[SessionWorker]:
        """Returns the connected workers of a model that may have sessions; of the default model for None."""
        model = self._find(name)
        links = self._pools[model.name].homes() if model is not None else ()
        return [SessionWorker(link.info.worker_id, link.address, link.paused) for link in links if link.info is not None]

    def hash_root(self, model: ModelInfo, cache_salt: str) -> bytes:
        """Returns the hash that the first block of a prompt is chained to; empty if routing uses no block hashes."""
        pool = self._pools.get(model.name)
        return model.hash_root(cache_salt) if pool is not None and pool.wants_hashes else b""

    def reads_predictions(self, model: ModelInfo) -> bool:
        """Whether a worker of the model drafts tokens from predicted outputs."""
        pool = self._pools.get(model.name)
        return pool is not None and any(link.info is not None and link.info.reads_predictions for link in pool.links.values())

    def grown(self) -> None:
        """Wakes the requests that wait for a worker to connect."""
        self._grown.set()

    async def wait_for(self, name: str | None, caller: Caller) -> ModelInfo:
        """Returns the model of this name, or the caller's default model for None. Waits if its first worker may still connect.

        Raises:
            ApiError: There is no such model, the caller may not use it, or none of its workers connected in time.
        """
        if caller.models is not None:
            name = self._allowed(name, caller)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.queue_timeout_s
        while (found := self._find(name)) is None:
            if loop.time() >= deadline:
                raise self._refusals.no_worker()
            expected = name is None or not self._pools or name in self.expected
            if not expected and not self._may_grow():
                raise unknown_model()
            await self._wait(name, deadline if expected else loop.time() + LOOK_S)
        return found

    def _allowed(self, name: str | None, caller: Caller) -> str:
        """Returns the name, or the name of the caller's default model for None. Raises ApiError 403."""
        if name is None:
            usable = [each for each in self.names() if caller.may_use(each)]
            name = self._first_known(usable) or next(iter(usable), None)
        if name is None or not caller.may_use(name):
            raise model_not_allowed()
        return name

    def _first_known(self, names: Collection[str]) -> str:
        """Returns the first name of the setting `models` that is in `names` and has a pool, else the first of `names` with a pool
        in alphabetical order; "" if none has a pool."""
        known = self._pools.keys() & names
        return next((name for name in self.expected if name in known), min(known, default=""))

    def _find(self, name: str | None) -> ModelInfo | None:
        if name is None:
            return self.default
        pool = self._pools.get(name)
        return None if pool is None else pool.model

    async def _wait(self, name: str | None, until: float) -> None:
        """Waits until a worker connects, or until this loop time. Raises ApiError if too many requests wait already."""
        if self.unplaced.total() >= self._settings.max_waiting_requests:
            raise self._refusals.full()
        meant = next(iter(self.expected), "") if name is None else name
        counted = meant if meant in self.expected else ""
        self.unplaced[counted] += 1
        try:
            with suppress(TimeoutError):  # wait_for checks the time
                async with asyncio.timeout_at(until):
                    self._grown.clear()
                    await self._grown.wait()
        finally:
            self.unplaced[counted] -= 1


class Waiting:
    """Moves choices into and out of the waiting lines of all pools, and owns their timers."""

    def __init__(self, settings: GatewaySettings, refusals: Refusals, metrics: GatewayMetrics, place: Place) -> None:
        """`place` submits a choice to a worker. It returns False if no worker that may get the choice has a free slot."""
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
        """Queues a choice that has lost its worker, ahead of the pool's queue."""
        placement.pool.moved[placement] = None
        self._begin(placement, moved=True)

    def park(self, placement: Placement) -> None:
        """Lets a turn of a session wait for the session's worker outside the queue. Raises ApiError if too many turns wait."""
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
        """Fails begun requests whose model version is gone for good, and new requests if every worker refuses them.

        Args:
            may_serve: Whether a worker has a model version, or may have it once it connects.
        """
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


class Pace:
    """Estimates Retry-After of a 503 from the rate at which choices complete."""

    def __init__(self, waiting: Callable[[], int], least_s: int, clock: Callable[[], float]) -> None:
        """Starts the first window.

        Args:
            waiting: Returns the number of choices that wait for a worker.
            least_s: Retry-After in seconds if no choice waits; never less.
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
