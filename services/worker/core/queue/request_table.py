"""All requests of a worker, the queues they stand in, and the transitions between them: one writer for both.

Every request that comes in leaves through `end`, which frees what it holds and emits its one terminal output.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from services.worker.core.contracts.config import SchedulerConfig
from services.worker.core.contracts.counters import Counters
from services.worker.core.contracts.grammar import GrammarBook
from services.worker.core.contracts.messages import Finish, FinishReason, PagesReady
from services.worker.core.contracts.rooms import OpenRoom
from services.worker.core.contracts.trace import TraceKind, TraceLog
from services.worker.core.contracts.transfers import Tier
from services.worker.core.contracts.tree_name import is_retired, retired_name, salt_of_tree
from services.worker.core.kv.cache_events import CacheEventLog
from services.worker.core.kv.memory import KVMemory, Lease
from services.worker.core.kv.other_tiers import OtherTiers, Wanted
from services.worker.core.kv.radix_cache import Match
from services.worker.core.kv.tree_node import TOKEN_BYTES, TreeNode
from services.worker.core.queue.configured_memory import configured_memory
from services.worker.core.queue.deadlines import Deadlines
from services.worker.core.queue.finish import FinishDecision
from services.worker.core.queue.grammar_gate import GrammarGate
from services.worker.core.queue.outputs import Outputs
from services.worker.core.queue.request import Phase, Request
from services.worker.core.queue.request_columns import SlotColumns
from services.worker.core.queue.rooms import Rooms
from services.worker.core.queue.sessions import SessionTable
from services.worker.core.queue.shares import Shares
from services.worker.core.queue.waiting_queue import WaitingQueue

MOST_LOOKS = 2  # at other tiers, for each wait: when it begins, and when the request is about to be admitted


class RequestTable:
    """extending, decoding: running requests in order of admission. waiting, gate: those without a lease; importing: those that
    wait for a prefix from another tier, by seq. tiers: None where there is the device's memory alone. rooms: what is kept for
    other workers.

    batch_is_full: nothing can be admitted until a running request leaves (docs/design/scheduler.md#admission-and-budgets).
    config may be replaced while running; sizes of pools in it are those of the start.
    """

    def __init__(
        self, config: SchedulerConfig, book: GrammarBook | None, events: CacheEventLog | None, tiers: OtherTiers | None = None
    ) -> None:
        self.config = config
        self._events = events
        self.tiers = tiers
        self.importing: dict[int, Request] = {}
        self.memory = self._new_memory()
        self.columns = SlotColumns(config.max_running_requests)
        self.outputs = Outputs()
        self.trace = TraceLog()
        self.gate = GrammarGate(book)
        self.sessions = SessionTable(config)
        self.waiting = WaitingQueue()
        self.shares = Shares()
        self.rooms = Rooms(config.disaggregation_hold_s)
        self.by_key: dict[tuple[int, int], Request] = {}
        self.by_routing_key: Counter[str] = Counter()  # requests of each routing key, in every phase
        self.extending: list[Request] = []
        self.decoding: list[Request] = []
        self.batch_is_full = False
        self.counters = Counters()
        self._deadlines = Deadlines()
        self._slots: NDArray[np.int64] | None = None

    @property
    def num_waiting(self) -> int:
        """Those at the gate among them."""
        return len(self.waiting) + len(self.gate) + len(self.importing)

    @property
    def waiting_tokens(self) -> int:
        """Of prompts and outputs of those that wait, as they were when they began to."""
        importing = sum(request.queued_tokens for request in self.importing.values())
        return self.waiting.num_tokens + self.gate.num_tokens + importing

    @property
    def num_running(self) -> int:
        return len(self.extending) + len(self.decoding)

    def decoding_slots(self) -> NDArray[np.int64]:
        """int64[n], aligned with `decoding`."""
        if self._slots is None:
            self._slots = np.array([r.kv.lease.slot for r in self.decoding if r.kv.lease], dtype=np.int64)
            assert len(self._slots) == len(self.decoding), "a row decodes without a slot"
        return self._slots

    def reconfigure(self, config: SchedulerConfig) -> None:
        """From the next plan on. Sizes of pools are as they were."""
        self.config = self.sessions.config = config

    def enqueue(self, request: Request) -> None:
        """A new request, to the queue or to the gate."""
        assert (request.peer, request.handle) not in self.by_key, "two requests of one handle"
        self.counters.requests_total += 1
        self.counters.resumed_total += request.progress.num_given > 0
        self.by_key[request.peer, request.handle] = request
        if request.routing_key:
            self.by_routing_key[request.routing_key] += 1
        if request.session is not None:
            self.sessions.begin(request)
        admitted = self.gate.admits(request)
        if request.params.grammar is not None:
            self.counters.grammars_total += 1
            self.counters.grammar_hits_total += request.matcher is not None
        if admitted:
            self._share(request)
            self.waiting.add(request, back=request.progress.num_given > 0)
            self.trace.add(request.request_id, TraceKind.QUEUED, request.num_prompt_tokens)
        else:
            self.trace.add(request.request_id, TraceKind.GATED, request.num_prompt_tokens)
            request.phase = Phase.GATED
            self.gate.wait(request)
        if request.deadline != float("inf"):
            self._watch(request.deadline, request, waiting=False)
        if self.config.waiting_timeout_s and not request.progress.num_given:  # as after a retraction: it has run
            self._watch(request.arrival + self.config.waiting_timeout_s, request, waiting=True)
        assert self._adds_up, "each request stands in one queue"

    def ungate(self, request: Request) -> None:
        """GATED to WAITING."""
        self.gate.leave(request)
        request.move(Phase.WAITING)
        self._share(request)
        self.waiting.add(request, back=request.progress.num_given > 0)
        self.trace.add(request.request_id, TraceKind.UNGATED, 0)
        assert self._adds_up, "each request stands in one queue"

    def look_elsewhere(self, request: Request) -> bool:
        """WAITING to GATED where other tiers have more of its prefix than the tree, and reading it pays."""
        if self.tiers is None or request.kv.num_tier_lookups >= MOST_LOOKS:
            return False
        kv = request.kv
        kv.num_tier_lookups += 1
        limit = self.memory.usable_pages(len(kv.token_key) // TOKEN_BYTES, request.prefix_limit())
        wanted = Wanted(request.seq, request.namespace, kv.token_key, limit, request.rank, kv.page_keys, kv.imported)
        wanted.source = kv.source
        if not self.tiers.consider(wanted, self.memory):
            return False
        self.waiting.remove(request)
        self._unshare(request)
        request.move(Phase.GATED)
        self.importing[request.seq] = request
        self.trace.add(request.request_id, TraceKind.IMPORTING, limit * self.config.page_size)
        assert self._adds_up, "each request stands in one queue"
        return True

    def imported(self, seq: int) -> None:
        """GATED to WAITING: what came is pinned for it, the rest is computed, whoever may have it."""
        request = self.importing.pop(seq)
        self._leave_source(request)
        request.move(Phase.WAITING)
        self._share(request)
        self.waiting.add(request, back=request.progress.num_given > 0 or request.progress.queue_s >= 0)
        self.trace.add(request.request_id, TraceKind.IMPORTED, sum(request.kv.imported.values()) * self.config.page_size)
        self.batch_is_full = False
        assert self._adds_up, "each request stands in one queue"

    def free_imported(self) -> bool:
        """Who runs is short of pages: what was imported for those who wait is theirs no more than what others left, nor are the
        pages in rooms of prompts that wait to be computed on. Whether that may have freed any."""
        imported = self.tiers is not None and self.tiers.let_go()
        return self.rooms.let_go() or imported

    @property
    def pages_may_come_back(self) -> bool:
        """An operation holds some, or a reader who comes or is given up."""
        return self.rooms.may_end or (self.tiers is not None and self.tiers.num_running > 0)

    def begin(self, request: Request, match: Match, now: float) -> Lease:
        """WAITING to EXTEND. `match` is locked and its lock goes to the lease."""
        self.waiting.remove(request)
        request.move(Phase.EXTEND)
        lease = request.kv.lease = self.memory.lease(match, request.rank, tuple(request.kv.page_keys))
        if self.tiers is not None:
            self.tiers.admitted(request.seq, request.kv.page_keys, len(match.pages))
        if request.kv.source is not None:
            self._leave_source(request)
        cached = len(match.pages) * self.config.page_size
        self.trace.add(request.request_id, TraceKind.ADMITTED, cached)
        self.columns.begin(lease.slot, request, cached)
        request.progress.flight_step = -1
        request.kv.prefix_seen, request.kv.prefix_passes = -1, 0
        if request.kv.reservation is not None:
            self.rooms.go_on(request.kv.reservation)
            self.announce(request)
        self.extending.append(request)
        if request.progress.queue_s < 0:
            request.progress.queue_s = now - request.arrival
            request.progress.num_cached_tokens = min(cached, request.num_prompt_tokens)
            if self.tiers is not None:
                request.kv.cached_from = self._cached_from(request)
            self.counters.prompt_tokens_total += request.num_prompt_tokens
            self.counters.cached_tokens_total += request.progress.num_cached_tokens
            if self.config.running_timeout_s:
                self._watch(now + self.config.running_timeout_s, request, waiting=False)
        assert self._adds_up, "each request stands in one queue, the running ones with a slot each"
        return lease

    def announce(self, request: Request) -> None:
        """What is computed of a prompt that another worker goes on with can be read from now on."""
        room, lease = request.kv.reservation, request.kv.lease
        assert room is not None and lease is not None, "who computes for others runs, and has a room"
        count = int(self.memory.slots.num_shared[lease.slot])
        if count <= request.kv.num_announced or (request.kv.num_announced and not self.rooms.stands(room)):
            return
        pages = self.memory.slots.page_table[lease.slot, :count].copy()
        opened = OpenRoom(room, request.namespace, request.kv.token_key, pages)
        self.rooms.open(opened, (request.peer, request.handle), lease.node, self.memory)
        request.kv.num_announced = count
        self.outputs.add_ready(request.peer, PagesReady(request.handle, room, count))

    def decode(self, request: Request) -> None:
        """EXTEND to DECODE: the last chunk is planned."""
        assert request.kv.lease is not None
        computed = int(self.columns.computed[request.kv.lease.slot])
        assert computed == self.columns.target[request.kv.lease.slot], "a row decodes before its last chunk is planned"
        self.trace.add(request.request_id, TraceKind.PREFILLED, computed)
        request.move(Phase.DECODE)
        self._unshare(request)
        self.extending.remove(request)
        self.decoding.append(request)
        self._slots = None

    def resume_extend(self, request: Request) -> None:
        """DECODE to EXTEND: tokens have become known that nothing sampled; their KV is still to be computed. What a step in
        flight computes for it counts, unless guesses may stand there."""
        assert request.kv.lease is not None
        slot, columns = request.kv.lease.slot, self.columns
        request.move(Phase.EXTEND)
        self._share(request)
        request.rekey()
        self.trace.add(request.request_id, TraceKind.JUMPED, len(request.progress.output_ids))
        if self.config.max_drafts:
            columns.drop_flight(slot)
        columns.redundant[slot] = columns.planned_out[slot] > columns.num_out[slot]
        columns.num_out[slot] = columns.planned_out[slot] = len(request.progress.output_ids)
        columns.target[slot] = request.num_prompt_tokens + len(request.progress.output_ids)
        assert columns.computed[slot] < columns.target[slot], "the tokens that became known are computed already"
        self.decoding.remove(request)
        self.extending.append(request)
        self._slots = None

    def retract(self, request: Request, flight_step: int, plan_step: int, preempted: bool = False) -> None:
        """Back to WAITING with its output kept, its computed pages cached, everything else freed.

        flight_step: the uncommitted step, -1 for none; plan_step: the plan that decides this. preempted: for someone more
        urgent, not for want of memory.
        """
        assert request.kv.lease is not None
        slot = request.kv.lease.slot
        sampled_in_flight = self.columns.planned_out[slot] > self.columns.num_out[slot] and not self.columns.redundant[slot]
        assert flight_step >= 0 or not sampled_in_flight, "a token in flight has a step in flight"
        request.progress.num_sent = int(self.columns.sent[slot])
        self._release(request)
        request.move(Phase.WAITING)
        if request.flow is None:
            self._share(request)
        request.rekey()
        request.progress.flight_step = flight_step if sampled_in_flight else -1
        request.progress.parked_step = plan_step
        request.progress.logprob_planned = request.progress.logprob_done
        request.progress.num_retractions += 1
        kind = TraceKind.PREEMPTED if preempted else TraceKind.RETRACTED
        self.trace.add(request.request_id, kind, len(request.progress.output_ids))
        request.kv.num_tier_lookups = 0
        if request.kv.reservation is not None:
            self.rooms.wait(request.kv.reservation, self.trace.now)
        self.waiting.add(request, back=True)
        self.counters.preemptions_total += preempted
        if not preempted:
            self.counters.retractions_total += 1
            self.counters.retracted_input_tokens_total += request.num_prompt_tokens
            self.counters.retracted_output_tokens_total += len(request.progress.output_ids)
        self.batch_is_full = False
        assert self._adds_up, "each request stands in one queue"

    def end(self, request: Request, ending: FinishDecision, now: float) -> None:
        """The request's one terminal output, from any phase but FINISHED."""
        assert request.phase is not Phase.FINISHED and self.by_key[request.peer, request.handle] is request, "a request ends once"
        node, room_pages = None, 0
        if request.kv.lease is not None:
            lease = request.kv.lease
            request.progress.num_sent = int(self.columns.sent[lease.slot])
            self._release(request)
            node = lease.node
            self.batch_is_full = False
        elif request.seq in self.importing:
            del self.importing[request.seq]
        elif request.phase is Phase.GATED:
            self.gate.leave(request)
        else:
            self.waiting.remove(request)
        request.move(Phase.FINISHED)
        if request.flow is not None:
            self._unshare(request)
        del self.by_key[request.peer, request.handle]
        if request.routing_key:
            self.by_routing_key[request.routing_key] -= 1
            if not self.by_routing_key[request.routing_key]:
                del self.by_routing_key[request.routing_key]
        if self.tiers is not None:
            self.tiers.leave(request.seq)
        self._leave_source(request)
        if ending.reason is FinishReason.HANDED_OVER:
            room_pages = self._open_room(request, now)
        elif request.kv.num_announced:
            self.rooms.leave_asker((request.peer, request.handle))
        self.trace.add(request.request_id, TraceKind.ENDED, len(request.progress.output_ids))
        assert self._adds_up, "who has ended stands in no queue and has no slot"
        aborted = ending.reason is FinishReason.ABORT
        self.counters.aborts_total += aborted
        self.counters.grammar_aborts_total += aborted and request.params.grammar is not None
        if request.session is not None:
            self.sessions.end(request, None if aborted else self._context_end(request, node), self.memory, now)
        self.outputs.add_finish(request, self._finish(request, ending, now, room_pages))

    def _open_room(self, request: Request, now: float) -> int:
        """Its computed pages are kept for who goes on with it, also where its room has ended meanwhile; but not what was deleted
        meanwhile. Returns how many."""
        room, tokens = request.kv.reservation, request.tokens().tobytes()
        assert room is not None, "who is handed over has a room"
        if is_retired(request.namespace):
            self.rooms.leave_asker((request.peer, request.handle))
            return 0
        match = self.memory.match(request.namespace, tokens, len(tokens) // TOKEN_BYTES)
        if len(match.pages):
            opened = OpenRoom(room, request.namespace, tokens, match.pages.copy())
            self.rooms.open(opened, (request.peer, request.handle), match.node, self.memory)
            self.rooms.complete(room, now)
        return len(match.pages)

    def _leave_source(self, request: Request) -> None:
        if request.kv.source is not None:
            self.rooms.done_with(request.kv.source)
            request.kv.source = None

    def reset_memory(self) -> None:
        """Forgets every page, cached ones too. Only while no request is here."""
        assert not self.by_key and not self.num_running and not self.num_waiting, "somebody uses the memory"
        self.sessions.close_all(self.memory)
        evicted = self.memory.evicted_pages_total
        self.rooms.end_all()
        if self.tiers is not None:
            self.tiers.forget_tree()
        self.memory = self._new_memory()
        self.memory.evicted_pages_total = evicted
        if self._events:
            self._events.cleared()

    def retire(self, salt: str, number: int) -> int:
        """What was computed with a salt is there for the requests that are here alone, and nobody's when they have ended. number:
        of the deletion. Returns pages that were nobody's before."""
        tree = self.memory.tree
        mine = [request for request in self.by_key.values() if _is_of(request.namespace, salt)]
        names = dict.fromkeys([name for name in tree.names() if _is_of(name, salt)] + [request.namespace for request in mine])
        for name in names:
            tree.retire(name, retired_name(name, number))
        for request in mine:
            request.namespace = retired_name(request.namespace, number)
        if self.tiers is not None:
            self.tiers.retired(names)
        self.rooms.end_retired()
        return self.memory.forget_retired()

    def refuse(self, peer: int, handle: int, request_id: str, ending: FinishDecision) -> None:
        """The terminal output of a request that never came in."""
        self.counters.requests_total += 1
        self.counters.aborts_total += 1
        finish = Finish(handle, request_id, ending.reason, error=ending.error, message=ending.message, field=ending.field)
        self.outputs.add_refusal(peer, finish)

    def expired(self, now: float) -> list[tuple[Request, str]]:
        """Requests whose waiting or running time is over, each once, with what to tell the client."""
        due = self._deadlines.due(now)
        if not due:
            return []
        out: dict[int, tuple[Request, str]] = {}
        for deadline in due:
            request = self.by_key.get((deadline.peer, deadline.handle))
            if request is None or request.seq != deadline.seq:
                continue
            if not deadline.waiting:
                out.setdefault(request.seq, (request, "the request's time is over"))
            elif request.progress.queue_s < 0:
                out.setdefault(request.seq, (request, "the request waited too long in the queue"))
        return list(out.values())

    def _context_end(self, request: Request, node: TreeNode | None) -> TreeNode:
        """Where a finished turn's cached context ends: its lease's end, or what the tree has if it ended while waiting."""
        if node is not None:
            return node
        return self.memory.match(request.namespace, request.kv.token_key, request.reuse_limit).node

    def _finish(self, request: Request, ending: FinishDecision, now: float, room_pages: int) -> Finish:
        return Finish(
            handle=request.handle,
            request_id=request.request_id,
            reason=ending.reason,
            matched_stop=ending.matched_stop,
            matched_token=ending.matched_token,
            error=ending.error,
            message=ending.message,
            field=ending.field,
            element=ending.element,
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=request.progress.num_cached_tokens,
            cached_from=request.kv.cached_from,
            completion_tokens=len(request.progress.output_ids),
            queue_s=request.progress.queue_s if request.progress.queue_s >= 0 else now - request.arrival,
            retractions=request.progress.num_retractions,
            verified=request.progress.verified,
            embedding=ending.embedding,
            label_logprobs=ending.label_logprobs,
            room=request.kv.reservation if room_pages else None,
            room_pages=room_pages,
        )

    def _share(self, request: Request) -> None:
        """Its prompt tokens are to be planned. One of a flow that had none may be next although others find no room."""
        assert request.flow is None, "a request is of one flow, once"
        request.flow = self.shares.enter(request.payer, request.weight)
        if request.flow.num_pending == 1 and self.shares.num_flows > 1:
            self.batch_is_full = False

    def _unshare(self, request: Request) -> None:
        assert request.flow is not None, "who leaves a flow is in one"
        self.shares.leave(request.flow)
        request.flow = None

    @property
    def _adds_up(self) -> bool:
        """waiting + running = all, running + free slots = slots."""
        running = len(self.extending) + len(self.decoding)
        waiting = len(self.waiting) + len(self.gate) + len(self.importing)
        return waiting + running == len(self.by_key) and running == self.memory.slots.num_leased

    def _new_memory(self) -> KVMemory:
        return configured_memory(self.config, self._events, None if self.tiers is None else self.tiers.queue)

    def _cached_from(self, request: Request) -> dict[Tier, int]:
        """Tokens of its hit by where they were when it came: what was imported for it, and the rest."""
        left, found = request.progress.num_cached_tokens, {}
        for tier, pages in request.kv.imported.items():
            found[Tier(tier)] = min(left, pages * self.config.page_size)
            left -= found[Tier(tier)]
        return {Tier.DEVICE: left} | found

    def _release(self, request: Request) -> None:
        lease = request.kv.lease
        assert lease is not None
        committed = int(self.columns.committed[lease.slot])
        assert committed <= request.num_prompt_tokens + len(request.progress.output_ids), "KV of tokens that nobody knows"
        self.memory.release(lease, request.tokens()[:committed].tobytes())
        self.columns.end(lease.slot)
        request.kv.lease = None
        if request.phase is Phase.EXTEND:
            self.extending.remove(request)
        else:
            self.decoding.remove(request)
            self._slots = None

    def _watch(self, at: float, request: Request, waiting: bool) -> None:
        self._deadlines.watch(at, request.seq, request.peer, request.handle, waiting)
        if len(self._deadlines) > 4 * len(self.by_key) + 64:
            self._deadlines.keep({r.seq for r in self.by_key.values()})


def _is_of(tree: str, salt: str) -> bool:
    return not is_retired(tree) and salt_of_tree(tree) == salt
