"""The moves of requests between the queues, with their effects on memory, columns, trace events and outputs.

Every queued request ends by end(), which frees its memory and emits its terminal output. This module also has the time limits of
waiting and running requests.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice

from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.counters import Counters
from rootstock_llm.services.worker.core.contracts.messages import Finish, FinishReason, PagesReady, TraceEvent, TraceKind
from rootstock_llm.services.worker.core.contracts.reservations import OpenReservation
from rootstock_llm.services.worker.core.contracts.transfers import Tier
from rootstock_llm.services.worker.core.kv.memory import KVMemory, Lease
from rootstock_llm.services.worker.core.kv.other_tiers import OtherTiers, Wanted
from rootstock_llm.services.worker.core.kv.radix_cache import is_retired
from rootstock_llm.services.worker.core.kv.tree_node import TOKEN_BYTES, TreeNode
from rootstock_llm.services.worker.core.requests.queues import RequestQueues
from rootstock_llm.services.worker.core.requests.request import Outputs, Phase, Request, SlotColumns
from rootstock_llm.services.worker.core.requests.reservations import KvReservations
from rootstock_llm.services.worker.core.requests.sessions import SessionTable

MAX_EVENTS = 16384  # largest number of events in the trace log
# Largest number of searches of other tiers per wait of a request: one when the wait begins, and one before the admission.
MAX_TIER_LOOKUPS = 2


class Deadlines:
    """The time limits of all requests. The limit of an ended request stays until it is reached or keep() drops it."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, tuple[int, int]]] = []  # (absolute time, seq, (peer, handle))

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, at: float, request: Request) -> None:
        heapq.heappush(self._heap, (at, request.seq, (request.peer, request.handle)))

    def due(self, now: float, requests: Mapping[tuple[int, int], Request]) -> list[tuple[float, Request]]:
        """Removes the time limits that have been reached.

        Args:
            now: present time.
            requests: the requests that have not ended, by (peer, handle).

        Returns:
            (time limit, request) for each removed limit whose request is in `requests`, earliest limit first.
        """
        out = []
        while self._heap and self._heap[0][0] <= now:
            at, seq, key = heapq.heappop(self._heap)
            request = requests.get(key)
            if request is not None and request.seq == seq:
                out.append((at, request))
        return out

    def keep(self, seqs: set[int]) -> None:
        """Drops the limits of requests whose seq is not in `seqs`."""
        self._heap = [entry for entry in self._heap if entry[1] in seqs]
        heapq.heapify(self._heap)


class TraceLog:
    """The latest MAX_EVENTS trace events of all requests. They show why a request was slow."""

    def __init__(self) -> None:
        self.now = 0.0  # time of the next events; Scheduler.submit(), plan() and commit() set it
        self._count = 0  # number of events since the start
        self._events: deque[TraceEvent] = deque(maxlen=MAX_EVENTS)

    def add(self, request_id: str, kind: TraceKind, detail: int) -> None:
        self._events.append(TraceEvent(self.now, request_id, kind, detail))
        self._count += 1

    def of(self, request_id: str) -> list[TraceEvent]:
        """Returns the events of a request that are still in the trace log, oldest first."""
        return [event for event in self._events if event.request_id == request_id]

    def since(self, count: int) -> tuple[int, list[TraceEvent]]:
        """Returns the number of events since the start, and the events after the first `count`, oldest first.

        Events that the log no longer has are missing.
        """
        assert 0 <= count <= self._count, "count is at most the number of events"
        latest = list(islice(reversed(self._events), self._count - count))
        return self._count, latest[::-1]


