"""The worker's loop: the order of calls between inbox, core, executor and outbox. It decides nothing.

Runs on a thread of its own, the only one that touches the core and the executor. With overlap, step N+1 is planned and
launched before step N is committed; without, the same loop commits first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.shared.observe.log_fields import fields
from services.worker.core.contracts.counters import StepStats
from services.worker.core.contracts.grammar import Matcher
from services.worker.core.contracts.messages import Prefetch, StepOutput, Submit
from services.worker.core.contracts.plan import BatchPlan, ForwardMode
from services.worker.core.contracts.reservations import ReservationReleased
from services.worker.core.contracts.trace import TraceEvent
from services.worker.core.control import SchedulerControl
from services.worker.core.kv.cache_events import CacheEvents
from services.worker.core.planning.step_rows import Extend
from services.worker.core.scheduler import Scheduler
from services.worker.exec.contracts.protocol import NO_MASKS, Executor, ExecutorError, Guesses, Masks, Run
from services.worker.loop.barrier import Command, Pace
from services.worker.loop.commands import PendingCommands
from services.worker.loop.inbox import (
    Abort,
    CloseSession,
    FactsReady,
    GrammarFailed,
    GrammarReady,
    Inbox,
    Message,
    OpenSession,
    PeerGone,
    PrefetchMore,
    Stop,
    TurnedAway,
)

logger = logging.getLogger(__name__)

IDLE_CHECK_S = 1.0  # idle for so long: check the invariants once
STUCK_WAIT_S = 0.001  # nothing can run just now; what changes that may not be a message
PAUSED_WAIT_S = 0.05
STOPPING = "the worker is stopping"


class Outbox(Protocol):
    """Takes outputs off the loop's thread; returns at once."""

    def send(self, output: StepOutput) -> None: ...


class MaskFiller(Protocol):
    """Fills grammar masks on the loop's thread, while the step they are for computes. The result is read until that step's
    wait() has returned."""

    def fill(self, matchers: Sequence[tuple[int, Matcher]]) -> Masks: ...

    def behind(self, matchers: Sequence[tuple[int, Matcher]], guesses: Guesses) -> Masks: ...


class Observer(Protocol):
    """Sees what the loop does, for metrics, the watchdog and front ends. Called on the loop's thread; returns at once."""

    def rests(self) -> None:
        """Nothing is in flight; the loop waits for messages, for a bounded time."""

    def wakes(self) -> None: ...

    def commanded(self, deadline: float | None) -> None:
        """An operator's command begins, on this thread. deadline: when it should have ended, on the loop's clock; None: it
        has."""

    def planned(self, plan: BatchPlan) -> None:
        """The step is about to be launched."""

    def ended(self, plan: BatchPlan, seconds: float) -> None:
        """A step has its result. seconds: since its launch, or since the end of the one before it, if that came later."""

    def turned(self, stats: StepStats, busy: bool) -> None: ...

    def cached(self, events: CacheEvents) -> None: ...


class Spans(Protocol):
    """Notes when things happen to requests. Called on the loop's thread; returns at once."""

    def launched(self, step_id: int, extends: Sequence[Extend], at: float) -> None: ...

    def committed(self, step_id: int) -> None: ...

    def happened(self, events: Sequence[TraceEvent]) -> None: ...

    def told(self, output: StepOutput) -> None: ...


@dataclass(slots=True)
class _Flight:
    """A launched step; `error` in place of a run where launching it failed."""

    plan: BatchPlan
    run: Run | None
    launched_at: float
    error: str = ""


