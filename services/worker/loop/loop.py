"""Runs the worker's loop, which calls inbox, core, executor and outbox in order. The core makes all decisions.

The loop runs on its own thread, the only thread that uses the core and the executor. With overlap, step N+1 is planned and
launched before step N is committed. Without overlap, step N is committed first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.worker.core.contracts.counters import StepStats
from rootstock_llm.services.worker.core.contracts.grammar import Matcher
from rootstock_llm.services.worker.core.contracts.messages import PeerOutput, Prefetch, Submit, TraceEvent
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, ForwardMode
from rootstock_llm.services.worker.core.contracts.reservations import ReservationReleased
from rootstock_llm.services.worker.core.control import SchedulerControl
from rootstock_llm.services.worker.core.kv.cache_events import CacheEvents
from rootstock_llm.services.worker.core.planning.step_rows import Extend
from rootstock_llm.services.worker.core.scheduler import Scheduler
from rootstock_llm.services.worker.exec.contracts.protocol import NO_MASKS, DraftTokens, Executor, ExecutorError, Masks, Run
from rootstock_llm.services.worker.loop.inbox import (
    Abort,
    CloseSession,
    Command,
    FactsReady,
    GrammarFailed,
    GrammarReady,
    Inbox,
    Message,
    OpenSession,
    Pace,
    PeerGone,
    PendingCommands,
    PrefetchMore,
    Stop,
    TurnedAway,
)

logger = logging.getLogger(__name__)

IDLE_CHECK_S = 1.0  # longest wait in seconds for messages while idle; then the invariants are checked once
# Seconds to wait for messages if no request can run. The time is short, because deadlines pass without a message, and operations
# of the fake executor end without one.
STUCK_WAIT_S = 0.001
PAUSED_WAIT_S = 0.05  # seconds to wait for messages while the scheduler is paused
STOPPING = "the worker is stopping"


class Outbox(Protocol):
    """Takes outputs from the loop's thread. send() does not block."""

    def send(self, outputs: tuple[PeerOutput, ...]) -> None: ...


class MaskSource(Protocol):
    """Fills the grammar masks of a step on the loop's thread while the step computes.

    The executor may read the masks until wait() of the step has returned.
    """

    def fill(self, matchers: Sequence[tuple[int, Matcher]]) -> Masks:
        """Returns the masks for the sampled token of each row. `matchers` has (plan row, matcher)."""

    def fill_after_drafts(self, matchers: Sequence[tuple[int, Matcher]], draft_tokens: DraftTokens) -> Masks:
        """Returns the masks of the position after each draft token, by plan row."""


class Observer(Protocol):
    """Observes the loop for metrics, the watchdog and load reports. Called on the loop's thread; no call may block."""

    def rests(self) -> None:
        """Called before the loop waits for messages. No step is in flight."""

    def wakes(self) -> None:
        """Called after the wait for messages."""

    def commanded(self, deadline: float | None) -> None:
        """Called before and after an operator's command runs on this thread.

        Args:
            deadline: the command's deadline on the loop's clock; None in the call after the command.
        """

    def planned(self, plan: BatchPlan) -> None:
        """Called before a step is launched."""

    def ended(self, plan: BatchPlan, seconds: float) -> None:
        """Called when the result of a step is ready.

        Args:
            plan: the step.
            seconds: time since the later of two events: the step's launch and the end of the previous step.
        """

    def iteration_ended(self, stats: StepStats, busy: bool) -> None:
        """Called at the end of each iteration, before its outputs are sent. `busy` is False if no step was in flight."""

    def cached(self, events: CacheEvents) -> None:
        """Called with the changes of the prefix cache in an iteration."""


class Spans(Protocol):
    """Records the times of request events. Called on the loop's thread; no call may block."""

    def launched(self, step_id: int, extends: Sequence[Extend], at: float) -> None: ...

    def committed(self, step_id: int) -> None: ...

    def happened(self, events: Sequence[TraceEvent]) -> None: ...

    def sent(self, outputs: tuple[PeerOutput, ...]) -> None: ...


