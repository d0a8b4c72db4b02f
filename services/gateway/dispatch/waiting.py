"""Requests that wait for the first worker of their model, choices that wait for a free slot, and the rate of completion.

ModelCatalog finds the model of a request. The request waits in the catalog if no worker of the model has connected yet. The
class Waiting moves choices into and out of three containers of their pool:

- `queue`: choices that wait for their first worker;
- `moved`: choices that have lost their worker; they are placed before the queue;
- `parked`: turns of sessions whose worker is not connected.
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
from rootstock_llm.services.gateway.routing.fair_queue import OUTPUT_WEIGHT, Placed, QueueFull
from rootstock_llm.services.shared.limits import PRIORITY_RANGE

LOOK_S = 0.5  # seconds between two checks for an unknown model while a worker may still add it
BACKGROUND = 2 * PRIORITY_RANGE[0]  # queue priority of background requests, below all other priorities
WINDOW_S = 15.0  # seconds; Retry-After is computed from the completions in the current and the previous window
LONGEST_S = 60  # largest Retry-After, in seconds

Place = Callable[[Placement], bool]  # submits a choice to a worker; returns False if no suitable worker has a free slot


class ModelCatalog:
    """The models that clients may name: the models of connected workers, and the models that the settings expect.

    A request whose model has no worker yet waits for up to queue_timeout_s. If workers serve other models and the settings do not
    expect this model, the request waits only while a worker may still add the model.
    """

    def __init__(
        self, settings: GatewaySettings, pools: Mapping[str, Pool], may_grow: Callable[[], bool], refusals: Refusals
    ) -> None:
        """Makes the catalog of a fleet.

        Args:
            pools: Pools by the model name that clients use.
            may_grow: Returns whether a worker may still connect for the first time and add a model.
        """
        self._settings = settings
        self._pools = pools
        self._may_grow = may_grow
        self._refusals = refusals
        self._worker_connected = asyncio.Event()
        self.expected = settings.expected_models  # names of models that may have no worker yet
        self.num_unplaced: Counter[str] = Counter()  # requests in wait_for(), by the expected model that they name; "" for others

    @property
    def default(self) -> ModelInfo | None:
        """The model of requests without a model name. None before the first worker.

        It is the first model of the setting `models` that has a pool. If there is none, it is the model of the alphabetically
        first pool.
        """
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
        """Returns the number of waiting requests and choices for each name of names().

        The entry "" counts requests that wait for the first worker of a model which the settings do not expect.
        """
        waiting = {name: self.num_unplaced[name] for name in ("", *self.names())}
        for name, pool in self._pools.items():
            waiting[name] += pool.num_waiting
        return waiting

    def workers_of(self, name: str | None = None) -> list[SessionWorker]:
        """Returns the connected workers of a model that may have sessions. None selects the default model."""
        model = self._find(name)
        links = self._pools[model.name].session_links() if model is not None else ()
        return [SessionWorker(link.info.worker_id, link.address, link.paused) for link in links if link.info is not None]

    def hash_root(self, model: ModelInfo, cache_salt: str) -> bytes:
        """Returns the hash that precedes the first block of a prompt; b"" if routing uses no block hashes."""
        pool = self._pools.get(model.name)
        return model.hash_root(cache_salt) if pool is not None and pool.wants_hashes else b""

    def reads_predictions(self, model: ModelInfo) -> bool:
        """Returns whether a worker of the model drafts tokens from predicted outputs."""
        pool = self._pools.get(model.name)
        return pool is not None and any(link.info is not None and link.info.reads_predictions for link in pool.links.values())

    def wake_waiting(self) -> None:
        """Wakes the requests that wait for a worker to connect."""
        self._worker_connected.set()

    async def wait_for(self, name: str | None, caller: Caller) -> ModelInfo:
        """Returns the model of this name, or the caller's default model for None. Waits while its first worker may connect.

        Raises:
            ApiError: No model has this name, the caller may not use it, or none of its workers connected in time.
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
        """Returns `name`; for None, the caller's default model. Raises ApiError 403 if the caller may not use the model."""
        if name is None:
            usable = [each for each in self.names() if caller.may_use(each)]
            name = self._first_known(usable) or next(iter(usable), None)
        if name is None or not caller.may_use(name):
            raise model_not_allowed()
        return name

    def _first_known(self, names: Collection[str]) -> str:
        """Returns the first name of the setting `models` that is in `names` and has a pool.

        Without such a name, returns the alphabetically first of `names` that has a pool, or "" if no name has one.
        """
        known = self._pools.keys() & names
        return next((name for name in self.expected if name in known), min(known, default=""))

    def _find(self, name: str | None) -> ModelInfo | None:
        if name is None:
            return self.default
        pool = self._pools.get(name)
        return None if pool is None else pool.model

    async def _wait(self, name: str | None, until: float) -> None:
        """Waits until a worker connects, or until loop time `until`. Raises ApiError if max_waiting_requests is reached."""
        if self.num_unplaced.total() >= self._settings.max_waiting_requests:
            raise self._refusals.full()
        requested = next(iter(self.expected), "") if name is None else name
        counted_name = requested if requested in self.expected else ""
        self.num_unplaced[counted_name] += 1
        try:
            with suppress(TimeoutError):  # wait_for checks the time
                async with asyncio.timeout_at(until):
                    self._worker_connected.clear()
                    await self._worker_connected.wait()
        finally:
            self.num_unplaced[counted_name] -= 1


