"""The scheduler core. It takes messages and step results, and returns plans and outputs.

It has no clock, no I/O, no threads and no tensors, so that the same calls give the same plans. Its only caller is the worker's
loop. In each iteration, the loop passes messages, gets a plan, launches the plan, and then passes the result of the previous
step. At most one step is uncommitted when a plan is made. docs/design/scheduler.md has the rules.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import Any

from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.counters import COUNTER_NAMES, Counters, StepStats
from rootstock_llm.services.worker.core.contracts.grammar import GrammarBook, GrammarSpec, Matcher
from rootstock_llm.services.worker.core.contracts.messages import (
    ErrorCode,
    Finish,
    FinishReason,
    PagesReady,
    PeerOutput,
    Prefetch,
    Submit,
)
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, StepResult, idle_plan
from rootstock_llm.services.worker.core.contracts.reservations import KvSource, ReservationEvents, ReservationReleased
from rootstock_llm.services.worker.core.contracts.transfers import Fact, PageOperation
from rootstock_llm.services.worker.core.kv.backup_queue import BackupQueue
from rootstock_llm.services.worker.core.kv.cache_events import CacheEventLog, CacheEvents
from rootstock_llm.services.worker.core.kv.memory import KVMemory, KVShape
from rootstock_llm.services.worker.core.kv.other_tiers import TierStats
from rootstock_llm.services.worker.core.planning.committer import Committer
from rootstock_llm.services.worker.core.planning.draft_controller import DraftController
from rootstock_llm.services.worker.core.planning.expert_record import ExpertRecord
from rootstock_llm.services.worker.core.planning.planner import Planner
from rootstock_llm.services.worker.core.planning.step_rows import Extend, Step
from rootstock_llm.services.worker.core.requests.finish import CANCELLED, TextRules, refusal, refused
from rootstock_llm.services.worker.core.requests.lifecycle import RequestLifecycle, TraceLog
from rootstock_llm.services.worker.core.requests.queues import RequestQueues
from rootstock_llm.services.worker.core.requests.request import Outputs, Phase, Request, SlotColumns, make_request
from rootstock_llm.services.worker.core.requests.reservations import KvReservations
from rootstock_llm.services.worker.core.requests.sessions import SessionTable
from rootstock_llm.services.worker.core.tiers.page_keys import PageKeys
from rootstock_llm.services.worker.core.tiers.prefetches import wanted_of_prefetch
from rootstock_llm.services.worker.core.tiers.tiers import TierLimits, Tiers

TIER_FIELDS = tuple(field.name for field in fields(TierStats))


def configured_memory(
    config: SchedulerConfig, events: CacheEventLog | None = None, backups: BackupQueue | None = None
) -> KVMemory:
    sizes = config.num_pages, config.page_size, config.max_running_requests, config.max_pages_per_request
    shape = KVShape(*sizes, config.groups, config.state_interval, config.max_chunk, config.max_drafts)
    return KVMemory(shape, config.eviction_policy, config.enable_radix_cache, events, backups)


class Scheduler:
    """Queues requests, plans steps and commits their results. SchedulerControl has the operators' calls."""

    def __init__(
        self,
        config: SchedulerConfig,
        rules: TextRules,
        book: GrammarBook | None = None,
        events: CacheEventLog | None = None,
        revision: str = "",
        keys: PageKeys | None = None,
    ) -> None:
        """Starts without requests.

        Args:
            config: the configuration.
            rules: text functions for stop rules.
            book: compiled grammars; None if the worker offers no structured output.
            events: log of cached blocks; None if no prefix index reads it.
            revision: revision of the weights; empty if the weights have no revision.
            keys: maker of page keys; None if the worker has no tiers below the device and reads no other workers.
        """
        others = config.host_pages > 0 or config.reads_peers
        assert keys is not None or not others, "a worker with tiers has page keys"
        self.tiers = None if keys is None or not others else Tiers(_tier_limits(config), keys, events, revision)
        self.config = config
        self.events = events
        self.queues = RequestQueues(book)
        self.memory = configured_memory(config, events, None if self.tiers is None else self.tiers.queue)
        self.columns = SlotColumns(config.max_running_requests)
        self.counters = Counters()
        self.sessions = SessionTable(config)
        self.reservations = KvReservations(config.disaggregation_hold_s)
        self.trace = TraceLog()
        self._outputs = Outputs()
        shared = self.queues, self.memory, self.columns, self.counters
        self.lifecycle = RequestLifecycle(
            config, *shared, self.sessions, self.reservations, self._outputs, self.trace, self.tiers
        )
        draft_controller = _controller(config) if config.max_drafts else None
        self.expert_record = ExpertRecord(config.experts)
        self.planner = Planner(config, *shared, self.lifecycle, draft_controller, self.expert_record)
        self._committer = Committer(
            config.vocab_size, rules, self.memory, self.columns, self.counters, self._outputs, self.lifecycle, draft_controller
        )
        self._flight: list[Step] = []
        self._began: list[float] = []  # times of the plans of the steps in flight
        self._ended_at = 0.0
        self._next_seq = 0
        self.paused = False
        self.begins_copies = True  # whether copies to other tiers and prefetches may begin; the loop sets it
        self.num_retirements = 0  # number of deletions of a salt's device pages; makes the names of retired trees unique
        self.closed = ""  # reason why new requests are refused; empty: they are accepted
        self.revision = revision  # requests for another revision are refused

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Uses changed settings from the next plan on. The sizes of pools do not change."""
        self.config = self.lifecycle.config = self.sessions.config = config

    @property
    def idle(self) -> bool:
        """Whether the worker has no request. A step may still be uncommitted."""
        return not self.queues.by_key

    @property
    def settled(self) -> bool:
        """Whether no operation reads or writes device pages, so that the pages may be reset."""
        return self.tiers is None or not self.tiers.num_running

    @property
    def flight_step(self) -> int:
        """Number of the oldest uncommitted step, or -1."""
        return self._flight[0].plan.step_id if self._flight else -1

    @property
    def num_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self.queues.by_key)

    # Messages

    def submit(self, message: Submit, now: float) -> None:
        """Queues a request, or refuses it with an error.

        Raises:
            ValueError: another request of the gateway stream has the same handle.
        """
        if (message.peer, message.handle) in self.queues.by_key:
            raise ValueError(f"handle {message.handle} is in use")
        self.trace.now = now
        resolved = self._resolve(message, now)
        if not isinstance(resolved, Submit):
            self.lifecycle.refuse(message.peer, message.handle, message.request_id, resolved)
            self._cancel_prefetch((message.peer, message.handle))
            if message.source is not None and self.config.reads_peers:
                self.reservations.release_source(message.source)
            return
        self._next_seq += 1
        request = make_request(resolved, self._next_seq, self.config, now, self.revision)
        self.lifecycle.enqueue(request)
        if self.tiers is not None:
            request.kv.imported += self.tiers.take_prefetched((message.peer, message.handle), request.seq)
        self._begin_waiting(request, now)

    def prefetch(self, message: Prefetch, now: float) -> None:
        """Begins to read pages of a prefill worker for a request that will arrive later, if reading is faster than computing.

        Ignores the message if the worker does not serve the revision, refuses new requests or begins no copies, or if the request
        has already arrived. This is safe, because no request depends on a prefetch.
        """
        is_wanted = message.revision in ("", self.revision) and (message.peer, message.handle) not in self.queues.by_key
        if self.tiers is None or not self.config.reads_peers or not self.begins_copies or self.closed or not is_wanted:
            return
        self._next_seq += 1
        wanted = wanted_of_prefetch(message, self._next_seq, self.config, self.revision)
        self.tiers.prefetches.begin((message.peer, message.handle), wanted, self.memory, now)

    def prefetch_more(self, peer: int, ready: PagesReady, now: float) -> None:
        """Begins to read further pages for a prefetch. Does nothing if the prefetch has ended or no copies may begin."""
        if self.tiers is not None and self.begins_copies:
            request_key = peer, ready.handle
            self.tiers.prefetches.read_more(request_key, ready.reservation, ready.num_pages, self.memory, now)

    def abort(self, peer: int, handle: int, now: float) -> None:
        """Ends a request in any phase and frees its memory.

        If no request has this handle, the request has ended or has not arrived. The call then releases its reservation and its
        prefetched pages.
        """
        request = self.queues.by_key.get((peer, handle))
        if request is not None:
            self.lifecycle.end(request, CANCELLED, now)
        else:
            self.reservations.end_of_request((peer, handle))
            self._cancel_prefetch((peer, handle))

    def release_refused(self, peer: int, handle: int, source: KvSource | None, now: float) -> None:
        """Releases the prefetched pages and the KV source of a request that was refused before submit()."""
        self.abort(peer, handle, now)
        if source is not None and self.config.reads_peers:
            self.reservations.release_source(source)

    def abort_peer(self, peer: int, now: float) -> None:
        """Ends the requests, reservations and prefetches of a gateway whose stream has ended."""
        self.reservations.end_of_gateway(peer)
        if self.tiers is not None:
            self.tiers.prefetches.cancel_of_gateway(peer)
        for request in [r for r in self.queues.by_key.values() if r.peer == peer]:
            self.lifecycle.end(request, CANCELLED, now)

    def end_all(self, message: str, now: float) -> None:
        """Ends every request with the error `message`, because the worker stops."""
        ending = Finish(FinishReason.ABORT, error=ErrorCode.UNAVAILABLE, message=message)
        for request in list(self.queues.by_key.values()):
            self.lifecycle.end(request, ending, now)

    def grammar_ready(self, spec: GrammarSpec) -> None:
        """Queues the requests that waited for a grammar. Called after the grammar was compiled.

        If the book has already dropped the compiled grammar, it is compiled again, and the requests continue to wait.
        """
        for request in self.queues.gate.compiled(spec):
            self.lifecycle.ungate(request)
            self._begin_import(request)

    def grammar_failed(self, spec: GrammarSpec, reason: str, now: float, busy: bool = False) -> None:
        """Ends the requests that wait for a grammar.

        Args:
            spec: the grammar.
            reason: message to the clients.
            now: present time.
            busy: whether the compiler was overloaded or had ended. If so, requests with given output continue to wait, and the
                grammar is submitted again later.
        """
        error = ErrorCode.QUEUE_FULL if busy else ErrorCode.INVALID_ARGUMENT
        ending = refused(reason, "" if busy else "grammar", error)
        gate = self.queues.gate
        for request in gate.postpone(spec, now) if busy else gate.waiting_for(spec):
            self.lifecycle.end(request, ending, now)

    def open_session(self, session_id: str, capacity: int, ttl_s: float, now: float) -> str:
        """Opens a session, see SessionTable.open(). Returns the reason if it cannot be opened, and an empty string otherwise."""
        return self.sessions.open(session_id, capacity, ttl_s, now)

    def close_session(self, session_id: str) -> bool:
        return self.sessions.close(session_id, self.memory)

    # Steps

    def plan(self, now: float) -> BatchPlan | None:
        """Returns the next step to launch, an IDLE plan that only begins operations, or None if nothing can begin now."""
        assert len(self._flight) <= 1, "at most one step is uncommitted"
        self.trace.now = now
        if now >= self.reservations.next_expiry and self.reservations.expire(now):
            self.queues.batch_is_full = False
        operations = self._plan_operations(now) if self.tiers is not None else ()
        step = self._plan_step(now)
        if step is None:
            return idle_plan(operations) if operations else None
        if operations:
            step = replace(step, plan=replace(step.plan, operations=operations))
        self._flight.append(step)
        self._began.append(now)
        return step.plan

    def _plan_step(self, now: float) -> Step | None:
        for request, message in self.lifecycle.expired(now):
            self.lifecycle.end(request, Finish(FinishReason.ABORT, error=ErrorCode.TIMEOUT, message=message), now)
        self.sessions.expire(self.memory, now)
        self.memory.forget_empty()
        for request in self.queues.gate.resubmit(now):
            self.lifecycle.ungate(request)
            self._begin_import(request)
        for request in self.queues.gate.replay():
            self.lifecycle.ungate(request)
            self._begin_waiting(request, now)
        if self.idle:
            self.planner.rest()
            self.queues.batch_is_full = False
            return None
        if self.paused:
            return None
        if self.tiers is not None and self.tiers.take_freed():
            self.queues.batch_is_full = False
        return self.planner.plan(now, self._flight[0] if self._flight else None)

    def _plan_operations(self, now: float) -> tuple[PageOperation, ...]:
        assert self.tiers is not None, "only workers with tiers have operations"
        if self.memory.units is not None and not self.queues.num_waiting:
            self.memory.units.is_short = False
        operations, ready = self.tiers.plan(self.memory, now, bool(self._flight), self.begins_copies)
        for seq in ready:
            self.lifecycle.end_import(seq)
        return operations

    def ended(self, fact: Fact, now: float) -> None:
        """Applies a fact of the executor: the end of an operation, or changes of the storage tier."""
        assert self.tiers is not None, "only workers with tiers have facts"
        if self.tiers.ended(fact, now):
            self.queues.batch_is_full = False

    def commit(self, result: StepResult, now: float) -> None:
        """Applies the result of the oldest uncommitted step."""
        self.trace.now = now
        began = self._began[0]
        step = self._take_flight(result.step_id)
        if self.tiers is not None or self.config.adaptive_chunk_s:
            self._record_time(step.plan, began, now)
        self._ended_at = now
        self.expert_record.add(step.plan, result)
        self._committer.commit(step, result, now)

    def _record_time(self, plan: BatchPlan, began: float, now: float) -> None:
        seconds = now - max(began, self._ended_at)
        if self.tiers is not None and self.tiers.loads_since(began):
            self.tiers.step_ended(0, 0, 0.0, now)
            return
        extended = int(plan.num_tokens[: plan.num_extend].sum()) if plan.num_extend else 0
        rows = plan.num_rows - plan.num_extend
        self.planner.extends.step_ended(extended, rows, seconds)
        if self.tiers is not None:
            self.tiers.step_ended(extended, rows, seconds, now)

    def fail(self, step_id: int, message: str, now: float) -> None:
        """Ends the requests of the oldest uncommitted step with an error, because the step has failed."""
        ending = Finish(FinishReason.ABORT, error=ErrorCode.INTERNAL, message=message)
        self._ended_at = now
        if self.tiers is not None:
            self.tiers.step_ended(0, 0, 0.0, now)
        for request in self._take_flight(step_id).requests:
            if self.queues.by_key.get((request.peer, request.handle)) is request:
                self.lifecycle.end(request, ending, now)

    def matchers(self) -> list[tuple[int, Matcher]]:
        """Returns (row, matcher) for the rows of the newest uncommitted step that need a grammar mask.

        All earlier steps must be committed. Rows whose request has ended, and rows whose token is already known, are left out.
        """
        if not self._flight:
            return []
        step, columns = self._flight[-1], self.columns
        out = []
        for row in step.plan.mask_rows.tolist():
            slot, request = int(step.plan.slots[row]), step.requests[row]
            if columns.epoch[slot] == step.epochs[row] and not columns.redundant[slot] and request.matcher is not None:
                out.append((row, request.matcher))
        return out

    def extends(self) -> list[Extend]:
        """Returns the extend rows of the newest uncommitted step."""
        return self._flight[-1].extends()

    def take_output(self) -> tuple[PeerOutput, ...]:
        """Returns the messages to gateways since the last call, at most one per gateway stream."""
        return self._outputs.take()

    def release_reservation(self, released: ReservationReleased) -> None:
        self.reservations.release(released)

    def take_reservation_events(self) -> ReservationEvents | None:
        """Returns the changes of reservations since the last call, or None.

        The caller must pass them to the executor before it launches the next step and before it sends outputs to gateways.
        """
        return self.reservations.take()

    @property
    def has_cache_events(self) -> bool:
        """Whether take_cache_events() has events to return."""
        return self.events is not None and self.events.has_more

    def take_cache_events(self) -> CacheEvents | None:
        """Returns events for the prefix index that no earlier call has returned, or None."""
        return self.events.take() if self.events else None

    def stats(self) -> StepStats:
        memory, queues = self.memory, self.queues
        return StepStats(
            num_running=queues.num_running,
            max_running_requests=self.planner.extends.running_limit,
            num_waiting=queues.num_waiting,
            num_gated=len(queues.gate),
            num_retracted=queues.waiting.num_retracted,
            waiting_tokens=queues.waiting_tokens,
            pages_leased=memory.num_leased,
            pages_cached=memory.tree.num_pages,
            pages_evictable=memory.tree.num_evictable,
            pages_free=memory.pages.num_free,
            new_token_ratio=self.planner.ratio.value,
            batch_is_full=queues.batch_is_full,
            paused=self.paused,
            refuses_new=self.config.max_queued_requests == 0,
            running_by_key=_running_by_key(queues),
            requests_by_key=tuple(queues.by_routing_key.values()),
            num_sessions=len(self.sessions),
            session_tokens=self.sessions.num_tokens,
            evicted_pages_total=memory.evicted_pages_total,
            num_rooms=len(self.reservations),
            rooms_total=self.reservations.opened_total,
            expired_rooms_total=self.reservations.expired_total,
            expert_balancedness=self.expert_record.balancedness,
            **{name: getattr(self.counters, name) for name in COUNTER_NAMES},
            **self._unit_stats(),
            **self._tier_stats(),
        )

    def _unit_stats(self) -> dict[str, Any]:
        """Returns the fields of StepStats about the units of cache groups; empty without groups."""
        units, found = self.memory.units, dict[str, Any]()
        if units is not None and (windows := units.windows) is not None:
            found |= {
                "window_units": windows.num_units,
                "window_units_free": windows.num_free,
                "window_units_evictable": windows.num_evictable,
                "window_units_quarantined": len(windows.quarantined),
                "window_evicted_units_total": windows.evicted_total,
                "window_missed_pages_total": windows.missed_pages_total,
            }
        if units is not None and (states := units.states) is not None:
            found |= {
                "states": states.num_units,
                "states_free": states.num_free,
                "states_evictable": states.num_evictable,
                "states_quarantined": len(states.quarantined),
                "states_evicted_total": states.evicted_total,
                "state_missed_pages_total": states.missed_pages_total,
            }
        return found

    def _tier_stats(self) -> dict[str, Any]:
        """Returns the fields of TierStats and the number of quarantined pages; empty without tiers."""
        if self.tiers is None:
            return {}
        stats = self.tiers.stats()
        return {"pages_quarantined": len(self.memory.quarantined)} | {name: getattr(stats, name) for name in TIER_FIELDS}

    def _begin_waiting(self, request: Request, now: float) -> None:
        """Applies the given output of a request that has entered the waiting queue, and begins its import from other tiers.

        The given output may end the request.
        """
        if request.progress.num_given and request.phase is Phase.WAITING:
            self._committer.take_given(request, now)
        self._begin_import(request)

    def _cancel_prefetch(self, request_key: tuple[int, int]) -> None:
        if self.tiers is not None:
            self.tiers.prefetches.cancel(request_key)

    def _begin_import(self, request: Request) -> None:
        if self.tiers is not None and request.phase is Phase.WAITING:
            self.lifecycle.begin_import(request)

    def _resolve(self, message: Submit, now: float) -> Submit | Finish:
        """Returns the message with the session's context before its prompt, or the ending if the request is refused.

        A full queue accepts a request with given output, because the client has seen output already. The queue accepts retracted
        requests for the same reason.
        """
        if self.closed:
            return refused(self.closed, error=ErrorCode.UNAVAILABLE)
        if message.revision and message.revision != self.revision:
            return refused("this worker has another model version than the request requires", error=ErrorCode.OTHER_WEIGHTS)
        if message.session is not None:
            resolved = self.sessions.resolve(message)
            if isinstance(resolved, str):
                known = message.session.session_id in self.sessions
                return refused(resolved, "session" if known else "session.session_id")
            message = resolved
        if found := refusal(message, self.config, self.queues.gate.offers_grammars):
            return found
        full = self.queues.num_waiting >= self.config.max_queued_requests
        if full and not message.output_ids and not self._displace(message, now):
            return refused("the request queue is full", error=ErrorCode.QUEUE_FULL)
        return message

    def _displace(self, message: Submit, now: float) -> bool:
        """Ends the least urgent request that never ran, so that a more urgent request can enter the full queue.

        Returns:
            Whether a request was ended. False if priorities are disabled, or if no request that never ran is less urgent.
        """
        if not self.config.enable_priority_scheduling:
            return False
        gated = [each for each in (*self.queues.gate, *self.queues.importing.values()) if _has_never_run(each)]
        queued: Request | None = self.queues.waiting.last_fresh()
        fresh = gated if queued is None else [*gated, queued]
        last = max(fresh, key=lambda request: (request.rank, request.seq), default=None)
        if last is None or self.config.rank(message.priority) >= last.rank:
            return False
        text = "the request queue was full, and a more urgent request took this request's place"
        ending = Finish(FinishReason.ABORT, error=ErrorCode.QUEUE_FULL, message=text)
        self.lifecycle.end(last, ending, now)
        return True

    def _take_flight(self, step_id: int) -> Step:
        assert self._flight, "a result belongs to an uncommitted step"
        step = self._flight.pop(0)
        del self._began[0]
        assert step.plan.step_id == step_id, "results arrive in the order of the plans"
        return step


def _has_never_run(request: Request) -> bool:
    """Whether no worker has run the request."""
    return request.progress.queue_s < 0 and not request.progress.num_given


def _controller(config: SchedulerConfig) -> DraftController:
    slots, most = config.max_running_requests, config.max_drafts
    return DraftController(slots, most, config.speculative_adaptive, config.drafts_by_model)


def _tier_limits(config: SchedulerConfig) -> TierLimits:
    return TierLimits(
        host_pages=config.host_pages,
        has_storage=config.has_storage,
        page_bytes=config.page_bytes,
        page_size=config.page_size,
        policy=config.hicache_write_policy,
        salt_pages=config.pages_within(config.hicache_salt_quota),
        stored_salt_pages=config.pages_within(config.hicache_storage_salt_quota),
        hold_s=config.disaggregation_hold_s,
        num_parts=tuple(group.num_parts(max(config.page_bytes, 1)) for group in config.groups),
    )


def _running_by_key(queues: RequestQueues) -> tuple[int, ...]:
    """Returns the numbers of running requests per routing key. Keys without running requests are left out."""
    if not queues.by_routing_key:
        return ()
    return tuple(Counter(request.routing_key for request in queues.running() if request.routing_key).values())