class RequestLifecycle:
    """Moves requests between the queues, together with their memory, columns, session, reservation and outputs.

    The planners, the committer and the scheduler call it. It is the only caller of the moves of RequestQueues.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        queues: RequestQueues,
        memory: KVMemory,
        columns: SlotColumns,
        counters: Counters,
        sessions: SessionTable,
        reservations: KvReservations,
        outputs: Outputs,
        trace: TraceLog,
        tiers: OtherTiers | None,
    ) -> None:
        self.config = config  # replaced by Scheduler.reconfigure()
        self._queues, self._memory, self._columns = queues, memory, columns
        self._counters, self._sessions, self._reservations = counters, sessions, reservations
        self._outputs, self._trace, self._tiers = outputs, trace, tiers
        self._deadlines = Deadlines()

    @property
    def has_tiers(self) -> bool:
        """Whether requests may wait for imports from lower tiers or other workers."""
        return self._tiers is not None

    @property
    def pages_may_come_back(self) -> bool:
        """Whether pages may become free without a step, because an operation uses pages or a reservation has a time limit."""
        return self._reservations.may_end or (self._tiers is not None and self._tiers.num_running > 0)

    def enqueue(self, request: Request) -> None:
        """Adds a new request to the waiting queue or to the grammar gate."""
        progress, config = request.progress, self.config
        self._counters.requests_total += 1
        self._counters.resumed_total += progress.num_given > 0
        if request.session is not None:
            self._sessions.begin(request)
        admitted = self._queues.add(request)
        if request.params.grammar is not None:
            self._counters.grammars_total += 1
            self._counters.grammar_hits_total += request.matcher is not None
        self._trace.add(request.request_id, TraceKind.QUEUED if admitted else TraceKind.GATED, request.num_prompt_tokens)
        if request.deadline != float("inf"):
            self._watch(request.deadline, request)
        if config.waiting_timeout_s and not progress.num_given:  # another worker has already run a request with given output
            self._watch(request.arrival + config.waiting_timeout_s, request)
        assert self._adds_up, "each request is in one queue"

    def refuse(self, peer: int, handle: int, request_id: str, ending: Finish) -> None:
        """Emits the terminal output of a request that was not queued."""
        self._counters.requests_total += 1
        self._counters.aborts_total += 1
        self._outputs.add_refusal(peer, replace(ending, handle=handle, request_id=request_id))

    def ungate(self, request: Request) -> None:
        """Moves a request from the grammar gate to the waiting queue."""
        self._queues.ungate(request)
        self._trace.add(request.request_id, TraceKind.UNGATED, 0)
        assert self._adds_up, "each request is in one queue"

    def begin_import(self, request: Request) -> bool:
        """Moves a waiting request to the imports if other tiers or workers have more of its prefix and reading it saves time.

        Returns:
            Whether the request has left the waiting queue.
        """
        kv = request.kv
        if self._tiers is None or kv.num_tier_lookups >= MAX_TIER_LOOKUPS:
            return False
        kv.num_tier_lookups += 1
        limit = self._memory.usable_pages(len(kv.token_key) // TOKEN_BYTES, request.prefix_limit())
        wanted = Wanted(request.seq, request.namespace, kv.token_key, limit, request.rank, kv.page_keys, kv.imported)
        wanted.source = kv.source
        if kv.source is not None:
            wanted.source_end = self._units_end(kv.token_key, len(request.progress.output_ids))
        if not self._tiers.consider(wanted, self._memory):
            return False
        self._queues.begin_import(request)
        self._trace.add(request.request_id, TraceKind.IMPORTING, limit * self.config.page_size)
        assert self._adds_up, "each request is in one queue"
        return True

    def end_import(self, seq: int) -> None:
        """Moves a request from the imports back to the waiting queue. Imported pages are pinned; missing pages are computed."""
        request = self._queues.end_import(seq)
        self._release_source(request)
        self._trace.add(request.request_id, TraceKind.IMPORTED, sum(request.kv.imported.values()) * self.config.page_size)
        assert self._adds_up, "each request is in one queue"

    def release_pins(self) -> bool:
        """Frees pages for running requests: releases the pins of waiting requests and ends reservations in the state WAITING.

        Returns:
            Whether a pin was released or a reservation has ended.
        """
        imported = self._tiers is not None and self._tiers.release_pins()
        return self._reservations.end_waiting() or imported

    def admit(self, request: Request, hit: TreeNode, now: float) -> Lease:
        """Allocates a slot for a waiting request. The lease takes over the lock of `hit`, the end of the request's prefix hit."""
        kv, progress = request.kv, request.progress
        self._queues.admit(request)
        branch = 0
        if self._memory.units is not None:
            branch = self._memory.note_branch(request.namespace, kv.token_key, request.prefix_limit())
        num_extend = len(kv.token_key) // TOKEN_BYTES - hit.depth * self.config.page_size
        lease = kv.lease = self._memory.lease(hit, request.rank, tuple(kv.page_keys), branch, num_extend)
        if self._tiers is not None:
            self._tiers.admitted(request.seq, kv.page_keys, hit.depth)
        if kv.source is not None:
            self._release_source(request)
        cached = hit.depth * self.config.page_size
        self._trace.add(request.request_id, TraceKind.ADMITTED, cached)
        self._columns.begin(lease.slot, request, cached)
        progress.flight_step = -1
        kv.prefix_seen, kv.prefix_passes = -1, 0
        if kv.reservation is not None:
            self._reservations.resume(kv.reservation)
            self.announce(request)
        if progress.queue_s < 0:
            self._note_first_admission(request, cached, now)
        assert self._adds_up, "each request is in one queue, and running requests have a slot each"
        return lease

    def announce(self, request: Request) -> None:
        """Adds the computed pages of a prompt to its reservation, and reports the number of pages to the gateway.

        Does nothing if no page has been computed since the last call, or if the opened reservation has already ended.
        """
        reservation, lease = request.kv.reservation, request.kv.lease
        assert reservation is not None and lease is not None, "pages are announced for running requests with a reservation"
        count = int(self._memory.slots.num_shared[lease.slot])
        if count <= request.kv.num_announced or (request.kv.num_announced and not self._reservations.is_open(reservation)):
            return
        pages = self._memory.slots.page_table[lease.slot, :count].copy()
        opened = OpenReservation(
            reservation, request.namespace, request.kv.token_key, pages, self._units_end(request.kv.token_key, 0)
        )
        self._reservations.open(opened, (request.peer, request.handle), lease.node, self._memory)
        request.kv.num_announced = count
        self._outputs.add_ready(request.peer, PagesReady(request.handle, reservation, count))

    def decode(self, request: Request) -> None:
        """Moves a request from the extend phase (prefill) to the decode phase. The caller has planned its last chunk."""
        assert request.kv.lease is not None
        computed = int(self._columns.computed[request.kv.lease.slot])
        assert computed == self._columns.target[request.kv.lease.slot], "a request decodes after its last chunk is planned"
        self._trace.add(request.request_id, TraceKind.PREFILLED, computed)
        self._queues.decode(request)

    def extend_again(self, request: Request) -> None:
        """Moves a request from the decode phase to the extend phase, because its grammar has added tokens without KV.

        The result of a step in flight still counts for the request, unless the executor drafts. Draft tokens of that step may be
        at the positions of the added tokens.
        """
        assert request.kv.lease is not None
        slot, columns, output_ids = request.kv.lease.slot, self._columns, request.progress.output_ids
        self._queues.extend_again(request)
        request.rekey()
        self._trace.add(request.request_id, TraceKind.JUMPED, len(output_ids))
        if self.config.max_drafts:
            columns.drop_flight(slot)
            if self._memory.units is not None:
                self._memory.units.drop_row(slot, int(columns.committed[slot]))
        columns.redundant[slot] = columns.planned_out[slot] > columns.num_out[slot]
        columns.num_out[slot] = columns.planned_out[slot] = len(output_ids)
        columns.target[slot] = request.num_prompt_tokens + len(output_ids)
        assert columns.computed[slot] < columns.target[slot], "the KV of the added tokens is not computed"

    def retract(self, request: Request, flight_step: int, plan_step: int, preempted: bool = False) -> None:
        """Ends the lease of a running request and queues it again. Its output and its cached pages stay.

        Args:
            request: an extending or decoding request.
            flight_step: number of the uncommitted step, or -1.
            plan_step: number of the step whose plan retracts the request.
            preempted: whether a more urgent request needs the memory.
        """
        lease, progress = request.kv.lease, request.progress
        assert lease is not None
        slot = lease.slot
        sampled_in_flight = self._columns.planned_out[slot] > self._columns.num_out[slot] and not self._columns.redundant[slot]
        assert flight_step >= 0 or not sampled_in_flight, "a token in flight belongs to a step in flight"
        self._release(request, lease)
        self._queues.retract(request)
        request.rekey()
        progress.flight_step = flight_step if sampled_in_flight else -1
        progress.retraction_step = plan_step
        progress.logprob_planned = progress.logprob_done
        progress.routed_planned = progress.routed_done
        progress.num_retractions += 1
        kind = TraceKind.PREEMPTED if preempted else TraceKind.RETRACTED
        self._trace.add(request.request_id, kind, len(progress.output_ids))
        request.kv.num_tier_lookups = 0
        if request.kv.reservation is not None:
            self._reservations.wait(request.kv.reservation, self._trace.now)
        self._counters.preemptions_total += preempted
        if not preempted:
            self._counters.retractions_total += 1
            self._counters.retracted_input_tokens_total += request.num_prompt_tokens
            self._counters.retracted_output_tokens_total += len(progress.output_ids)
        assert self._adds_up, "each request is in one queue"

    def end(self, request: Request, ending: Finish, now: float) -> None:
        """Ends a request in any phase but FINISHED, frees its memory and emits its terminal output."""
        assert request.phase is not Phase.FINISHED, "a request ends once"
        node, reserved_pages = None, 0
        if (lease := request.kv.lease) is not None:
            self._release(request, lease)
            node = lease.node
        self._queues.remove(request)
        if self._tiers is not None:
            self._tiers.cancel(request.seq)
        self._release_source(request)
        if ending.reason is FinishReason.HANDED_OVER:
            reserved_pages = self._complete_reservation(request, now)
        elif request.kv.num_announced:
            self._reservations.end_of_request((request.peer, request.handle))
        self._trace.add(request.request_id, TraceKind.ENDED, len(request.progress.output_ids))
        assert self._adds_up, "an ended request is in no queue and has no slot"
        aborted = ending.reason is FinishReason.ABORT
        self._counters.aborts_total += aborted
        self._counters.grammar_aborts_total += aborted and request.params.grammar is not None
        if request.session is not None:
            self._sessions.end(request, None if aborted else self._context_end(request, node), self._memory, now)
        self._outputs.add_finish(request, _finish(request, ending, now, reserved_pages))

    def expired(self, now: float) -> list[tuple[Request, str]]:
        """Returns the requests that have reached a time limit, each with the message to its client."""
        out: dict[int, tuple[Request, str]] = {}
        for at, request in self._deadlines.due(now, self._queues.by_key):
            if at >= request.deadline:
                out.setdefault(request.seq, (request, "the request has reached its time limit"))
            elif request.progress.queue_s < 0:
                out.setdefault(request.seq, (request, "the request waited too long in the queue"))
        return list(out.values())

    def _note_first_admission(self, request: Request, cached: int, now: float) -> None:
        """Counts the prompt and its prefix hit of `cached` tokens, and starts the time limit of running requests."""
        progress = request.progress
        progress.queue_s = now - request.arrival
        progress.num_cached_tokens = min(cached, request.num_prompt_tokens)
        if self._tiers is not None:
            request.kv.cached_from = self._cached_from(request)
        self._counters.prompt_tokens_total += request.num_prompt_tokens
        self._counters.cached_tokens_total += progress.num_cached_tokens
        if self.config.running_timeout_s:
            request.deadline = min(request.deadline, now + self.config.running_timeout_s)
            self._watch(request.deadline, request)

    def _cached_from(self, request: Request) -> dict[Tier, int]:
        """Returns by tier how many tokens of the request's first prefix hit were read from the tier."""
        left, found = request.progress.num_cached_tokens, {}
        for tier, pages in request.kv.imported.items():
            found[Tier(tier)] = min(left, pages * self.config.page_size)
            left -= found[Tier(tier)]
        return {Tier.DEVICE: left} | found

    def _complete_reservation(self, request: Request, now: float) -> int:
        """Completes a request's reservation for the decode worker that continues the request. Reopens an ended reservation.

        Returns:
            The number of reserved pages; 0 if no page is cached or the request's salt was deleted.
        """
        reservation, tokens = request.kv.reservation, request.tokens().tobytes()
        assert reservation is not None, "a request that is handed over has a reservation"
        if is_retired(request.namespace):
            self._reservations.end_of_request((request.peer, request.handle))
            return 0
        node = self._memory.match_cached(request.namespace, tokens, len(tokens) // TOKEN_BYTES)
        if node.depth:
            pages = self._memory.tree.pages_to(node).copy()
            end = self._units_end(tokens, len(request.progress.output_ids))
            opened = OpenReservation(reservation, request.namespace, tokens, pages, end)
            self._reservations.open(opened, (request.peer, request.handle), node, self._memory)
            self._reservations.complete(reservation, now)
        return node.depth

    def _units_end(self, tokens: bytes, num_outputs: int) -> int:
        """Returns the last page end of a prompt before its last token. There, a prefill worker keeps units for the decode worker.

        Args:
            tokens: prompt and output tokens as bytes of int32.
            num_outputs: number of output tokens. The prefill worker sampled the last of them and computed the tokens before it.
        """
        num_prompt = len(tokens) // TOKEN_BYTES - (1 if num_outputs else 0)
        return max(num_prompt - 1, 0) // self.config.page_size

    def _release_source(self, request: Request) -> None:
        if request.kv.source is not None:
            self._reservations.release_source(request.kv.source)
            request.kv.source = None

    def _context_end(self, request: Request, node: TreeNode | None) -> TreeNode:
        """Returns the node at the end of a finished turn's cached context.

        The result is `node`, the end of the lease. A turn that ended while it waited had no lease; the result is then the end of
        the turn's prefix hit.
        """
        if node is not None:
            return node
        return self._memory.match(request.namespace, request.kv.token_key, request.reuse_limit)

    def _release(self, request: Request, lease: Lease) -> None:
        """Frees the slot of a request and publishes its committed pages in the tree. Frees its other pages."""
        request.progress.num_sent = int(self._columns.sent[lease.slot])
        committed = int(self._columns.committed[lease.slot])
        assert committed <= request.num_prompt_tokens + len(request.progress.output_ids), "KV is of prompt and output tokens"
        self._memory.release(lease, request.tokens()[:committed].tobytes())
        self._columns.end(lease.slot)
        request.kv.lease = None

    @property
    def _adds_up(self) -> bool:
        return self._queues.adds_up(self._memory.slots.num_leased)

    def _watch(self, at: float, request: Request) -> None:
        self._deadlines.watch(at, request)
        if len(self._deadlines) > 4 * len(self._queues.by_key) + 64:
            self._deadlines.keep({r.seq for r in self._queues.by_key.values()})


def _finish(request: Request, ending: Finish, now: float, reserved_pages: int) -> Finish:
    """Adds the request and its counts to an ending."""
    progress = request.progress
    return replace(
        ending,
        handle=request.handle,
        request_id=request.request_id,
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=progress.num_cached_tokens,
        cached_from=request.kv.cached_from,
        completion_tokens=len(progress.output_ids),
        queue_s=progress.queue_s if progress.queue_s >= 0 else now - request.arrival,
        retractions=progress.num_retractions,
        verified=progress.verified,
        reservation=request.kv.reservation if reserved_pages else None,
        reserved_pages=reserved_pages,
    )
