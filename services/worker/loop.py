"""The worker's loop: the order of calls between inbox, core, executor and outbox. It decides nothing.

Runs on a thread of its own, the only one that touches the core and the executor. With overlap, step N+1 is planned and
launched before step N is committed; without, the same loop commits first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.shared.log import fields
from services.worker.core.messages import StepOutput, StepStats, Submit
from services.worker.core.plan import BatchPlan
from services.worker.core.scheduler import Scheduler
from services.worker.exec.protocol import Executor, ExecutorError, Run
from services.worker.inbox import Abort, Inbox, Message, PeerGone, Stop

logger = logging.getLogger(__name__)

IDLE_CHECK_S = 1.0  # idle for so long: check the invariants once


class Outbox(Protocol):
    """Takes outputs off the loop's thread; returns at once."""

    def send(self, output: StepOutput) -> None: ...


class Observer(Protocol):
    """Sees what the loop does, for metrics and the watchdog. Called on the loop's thread; returns at once."""

    def planned(self, plan: BatchPlan) -> None: ...

    def turned(self, stats: StepStats, busy: bool) -> None: ...


@dataclass(slots=True)
class _Flight:
    """A launched step; `error` in place of a run where launching it failed."""

    plan: BatchPlan
    run: Run | None
    error: str = ""


class Loop:
    def __init__(
        self,
        core: Scheduler,
        executor: Executor,
        inbox: Inbox,
        outbox: Outbox,
        observer: Observer,
        overlap: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._executor = executor
        self._inbox = inbox
        self._outbox = outbox
        self._observer = observer
        self._overlap = overlap
        self._clock = clock
        self._checked = False

    def run(self) -> None:
        """Until a Stop message. Raises nothing: a failing step ends its own requests, a failing message its own request."""
        prev: _Flight | None = None
        stuck = False
        while self._drain(prev is None, stuck):
            if not self._overlap:
                self._commit(prev)
                prev = None
            plan = self._core.plan(self._clock())
            flight = self._launch(plan) if plan is not None else None
            stuck = flight is None and prev is None
            self._commit(prev)
            if flight is not None and flight.run is not None:
                self._executor.sample(flight.run, {})
            self._tell(busy=not stuck)
            prev = flight
        self._commit(prev)
        self._tell(busy=False)

    def _drain(self, may_block: bool, stuck: bool) -> bool:
        """Applies messages; blocks for one while there is nothing to do. False: a Stop was among them."""
        idle = may_block and self._core.idle
        wait_s = IDLE_CHECK_S if idle else 0.001 if stuck else 0.0
        messages = self._inbox.drain(wait_s)
        if idle and not messages:
            self._check_idle()
        return not [message for message in messages if not self._apply(message)]

    def _apply(self, message: Message) -> bool:
        now = self._clock()
        self._checked = False
        match message:
            case Submit():
                self._submit(message, now)
            case Abort(peer, handle):
                self._core.abort(peer, handle, now)
            case PeerGone(peer):
                self._core.abort_peer(peer, now)
            case Stop():
                self._core.end_all("the worker is stopping", now)
                return False
        return True

    def _submit(self, message: Submit, now: float) -> None:
        try:
            self._core.submit(message, now)
        except ValueError as error:
            logger.warning("submit refused: %s", error, extra=fields(request_id=message.request_id))

    def _launch(self, plan: BatchPlan) -> _Flight:
        self._observer.planned(plan)
        try:
            return _Flight(plan, self._executor.forward(plan))
        except ExecutorError as error:
            return _Flight(plan, None, str(error))

    def _commit(self, flight: _Flight | None) -> None:
        if flight is None:
            return
        error = flight.error
        if flight.run is not None:
            try:
                result = self._executor.wait(flight.run)
            except ExecutorError as failure:
                error = str(failure)
            else:
                self._core.commit(result, self._clock())
                return
        logger.error("step %d failed: %s", flight.plan.step_id, error)
        self._core.fail(flight.plan.step_id, "the step that computed this request failed", self._clock())

    def _tell(self, busy: bool) -> None:
        output = self._core.take_output()
        if output is not None:
            self._outbox.send(output)
        self._observer.turned(self._core.stats(), busy)

    def _check_idle(self) -> None:
        """Once per idle spell. What is found is logged and mended: an idle worker's memory can always start over."""
        if self._checked:
            return
        self._checked = True
        for violation in self._core.self_check():
            logger.error("invariant broken while idle, memory reset: %s", violation)
        self._observer.turned(self._core.stats(), False)