class Waiting:
    """Moves choices into and out of `queue`, `moved` and `parked` of all pools, and owns their timers."""

    def __init__(self, settings: GatewaySettings, refusals: Refusals, metrics: GatewayMetrics, place: Place) -> None:
        """Prepares the waits. `place` is Dispatcher._place()."""
        self._settings = settings
        self._refusals = refusals
        self._metrics = metrics
        self._place = place

    def wait(self, pool: Pool, placements: Sequence[Placement]) -> None:
        """Queues the choices of one request.

        Raises:
            ApiError: The queue has too few free positions, or all workers of the model refuse new requests. The queue is then
                unchanged.
        """
        if placements and pool.refuses_new:
            raise self._refusals.refusing()
        try:
            displaced = pool.queue.push_all([(each, _api_key(each), self._queue_priority(each)) for each in placements])
        except QueueFull:
            raise self._refusals.full() from None
        for placement in placements:
            self._begin(placement, moved=False)
        for placement in displaced:
            self._end(placement)
            if placement.request.begun:
                self.queue_first(placement)
            else:
                placement.request.fail(self._refusals.full())

    def queue_first(self, placement: Placement) -> None:
        """Queues a choice that has lost its worker. It is placed before the choices of the pool's queue."""
        placement.pool.moved[placement] = None
        self._begin(placement, moved=True)

    def park(self, placement: Placement) -> None:
        """Parks a turn of a session until the session's worker is connected. Raises ApiError if too many turns wait."""
        parked = placement.pool.parked
        if len(parked) >= self._settings.max_waiting_requests:
            raise sessions.session_worker_away(self._settings.retry_after_s)
        parked[placement] = None
        self._begin(placement, moved=False)

    def wake_parked(self, pool: Pool) -> None:
        """Places parked choices after a worker has connected, or after the pause of a worker has ended."""
        for placement in list(pool.parked):
            if placement in pool.parked and self._place(placement):
                self._end(placement)
                del pool.parked[placement]

    def fail_all(self, pool: Pool, error: ApiError) -> None:
        """Fails the requests of all choices that wait for a pool whose model is no longer served."""
        for placement in (*pool.queue, *pool.moved, *pool.parked):
            placement.request.fail(error)

    def fail_unservable(self, pool: Pool, may_serve: Callable[[ModelVersion], bool]) -> None:
        """Fails begun requests whose model version no worker has, and new requests if all workers refuse new requests.

        Args:
            may_serve: Returns whether a worker has a model version, or may have it when it connects.
        """
        for placement in list(pool.moved):
            version = placement.model_version if placement.has_begun else None
            if placement in pool.moved and version is not None and not may_serve(version):
                placement.request.fail(self._refusals.weights_gone())
        if pool.refuses_new:
            for placement in (*pool.queue, *pool.moved):
                if not placement.has_begun and not placement.request.begun:
                    placement.request.fail(self._refusals.refusing())

    def remove(self, placement: Placement) -> None:
        """Removes a choice from the container in which it waits. Has no effect if it does not wait."""
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
        """Schedules _pump(), which places waiting choices, for the next iteration of the event loop."""
        if pool.num_waiting and not pool.pumping:
            pool.pumping = True
            asyncio.get_running_loop().call_soon(self._pump, pool)

    def _pump(self, pool: Pool) -> None:
        pool.pumping = False
        full = False
        for placement in list(pool.moved):
            full = full or not pool.has_free_slot(begun=True)
            if full and placement.reader is None:
                continue  # while all workers are full, only a choice with prefetched pages can be placed, in its reserved slot
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
        """Charges the API key of a choice for the tokens that have not been charged yet."""
        choice = placement.choice
        due = placement.charge(len(choice.prompt.ids) + OUTPUT_WEIGHT * len(choice.output_ids))
        if due > 0:
            placement.pool.queue.charge(_api_key(placement), due)

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
        elif placement.has_begun and not pool.can_continue(placement):
            request.fail(self._refusals.paused() if pool.is_paused_for(placement) else self._refusals.weights_gone())
        elif request.begun:  # a request with output may wait until its own time limit
            placement.prolong_wait(self._settings.queue_timeout_s, partial(self._expire, placement))
        else:
            request.fail(self._refusals.busy())

    def _queue_priority(self, placement: Placement) -> int:
        if placement.request.caller.background:
            return BACKGROUND
        if not self._settings.enable_priority_scheduling:
            return 0
        priority = placement.choice.priority
        return -priority if self._settings.schedule_low_priority_values_first else priority