class Loop:
    """overlap: plan step N+1 before step N is committed. consecutive_prefill_overlap: also where both are extends; without
    it the first token of step N goes out before step N+1 is launched, for the sake of its latency (SGLang's
    is_disable_overlap_for_batch)."""

    def __init__(
        self,
        core: Scheduler,
        executor: Executor,
        inbox: Inbox,
        outbox: Outbox,
        observer: Observer,
        masks: MaskFiller,
        overlap: bool,
        consecutive_prefill_overlap: bool = True,
        clock: Callable[[], float] = time.monotonic,
        spans: Spans | None = None,
    ) -> None:
        self._core = core
        self._control = SchedulerControl(core)
        self._executor = executor
        self._inbox = inbox
        self._outbox = outbox
        self._observer = observer
        self._masks = masks
        self._overlap = overlap
        self._consecutive_prefill_overlap = consecutive_prefill_overlap
        self._pace = Pace()
        self._commands = PendingCommands(core, self._control, executor, self._pace, observer.commanded)
        self._launched_at = 0.0
        self._ended_at = 0.0
        self._clock = clock
        self._spans = spans
        self._num_traced = 0  # of the core's trace events
        self._checked = False

    def run(self) -> None:
        """Until a Stop message: then what is in flight still counts, and the rest ends. Raises nothing: a failing step ends its
        own requests, a failing message its own request."""
        prev: _Flight | None = None
        stuck = False
        while self._drain(prev is None, stuck):
            if not self._overlap or self._commands.wants_drained:
                self._commit(prev)
                prev = None
            self._run_commands(prev is None)
            self._core.begins_copies = not self._commands.waits_for_settling
            plan = self._core.plan(self._clock()) if self._slowed_s() <= 0 else None
            self._tell_rooms()
            if plan is not None and plan.operations:
                self._executor.transfer(plan.operations)
            if plan is not None and not plan.num_rows:
                plan = None
            if plan is not None and prev is not None and not self._may_overlap(prev.plan, plan):
                self._commit(prev)
                prev = None
                self._tell(busy=True)
            flight = self._launch(plan) if plan is not None else None
            stuck = flight is None and prev is None
            self._commit(prev)
            if flight is not None and flight.run is not None:
                self._sample(flight.plan, flight.run)
            self._tell(busy=not stuck)
            prev = flight
        self._commit(prev)
        for message in self._inbox.drain(0.0):
            self._apply(message)
        self._core.end_all(STOPPING, self._clock())
        self._commands.end()
        self._tell(busy=False)

    def _sample(self, plan: BatchPlan, run: Run) -> None:
        """What is guessed behind a row's next token has become known by the time that token's mask is filled."""
        matchers = self._core.matchers()
        masks = self._masks.fill(matchers) if matchers else NO_MASKS
        behind = NO_MASKS
        if len(plan.drafts) and any(plan.drafts[row] for row, _ in matchers):
            behind = self._masks.behind(matchers, self._executor.guesses(run))
        self._executor.sample(run, masks, behind)

    def _tell_rooms(self) -> None:
        """Before a step that may write what was in them, and before front ends hear of them."""
        events = self._core.take_reservation_events()
        if events is not None:
            self._executor.rooms(events)

    def _take_facts(self) -> None:
        for fact in self._executor.facts():
            self._core.ended(fact, self._clock())

    def _may_overlap(self, prev: BatchPlan, plan: BatchPlan) -> bool:
        return self._consecutive_prefill_overlap or not (prev.mode is ForwardMode.EXTEND and plan.mode is ForwardMode.EXTEND)

    def _run_commands(self, drained: bool) -> None:
        if not len(self._commands):
            return
        now = self._clock()
        if drained:
            self._commands.run_drained(now)
        self._commands.sweep(now)

    def _drain(self, may_block: bool, stuck: bool) -> bool:
        """Applies messages; blocks for one while there is nothing to do. False: a Stop was among them."""
        idle = may_block and self._core.idle and not len(self._commands)
        messages = self._rest(self._wait_s(idle, stuck)) if may_block else self._inbox.drain(0.0)
        self._take_facts()
        if idle and not messages:
            self._check_idle()
        return not [message for message in messages if not self._apply(message)]

    def _rest(self, wait_s: float) -> list[Message]:
        self._observer.rests()
        messages = self._inbox.drain(wait_s)
        self._observer.wakes()
        return messages

    def _wait_s(self, idle: bool, stuck: bool) -> float:
        if idle:
            return 0.0 if self._core.has_cache_events else IDLE_CHECK_S
        slowed = max(self._slowed_s(), 0.0)
        if not stuck:
            return slowed
        return max(slowed, PAUSED_WAIT_S if self._core.paused else STUCK_WAIT_S)

    def _slowed_s(self) -> float:
        """Seconds that the operator's pace keeps the next step back."""
        return self._launched_at + self._pace.step_delay_s - self._clock() if self._pace.step_delay_s else 0.0

    def _apply(self, message: Message) -> bool:
        now = self._clock()
        self._checked = False
        core = self._core
        match message:
            case Submit():
                self._submit(message, now)
            case Prefetch():
                core.prefetch(message, now)
            case PrefetchMore(peer, ready):
                core.prefetch_more(peer, ready, now)
            case Abort(peer, handle):
                core.abort(peer, handle, now)
            case TurnedAway(peer, handle, source):
                core.turned_away(peer, handle, source, now)
            case PeerGone(peer):
                core.abort_peer(peer, now)
            case GrammarReady(spec):
                core.grammar_ready(spec)
            case GrammarFailed(spec, reason, busy):
                core.grammar_failed(spec, reason, now, busy)
            case OpenSession(session_id, capacity, ttl_s, refusal):
                if refusal.set_running_or_notify_cancel():  # else its caller has left
                    refusal.set_result(core.closed or core.open_session(session_id, capacity, ttl_s, now))
            case CloseSession(session_id, closed):
                if closed.set_running_or_notify_cancel():
                    closed.set_result(core.close_session(session_id))
            case Command():
                self._commands.add(message, now)
            case FactsReady():
                pass  # they are taken with every turn
            case ReservationReleased():
                core.release_reservation(message)
            case Stop():
                core.closed = STOPPING
                return False
        return True

    def _submit(self, message: Submit, now: float) -> None:
        try:
            self._core.submit(message, now)
        except ValueError as error:
            logger.warning("submit refused: %s", error, extra=fields(request_id=message.request_id))

    def _launch(self, plan: BatchPlan) -> _Flight:
        self._observer.planned(plan)
        self._launched_at = self._clock()
        if self._spans is not None:
            self._spans.launched(plan.step_id, self._core.extends(), self._launched_at)
        try:
            return _Flight(plan, self._executor.forward(plan), self._launched_at)
        except ExecutorError as error:
            return _Flight(plan, None, self._launched_at, str(error))

    def _commit(self, flight: _Flight | None) -> None:
        if flight is None:
            return
        self._take_in(flight)
        if self._spans is not None:
            self._spans.committed(flight.plan.step_id)

    def _take_in(self, flight: _Flight) -> None:
        error = flight.error
        if flight.run is not None:
            try:
                result = self._executor.wait(flight.run)
            except ExecutorError as failure:
                error = str(failure)
            else:
                now = self._clock()
                began, self._ended_at = max(flight.launched_at, self._ended_at), now
                self._observer.ended(flight.plan, now - began)
                self._core.commit(result, now)
                return
        logger.error("step %d failed: %s", flight.plan.step_id, error)
        self._core.fail(flight.plan.step_id, "the step that computed this request failed", self._clock())

    def _tell(self, busy: bool) -> None:
        """The observer first: who hears that the last request has ended finds what is still kept of it."""
        self._tell_rooms()
        output = self._core.take_output()
        self._observer.turned(self._core.stats(), busy)
        if self._spans is not None:
            self._trace(self._spans, output)
        if output is not None:
            self._outbox.send(output)
        events = self._core.take_cache_events()
        if events is not None:
            self._observer.cached(events)

    def _trace(self, spans: Spans, output: StepOutput | None) -> None:
        self._num_traced, events = self._control.trace_since(self._num_traced)
        spans.happened(events)
        if output is not None:
            spans.told(output)

    def _check_idle(self) -> None:
        """Once per idle spell. What is found is logged and mended: an idle worker's memory can always start over."""
        if self._checked:
            return
        self._checked = True
        for violation in self._control.self_check():
            logger.error("invariant broken while idle, memory reset: %s", violation)
        self._observer.turned(self._core.stats(), False)
