"""Computes one background response at the gateway that has its lease, and retries until the response is complete.

    taken ──► computed ──► finished
                │  no free slot, no worker, overload: retry from the stored state
                ▼
              failed

The state of a response is only in the store. A gateway that takes over a response continues it after the stored tokens,
as after the loss of a worker. The events continue with the next sequence number.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rootstock_llm.services.gateway.background.journal import STORE_AWAY, Journal, JournalSink, with_store_retries
from rootstock_llm.services.gateway.background.ports import Answers
from rootstock_llm.services.gateway.generation.choice import Choice, EarlierOutput
from rootstock_llm.services.gateway.generation.errors import ApiError, internal, timed_out
from rootstock_llm.services.gateway.generation.origin import Caller, Origin
from rootstock_llm.services.gateway.generation.request import GenerationRequest, ModelVersion
from rootstock_llm.services.gateway.generation.running import KeyAdmission
from rootstock_llm.services.gateway.generation.usage import access_state
from rootstock_llm.services.gateway.observe.access_log import AccessLog
from rootstock_llm.services.gateway.observe.metrics import GatewayMetrics
from rootstock_llm.services.gateway.service.sink import GenerationCall, Prepare, RunGeneration
from rootstock_llm.services.gateway.store.background_past import pages
from rootstock_llm.services.gateway.store.background_record import BackgroundOrder, BackgroundStatus, Stored
from rootstock_llm.services.gateway.store.background_store import BackgroundStore
from rootstock_llm.services.gateway.store.lease import Lease, LeaseLost
from rootstock_llm.services.gateway.store.state_store import StoreAway
from rootstock_llm.services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

PAUSES_S = (0.5, 15.0)  # pause after the first failed attempt, and the longest pause, in seconds; pauses double
TRIES = 4  # the response fails after this many failures that the request may have caused
MAX_TAKES = 4  # the response fails after this number of gateways in a row were lost soon after they took it
ROUTE = "/v1/responses"
_FINAL = frozenset(  # codes of errors after which a retry cannot succeed
    ("weights_not_served", "lease_lost", STORE_AWAY)
)


@dataclass(frozen=True, slots=True)
class FirstAttempt:
    """The client's request for a new response. Only the first attempt uses it; later attempts read the store."""

    stored: Stored  # state of the response that `open` will store
    request: GenerationRequest
    caller: Caller
    admission: KeyAdmission | None  # the request's share of its API key's limits, or None if the key has no limits
    open: Callable[[], Awaitable[None]]  # stores the response; raises ApiError


@dataclass(frozen=True, slots=True)
class RunPorts:
    """The objects and functions of the gateway that all runs share."""

    store: BackgroundStore
    answers: Answers  # prepares and renders the responses of the runs
    run: RunGeneration  # serves one attempt
    callers: Callable[[str, float], Caller]  # API key's name, Unix time of the client's request → caller; raises ApiError
    computed_by: Callable[[Choice], tuple[ModelVersion | None, str]]  # model version and numerics of a choice's output
    wrote: Callable[[str], None]  # called with a response's id after new events of it are stored
    metrics: GatewayMetrics
    access: AccessLog