def _api_key(placement: Placement) -> str:
    """Returns the name of the API key of the choice."""
    return placement.request.key


class Pace:
    """Estimates Retry-After of a 503 from the rate at which choices complete."""

    def __init__(self, waiting: Callable[[], int], least_s: int, clock: Callable[[], float]) -> None:
        """Starts the first window.

        Args:
            waiting: Returns the number of choices that wait for a worker.
            least_s: Smallest Retry-After in seconds, which applies if no choice waits.
            clock: Returns seconds.
        """
        self._waiting = waiting
        self._least_s = least_s
        self._clock = clock
        self._begun = clock()
        self._num_before = 0  # completed choices of the previous window
        self._num_now = 0  # completed choices of the current window

    def completed(self) -> None:
        """Counts a choice that a worker has ended. A choice that its client or the gateway aborts does not count."""
        self._advance_window()
        self._num_now += 1

    def retry_after_s(self) -> int:
        """Returns the seconds until the last waiting choice is served at the recent rate, from least_s to LONGEST_S.

        The rate covers the time since the start of the previous window. If no choice has completed in this time, returns the
        length of this time.
        """
        self._advance_window()
        waiting = self._waiting()
        if not waiting:
            return self._least_s
        counted_s = self._clock() - self._begun + WINDOW_S
        done = self._num_before + self._num_now
        seconds = counted_s * waiting / done if done else counted_s
        return int(min(max(-(-seconds // 1), self._least_s), LONGEST_S))

    def _advance_window(self) -> None:
        passed = self._clock() - self._begun
        if passed >= WINDOW_S:
            self._num_before = self._num_now if passed < 2 * WINDOW_S else 0
            self._num_now = 0
            self._begun += passed // WINDOW_S * WINDOW_S