@dataclass(slots=True)
class _Flight:
    """A launched step."""

    plan: BatchPlan
    run: Run | None  # None if the launch failed
    launched_at: float
    error: str = ""  # reason why the launch failed; empty if it succeeded


class Loop:
    """The loop of one core and one executor."""

    def __init__(
        self,
        core: Scheduler,
        executor: Executor,
        inbox: Inbox,
        outbox: Outbox,
        observer: Observer,
        masks: MaskSource,
        overlap: bool,
        consecutive_prefill_overlap: bool = True,
        clock: Callable[[], float] = time.monotonic,
        spans: Spans | None = None,
    ) -> None:
        """Prepares the loop; run() starts it.

        Args:
            core: the scheduler.
            executor: computes the steps.
            inbox: messages to the loop.
            outbox: sends outputs to the gateways.
            observer: is called at each stage of an iteration.
            masks: fills grammar masks.
            overlap: whether step N+1 is planned and launched before step N is committed.
            consecutive_prefill_overlap: whether two consecutive extend steps also overlap. If False, the first tokens of step N
                are sent before step N+1 is launched, which lowers their latency (SGLang's is_disable_overlap_for_batch).
            clock: returns the time in seconds.
            spans: records times for traces; None without tracing.
        """
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
        self._launched_at = 0.0  # time of the last launch
        self._ended_at = 0.0  # time at which the last result was ready
        self._clock = clock
        self._spans = spans
        self._num_traced = 0  # number of the core's trace events that `spans` has received
        self._checked = False  # whether the invariants were checked since the last message

    def run(self) -> None:
        """Runs until a Stop message. Then commits the step in flight and ends all requests.

        A failed step raises no exception; it ends only its requests. An invalid submit is logged.
        """
        prev: _Flight | None = None
        stuck = False
        while self._drain(prev is None, stuck):
            if not self._overlap or self._commands.wants_drained:
                self._commit(prev)
                prev = None
            self._run_commands(prev is None)
            self._core.begins_copies = not self._commands.waits_for_settling
            plan = self._core.plan(self._clock()) if self._launch_delay_s() <= 0 else None
            self._pass_reservations()
            if plan is not None and plan.operations:
                self._executor.transfer(plan.operations)
            if plan is not None and not plan.num_rows:
                plan = None
            if plan is not None and prev is not None and not self._may_overlap(prev.plan, plan):
                self._commit(prev)
                prev = None
                self._report(busy=True)
            flight = self._launch(plan) if plan is not None else None
            stuck = flight is None and prev is None
            self._commit(prev)
            if flight is not None and flight.run is not None:
                self._sample(flight.plan, flight.run)
            self._report(busy=not stuck)
            prev = flight
        self._commit(prev)
        for message in self._inbox.drain(0.0):
            self._apply(message)
        self._core.end_all(STOPPING, self._clock())
        self._commands.end()
        self._report(busy=False)

    def _sample(self, plan: BatchPlan, run: Run) -> None:
        """Fills the grammar masks of a launched step and samples its tokens.

        For rows with draft tokens, also fills the mask of the position after each draft token.
        """
        matchers = self._core.matchers()
        masks = self._masks.fill(matchers) if matchers else NO_MASKS
        behind = NO_MASKS
        if len(plan.drafts) and any(plan.drafts[row] for row, _ in matchers):
            behind = self._masks.fill_after_drafts(matchers, self._executor.draft_tokens(run))
        self._executor.sample(run, masks, behind)

    def _pass_reservations(self) -> None:
        """Passes opened and closed KV reservations to the executor.

        Must be called before the next step, which may overwrite the pages of a closed reservation. Must also be called before the
        next outputs, which may announce an opened reservation to a gateway.
        """
        events = self._core.take_reservation_events()
        if events is not None:
            self._executor.change_reservations(events)

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
        self._commands.drop_expired(now)

    def _drain(self, may_block: bool, stuck: bool) -> bool:
        """Applies all messages. If `may_block` is True, first waits for messages as long as _wait_s() allows.

        Args:
            may_block: whether no step is in flight.
            stuck: whether the last iteration had no step in flight and launched none.

        Returns:
            False if one of the messages is Stop.
        """
        idle = may_block and self._core.idle and not len(self._commands)
        messages = self._wait_for_messages(self._wait_s(idle, stuck)) if may_block else self._inbox.drain(0.0)
        self._take_facts()
        if idle and not messages:
            self._check_idle()
        return not [message for message in messages if not self._apply(message)]

    def _wait_for_messages(self, wait_s: float) -> list[Message]:
        """Waits up to `wait_s` seconds for messages and returns them."""
        self._observer.rests()
        messages = self._inbox.drain(wait_s)
        self._observer.wakes()
        return messages

    def _wait_s(self, idle: bool, stuck: bool) -> float:
        """Returns the longest time in seconds to wait for messages while no step is in flight. `stuck`: see _drain()."""
        if idle:
            return 0.0 if self._core.has_cache_events else IDLE_CHECK_S
        slowed = max(self._launch_delay_s(), 0.0)
        if not stuck:
            return slowed
        return max(slowed, PAUSED_WAIT_S if self._core.paused else STUCK_WAIT_S)

    def _launch_delay_s(self) -> float:
        """Returns the seconds until Pace.step_delay_s allows the next launch; at most 0 if it is allowed now."""
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
                core.release_refused(peer, handle, source, now)
            case PeerGone(peer):
                core.abort_peer(peer, now)
            case GrammarReady(spec):
                core.grammar_ready(spec)
            case GrammarFailed(spec, reason, busy):
                core.grammar_failed(spec, reason, now, busy)
            case OpenSession(session_id, capacity, ttl_s, refusal):
                if refusal.set_running_or_notify_cancel():  # False if the caller has cancelled the call
                    refusal.set_result(core.closed or core.open_session(session_id, capacity, ttl_s, now))
            case CloseSession(session_id, closed):
                if closed.set_running_or_notify_cancel():
                    closed.set_result(core.close_session(session_id))
            case Command():
                self._commands.add(message, now)
            case FactsReady():
                pass  # each iteration reads the completion reports
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
        self._commit_result(flight)
        if self._spans is not None:
            self._spans.committed(flight.plan.step_id)

    def _commit_result(self, flight: _Flight) -> None:
        """Waits for the result of a step and commits the result. If the step has failed, ends its requests."""
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

    def _report(self, busy: bool) -> None:
        """Reports an iteration to the observer, and then sends its outputs.

        In this order, the reported number of KV reservations is already current when a drain sees the end of the last request.
        """
        self._pass_reservations()
        outputs = self._core.take_output()
        self._observer.iteration_ended(self._core.stats(), busy)
        if self._spans is not None:
            self._trace(self._spans, outputs)
        if outputs:
            self._outbox.send(outputs)
        events = self._core.take_cache_events()
        if events is not None:
            self._observer.cached(events)

    def _trace(self, spans: Spans, outputs: tuple[PeerOutput, ...]) -> None:
        self._num_traced, events = self._control.trace_since(self._num_traced)
        spans.happened(events)
        if outputs:
            spans.sent(outputs)

    def _check_idle(self) -> None:
        """Checks the invariants once per idle period.

        A violation is logged, and the scheduler resets its memory unless operations use device pages. The reset loses cached KV
        and closes sessions. It ends no request, because the worker is idle.
        """
        if self._checked:
            return
        self._checked = True
        for violation in self._control.self_check():
            logger.error("an invariant was violated while the scheduler was idle", extra=fields(violation=violation))
        self._observer.iteration_ended(self._core.stats(), False)