class BackgroundRun:
    """The work of this gateway on one background response. Implements background_runner.Run."""

    def __init__(self, ports: RunPorts, lease: Lease, order: BackgroundOrder, first: FirstAttempt | None = None) -> None:
        """Creates a run.

        Args:
            first: The client's request, for begin(). None for resume(), whose response is already stored.
        """
        self.lease = lease
        self.order = order
        self._ports = ports
        self._first = first
        self._begun = False
        self._last_journal: Journal | None = None  # journal of the last attempt
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.may_be_stored = False
        if first is None:
            self.opened.set_result(None)

    @property
    def is_stored(self) -> bool:
        return self.opened.done() and not self.opened.cancelled() and self.opened.exception() is None

    @property
    def is_finishing(self) -> bool:
        return self._last_journal is not None and self._last_journal.is_finishing

    async def begin(self) -> None:
        """Runs a client's request until its response is complete. After a cancellation, another gateway continues the response.

        Raises:
            LeaseLost: Another gateway has the lease, or the response has been deleted.
            StoreAway: The store is unreachable.
        """
        self._begun = True
        await self._within_time_limit(self._begin())

    async def resume(self) -> None:
        """Runs a stored response until it is complete. Raises the same errors as begin()."""
        await self._within_time_limit(self._resume_until_complete(0, None))

    def close(self) -> None:
        """Cancels the future `opened` if it is pending. Ends the admission if begin() was cancelled before its first step."""
        if not self.opened.done():
            self.opened.cancel()
        if self._first is not None and self._first.admission is not None and not self._begun:
            self._first.admission.end(0)

    async def _within_time_limit(self, work: Awaitable[None]) -> None:
        limit = asyncio.timeout(max(0.0, self.order.ends_at - time.time()))
        try:
            async with limit:
                await work
        except TimeoutError:
            if not limit.expired():
                raise
            failure = timed_out("The response was not complete within its time limit.")
            if self.is_stored:
                await self._fail(failure)
            elif not self.opened.done():
                self.opened.set_exception(failure)
        except ApiError as error:
            if error.code != STORE_AWAY:
                raise
            raise StoreAway(error.message) from None

    async def _begin(self) -> None:
        assert self._first is not None
        stored, request = self._first.stored, self._first.request
        caller, admission = self._first.caller, self._first.admission

        async def open_stored() -> None:
            first, self._first = self._first, None  # frees the record, which may have 8 MiB
            assert first is not None
            self.may_be_stored = True
            try:
                await first.open()
            except ApiError as error:
                self.may_be_stored = error.code == STORE_AWAY
                raise
            self.may_be_stored = False
            self.opened.set_result(None)

        async def prepared(_body: Any, _origin: Any) -> GenerationRequest:
            return request

        failure = await self._attempt(stored, prepared, caller, admission, open_stored)
        if failure is not None and self.is_stored:
            own_faults = int(_may_be_caused_by_request(failure))
            if await self._retries(failure, own_faults):
                await self._resume_until_complete(own_faults, failure)

    async def _resume_until_complete(self, own_faults: int, failure: ApiError | None) -> None:
        pause, longest = PAUSES_S
        while True:
            if failure is not None:
                await asyncio.sleep(max(pause * random.uniform(0.5, 1.0), failure.retry_after_s or 0))
                pause = min(2 * pause, longest)
            stored = await self._read()
            if stored.cancelled:
                return await self._conclude(stored, BackgroundStatus.CANCELLED, None)
            if stored.takes > MAX_TAKES:
                message = f"{MAX_TAKES} gateways were lost soon after they had taken the response."
                return await self._conclude(stored, BackgroundStatus.FAILED, internal(message))
            failure = await self._try_to_resume(stored)
            if failure is None:
                return None
            own_faults += _may_be_caused_by_request(failure)
            if not await self._retries(failure, own_faults):
                return None

    async def _try_to_resume(self, stored: Stored) -> ApiError | None:
        try:
            caller = self._ports.callers(self.order.key, self.order.created_at)
        except ApiError as error:
            return error
        return await self._attempt(stored, self._ports.answers.prepare(stored), caller, None, _nothing)

    async def _attempt(
        self,
        stored: Stored,
        prepare: Prepare,
        caller: Caller,
        admission: KeyAdmission | None,
        store: Callable[[], Awaitable[None]],
    ) -> ApiError | None:
        """Makes one attempt to compute the response. Raises LeaseLost, StoreAway.

        Args:
            store: Stores the response before its first event. Does nothing if the response is already stored.

        Returns:
            The failure of the attempt, or None if the response is complete.
        """
        ports = self._ports
        progress = await _progress(stored) if stored.past.lengths.ids else None
        record = partial(ports.answers.record, self.order)
        make_renderer = partial(ports.answers.event_renderer, stored)
        sink = JournalSink(make_renderer, self._new_journal(stored), record, stored, progress, ports.computed_by, store)
        try:
            # The request gets its own task, because interrupting a request cancels the task that serves it.
            await asyncio.create_task(self._generate(prepare, caller, admission, sink))
        finally:
            if admission is not None and sink.running is None:
                admission.end(0)
        if sink.is_over:
            return None
        if sink.is_lost:
            raise LeaseLost(self.lease.name)
        failure = sink.failure or internal()
        if not self.opened.done():
            self.opened.set_exception(failure)
        elif failure.code == STORE_AWAY:
            raise StoreAway(failure.message)
        return failure

    async def _generate(self, prepare: Prepare, caller: Caller, admission: KeyAdmission | None, sink: JournalSink) -> None:
        origin = Origin(self.order.request_id, ROUTE, caller=caller, routing_key=self.order.routing_key)
        began = time.monotonic()
        try:
            await self._ports.run(GenerationCall(origin, prepare, admission=admission), sink)
        finally:
            access, failure = self._ports.access, sink.failure
            if access.enabled and sink.running is not None:
                code = "" if failure is None else failure.code or ""
                interrupted = (failure is None and not sink.is_over) or sink.is_lost
                state = access_state(sink.running, code, interrupted=interrupted)
                status = 200 if sink.is_over else failure.status if failure is not None else 0
                access.ended("background", "POST", ROUTE, state, status, 0, time.monotonic() - began)

    def _new_journal(self, stored: Stored) -> Journal:
        ports = self._ports
        self._last_journal = Journal(ports.store, self.lease, stored, partial(ports.wrote, self.order.id), ports.metrics)
        return self._last_journal

    async def _retries(self, failure: ApiError, own_faults: int) -> bool:
        """Returns whether to retry after this failure. If not, stores the response as failed.

        Args:
            own_faults: Number of failures so far that the request may have caused.
        """
        about = fields(response=self.order.id, status=failure.status, code=failure.code)
        if _may_pass(failure) and own_faults < TRIES and time.time() < self.order.ends_at:
            logger.info("a background response waits for its next attempt", extra=about)
            return True
        logger.info("a background response has failed", extra=about)
        await self._fail(failure)
        return False

    async def _fail(self, failure: ApiError) -> None:
        await self._conclude(await self._read(), BackgroundStatus.FAILED, failure)

    async def _read(self) -> Stored:
        stored = await with_store_retries(lambda: self._ports.store.read(self.order.owner, self.order.id))
        if stored is None:
            raise LeaseLost(self.lease.name)
        return replace(stored, order=self.order)  # an order may have 8 MiB; the copy that was read is dropped

    async def _conclude(self, stored: Stored, status: BackgroundStatus, error: ApiError | None) -> None:
        """Ends the response with the output that is already stored."""
        ports = self._ports
        response, events = await with_store_retries(lambda: ports.answers.concluded(stored, status, error))
        await self._new_journal(stored).finish(status, lambda: ports.answers.record(self.order, response), events)


async def _progress(stored: Stored) -> EarlierOutput:
    past, ids = stored.past, array("I")
    async for page in pages(lambda first: with_store_retries(lambda: past.ids(first))):
        ids.extend(page)
    logprobs = [rows async for page in pages(lambda first: with_store_retries(lambda: past.logprobs(first))) for rows in page]
    return EarlierOutput(ids, stored.decoded, stored.chars, stored.shown, logprobs, stored.weights, stored.numerics)


def _may_pass(failure: ApiError) -> bool:
    """Returns whether a retry may succeed.

    A 429 without Retry-After is permanent, because the request alone exceeds the limit.
    """
    if failure.code in _FINAL:
        return False
    if failure.code == "model_not_found":  # this gateway may not have discovered the model's workers yet
        return True
    return failure.status in (500, 503, 504) or (failure.status == 429 and bool(failure.retry_after_s))


def _may_be_caused_by_request(failure: ApiError) -> bool:
    """Returns whether the request may have caused the failure, for example by crashing a worker.

    After TRIES such failures, the request is not retried, so that a harmful request disturbs only a few workers.
    """
    return failure.status == 500 or failure.code == "worker_lost"


async def _nothing() -> None:
    """Stores nothing, because a resumed response is already stored."""
