"""Plans the extend rows of a step: first the started extends, then waiting requests in the policy's order.

A started extend is an admitted request, some of whose known tokens are not in any plan yet.

docs/design/scheduler.md#which-rows-a-step-has and #admission-and-budgets have the rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain, takewhile

import numpy as np

from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.graph_limits import strides
from rootstock_llm.services.worker.core.kv.cache_units import CacheUnits
from rootstock_llm.services.worker.core.kv.memory import KVMemory
from rootstock_llm.services.worker.core.kv.tree_node import TOKEN_BYTES, TreeNode
from rootstock_llm.services.worker.core.planning.draft_controller import DraftController
from rootstock_llm.services.worker.core.planning.step_rows import (
    CLIP_MAX_NEW_TOKENS,
    NO_ROWS,
    AddResult,
    ChunkPace,
    PrefillAdder,
    RunningRows,
    Step,
    StepRows,
    adapted_chunk,
    paced_chunk,
)
from rootstock_llm.services.worker.core.requests.gates import ADMIT, Gate, GateDecision, PoolGate, PrefixGate, Verdict, too_small
from rootstock_llm.services.worker.core.requests.lifecycle import RequestLifecycle
from rootstock_llm.services.worker.core.requests.queues import RequestQueues
from rootstock_llm.services.worker.core.requests.request import Phase, Request, SlotColumns
from rootstock_llm.services.worker.core.requests.waiting_queue import due_before, preemptible, service_order, victim_order


class ExtendPlanner:
    """Plans extends, admits waiting requests, and preempts running ones."""

    def __init__(
        self,
        config: SchedulerConfig,
        queues: RequestQueues,
        memory: KVMemory,
        columns: SlotColumns,
        lifecycle: RequestLifecycle,
        draft_controller: DraftController | None,
    ) -> None:
        self.config = config  # replaced by Planner.retune()
        self._queues, self._memory, self._columns, self._lifecycle = queues, memory, columns, lifecycle
        self._draft_controller = draft_controller
        self._random = np.random.default_rng(config.random_seed)
        self._prefixes = PrefixGate(config.page_size, memory, columns, queues.waiting)
        self._gates: list[Gate] = [PoolGate(config).check]
        if config.enable_radix_cache:
            self._gates.append(self._prefixes.check)
        self.running_limit = config.max_running_requests  # largest number of running requests, at most the number of slots
        self._pace = ChunkPace()
        self._adder = PrefillAdder(config.page_size)

    def plan(self, rows: StepRows, now: float, ratio: float, flight: Step | None, step_id: int, may_admit: bool) -> None:
        """Adds extend rows to the next step.

        Args:
            rows: the rows of the step, with the decode rows if these share the step.
            now: present time.
            ratio: the new-token ratio.
            flight: the uncommitted step, or None.
            step_id: number of the next step.
            may_admit: whether waiting requests may be admitted.
        """
        if not self._queues.extending and (self._queues.batch_is_full or not len(self._queues.waiting)):
            return
        num_decode_tokens = rows.num_decode_tokens
        self._begin_budgets(ratio, num_decode_tokens)
        may_admit &= not self._queues.batch_is_full
        several = self._queues.shares.num_flows > 1
        started = sorted(self._queues.extending, key=_by_share if several else _by_arrival)
        before = may_admit and bool(started) and (several or self._prefixes.has_waits or self._outranked(started[0]))
        if before:
            self._prefixes.begin(_extending(flight) + started)
            self._admit_before(started, rows, now, step_id)
            started.sort(key=_by_share if several else _by_arrival)  # admissions have changed the order of the flows
        limits = self._strides(num_decode_tokens, may_admit) if started and not rows.extends else {}
        while started:
            request = started.pop(0)
            has_pages = request.kv.lease is None or self._continue(request, rows, limits.get(request.seq))
            if not has_pages and not rows.extends and flight is None:
                self._free_pages(request, now, step_id)
            if several and rows.extends and not self._adder.exhausted:
                started = self._admit_between(started, rows, now, step_id, may_admit)
        if before:
            self._prefixes.end_pass()
        if may_admit and not self._queues.extending:
            self._prefixes.begin(_extending(flight) + rows.extends)
            order = service_order(self.config, self._queues.waiting, self._queues.decoding, self._memory, self._random, several)
            full = self._admit_waiting(order, rows, now, step_id)
            self._queues.batch_is_full = full and self._queues.num_running > 0 and not self._queues.waiting.num_blocked
            self._prefixes.end_pass()
            self._prefixes.freed.clear()

    def step_ended(self, extended: int, rows: int, seconds: float) -> None:
        """Records the time of a step, by which ChunkPace sizes chunks."""
        config = self.config
        if config.adaptive_chunk_s:
            least = max(paced_chunk(config.chunked_prefill_size, config.page_size, 0) // 2, 1)
            self._pace.record(extended, rows, seconds, least)

    @property
    def steps_in_a_row(self) -> int:
        """Number of extend steps in a row after which a decode step follows; 0 for no limit."""
        config = self.config
        if not config.adaptive_chunk_s or not (waiting := self._num_paced_for()):
            return config.max_extend_steps
        return self._paced_steps(waiting, self._adapted_chunk())

    def _paced_steps(self, waiting: int, chunk: int) -> int:
        config = self.config
        steps = self._pace.steps(config.adaptive_chunk_s, waiting, min(chunk, config.max_prefill_tokens))
        return min(steps, config.max_extend_steps) if config.max_extend_steps else steps

    def _num_paced_for(self) -> int:
        """Returns the number of decode rows that wait while prompts are computed; 0 if chunks are not sized by time."""
        config = self.config
        if not config.chunked_prefill_size or not self._queues.decoding or not self._pace.is_known:
            return 0
        slots = self._queues.decoding_slots()
        return int((self._columns.planned_out[slots] < self._columns.max_new[slots]).sum())

    def _adapted_chunk(self) -> int:
        config = self.config
        return adapted_chunk(
            config.chunked_prefill_size, config.page_size, len(self._queues.decoding), config.adaptive_chunk_rows
        )

    def _chunk_size(self, num_decode_tokens: int) -> int:
        """Returns the chunk size of a step. It includes the `num_decode_tokens` tokens of the step's decode rows."""
        config, adapted = self.config, self._adapted_chunk()
        if not config.adaptive_chunk_s or not (waiting := self._num_paced_for()):
            return adapted
        steps = 0 if num_decode_tokens else self._paced_steps(waiting, adapted)
        tokens = self._pace.tokens(config.adaptive_chunk_s, waiting, steps)
        return min(adapted, paced_chunk(config.chunked_prefill_size, config.page_size, tokens) + num_decode_tokens)

    def _begin_budgets(self, ratio: float, num_decode_tokens: int, gone: Collection[int] = ()) -> None:
        """Sets the budgets of a step.

        Args:
            ratio: the new-token ratio.
            num_decode_tokens: tokens of the decode rows in the same step.
            gone: seqs of running requests that are treated as ended, so that no KV is reserved for their output.
        """
        config = self.config
        self._adder.begin(
            rows=self._running_rows(gone),
            new_token_ratio=ratio,
            max_prefill_tokens=config.max_prefill_tokens,
            chunked_prefill_size=self._chunk_size(num_decode_tokens),
            num_decode_tokens=num_decode_tokens,
            max_requests=config.prefill_max_requests,
            max_logprob_tokens=config.max_prompt_logprob_tokens,
        )

    def _running_rows(self, gone: Collection[int]) -> RunningRows:
        if not self._queues.decoding:
            return NO_ROWS
        columns = self._columns
        slots = self._queues.decoding_slots()
        if gone:
            slots = slots[[request.seq not in gone for request in self._queues.decoding]]
        left = np.maximum(columns.max_new[slots] - columns.planned_out[slots], 0)
        return RunningRows(left, columns.computed[slots], columns.ignore_eos[slots])

    # Started extends

    def _strides(self, num_decode_tokens: int, may_admit: bool) -> dict[int, int]:
        """Returns the largest number of tokens of each started extend, by seq, with which a graph can replay the step.

        Empty if the executor has no graphs, if a waiting request may be admitted, if a started extend has prompt tokens left, or
        if strides() returns None.
        """
        limits = self.config.graphs
        begins = may_admit and len(self._queues.waiting) > self._queues.waiting.num_blocked
        if not limits.rows or begins or not self._queues.extending:
            return {}
        slots = [r.kv.lease.slot for r in self._queues.extending if r.kv.lease]
        starts = self._columns.computed[slots]
        if any(start < r.num_prompt_tokens for r, start in zip(self._queues.extending, starts.tolist(), strict=True)):
            return {}
        left = self._columns.target[slots] - starts
        found = strides(limits, starts.tolist(), left.tolist(), num_decode_tokens + len(slots))
        return {} if found is None else {r.seq: count for r, count in zip(self._queues.extending, found, strict=True)}

    def _continue(self, request: Request, rows: StepRows, at_most: int | None) -> bool:
        """Plans the next chunk of a started extend.

        Args:
            request: the extending request.
            rows: the rows of the step.
            at_most: largest number of tokens of the chunk, or None for no limit.

        Returns:
            False if no page is available for the chunk.
        """
        lease = request.kv.lease
        assert lease is not None
        start = int(self._columns.computed[lease.slot])
        remaining = int(self._columns.target[lease.slot]) - start
        count = self._adder.chunk(start, min(remaining, at_most or remaining), _computes_logprobs(request))
        return count <= 0 or self._add(request, start, count, rows)

    def _free_pages(self, request: Request, now: float, step_id: int) -> None:
        """Frees pages for a started extend that found no page, while no step is in flight. The first case that applies decides:

        - If requests decode, this does nothing, because DecodePlanner frees pages.
        - If waiting requests have pins, the pins are released.
        - If several requests extend, one of them is retracted.
        - A single extending request ends with an error, unless an operation or a reservation may free pages.
        """
        if self._queues.decoding or self._lifecycle.release_pins():
            return
        if len(self._queues.extending) > 1:
            self._lifecycle.retract(min(self._queues.extending, key=victim_order), -1, step_id)
        elif not self._lifecycle.pages_may_come_back:
            self._lifecycle.end(request, too_small(self.config), now)

    # Waiting requests

    def preempt(self, ratio: float, flight: Step | None, step_id: int) -> None:
        """Retracts less urgent running requests if the first waiting request that the gates admit does not fit.

        Called before any row of the step is planned.
        """
        if not self.config.enable_priority_scheduling:
            return
        self._prefixes.begin(_extending(flight) + self._queues.extending)
        first = self._queues.waiting.first()
        if first is None or not preemptible(self.config, first, self._queues.running()):
            return
        for request in self._queues.waiting.in_order():
            verdict = self._check_gates(request).verdict
            if verdict is Verdict.ADMIT and (victims := preemptible(self.config, request, self._queues.running())):
                self._displace(request, victims, ratio, flight.plan.step_id if flight else -1, step_id)
            if verdict is not Verdict.WAIT:
                return

    def _displace(self, request: Request, victims: list[Request], ratio: float, flight_step: int, step_id: int) -> None:
        """Retracts victims in order until the request fits. Changes nothing if retracting all of them would not suffice."""
        hit = self._memory.match(request.namespace, request.kv.token_key, request.prefix_limit())
        self._memory.lock(hit)  # so that the pages of the hit do not count as available for the rest of the prompt
        if self._fits_without(request, hit, victims, ratio):
            while not self._fits_now(request, hit, ratio):
                if self._free_slots(request) > 0 and self._lifecycle.release_pins():
                    continue
                if not victims:
                    break
                self._lifecycle.retract(victims.pop(0), flight_step, step_id, preempted=True)
            self._queues.batch_is_full = False
        self._memory.unlock(hit)

    def _fits_without(self, request: Request, hit: TreeNode, victims: list[Request], ratio: float) -> bool:
        """Returns whether the request would be admitted if the victims were retracted.

        A page in the tree counts as free only if it becomes evictable without the victims' locks.
        """
        memory = self._memory
        reserved = self._queues.waiting.reserved_before(request.rank)
        stay = self._queues.num_running - len(victims)
        if min(memory.slots.num_free + len(victims), self.running_limit - stay) <= reserved.slots:
            return False
        if not stay:
            return True  # admission always accepts a request if no other request runs
        leases = [victim.kv.lease for victim in victims if victim.kv.lease is not None]
        extend = len(request.kv.token_key) // TOKEN_BYTES - hit.depth * self.config.page_size
        if memory.units is not None and not memory.units.can_reserve_without([lease.slot for lease in leases], extend):
            return False
        for lease in leases:
            memory.tree.unlock(lease.node, used=False)
        pages = memory.num_available + sum(self._own_pages(victim) for victim in victims)
        for lease in leases:
            memory.tree.lock(lease.node)
        self._begin_budgets(ratio, 0, frozenset(victim.seq for victim in victims))
        available = pages * self.config.page_size - reserved.tokens
        return self._check_budgets(request, hit, available)[0] is not AddResult.NO_TOKEN

    def _own_pages(self, request: Request) -> int:
        """Returns the number of pages that the request's lease owns, or of all its pages if they are in a reservation.

        The reservation pins the pages, but ends if running requests need them.
        """
        if request.kv.lease is None:
            return 0
        slots, slot = self._memory.slots, request.kv.lease.slot
        return int(slots.num_pages[slot]) - (0 if request.kv.num_announced else int(slots.num_shared[slot]))

    def _fits_now(self, request: Request, hit: TreeNode, ratio: float) -> bool:
        """Returns whether the request would be admitted now. `hit` is locked."""
        if self._free_slots(request) <= 0:
            return False
        self._begin_budgets(ratio, 0)
        return self._may_admit(request, hit)[0] is not AddResult.NO_TOKEN

    def _free_slots(self, request: Request) -> int:
        """Returns the number of free slots, minus the slots that are reserved for more urgent blocked requests."""
        queues = self._queues
        free = min(self._memory.slots.num_free, self.running_limit - queues.num_running)
        return free - queues.waiting.reserved_before(request.rank).slots if queues.waiting.num_blocked else free

    def _admit_before(self, started: list[Request], rows: StepRows, now: float, step_id: int) -> None:
        """Admits waiting requests before the next chunks of the started extends, which may have many chunks left.

        The admitted requests are:

        - more urgent requests;
        - requests of flows with a lower sort key;
        - requests that arrived before a started extend and whose wait for a prefix has ended.

        The KV that the started extends need stays free. If a request finds no KV, batch_is_full stays False.
        """
        turn = max(map(_by_arrival, started))
        overtaken = [r for r in self._prefixes.freed.values() if r.phase is Phase.WAITING and _by_arrival(r) < turn]
        order = chain(sorted(overtaken, key=_by_arrival), self._due_before(started[0]))
        self._admit_beside(order, started, rows, now, step_id)

    def _admit_between(self, started: list[Request], rows: StepRows, now: float, step_id: int, may_admit: bool) -> list[Request]:
        """Admits waiting requests between two chunks of started extends, because each planned chunk changes the order of flows.

        Returns:
            The started extends without a chunk in this step, in the order of _by_share().
        """
        left = sorted((request for request in started if request.kv.lease is not None), key=_by_share)
        if left and may_admit:
            self._admit_beside(self._due_before(left[0]), left, rows, now, step_id)
            left.sort(key=_by_share)
        return left

    def _admit_beside(self, order: Iterable[Request], started: list[Request], rows: StepRows, now: float, step_id: int) -> None:
        """Admits requests, and leaves free the KV that the started extends need."""
        self._adder.set_aside = sum(self._most_kv(request, self._num_left(request)) for request in started)
        self._admit_waiting(order, rows, now, step_id)
        self._adder.set_aside = 0

    def _due_before(self, first: Request) -> Iterator[Request]:
        """Yields the waiting requests that precede `first`, the next started extend.

        The caller admits or blocks each request before it takes the next one.
        """
        if self._queues.shares.num_flows > 1:
            yield from due_before(self._queues.waiting, first)
        elif self._outranked(first):
            yield from takewhile(lambda request: request.rank < first.rank, self._queues.waiting.in_order())

    def _outranked(self, first: Request) -> bool:
        """Returns whether a waiting request is more urgent than the most urgent started extend."""
        ranks = self._queues.waiting.ranks()
        return bool(ranks) and ranks[0] < first.rank

    def _admit_waiting(self, order: Iterable[Request], rows: StepRows, now: float, step_id: int) -> bool:
        """Admits the requests in the given order.

        The pass stops at a request that does not fit, at a request that this plan has retracted, and when a budget is exhausted.

        Returns:
            Whether a request found no slot or no KV. The batch is then full, unless gates block requests. Gates may unblock these
            before a running request ends.
        """
        has_tiers = self._lifecycle.has_tiers
        for request in order:
            assert request.phase is Phase.WAITING and not request.blocked_tokens, (
                "an admitted request waits, and no gate blocks it"
            )
            if self._adder.exhausted or request.progress.retraction_step == step_id:
                return False
            if self._free_slots(request) <= 0:
                return True
            if has_tiers and self._lifecycle.begin_import(request):
                continue
            decision = self._check_gates(request)
            if decision.ending is not None:
                self._lifecycle.end(request, decision.ending, now)
            if decision is not ADMIT:
                continue
            result = self._admit(request, rows, now)
            if result is not AddResult.CONTINUE:
                return result is AddResult.NO_TOKEN
        return False

    def _check_gates(self, request: Request) -> GateDecision:
        """Returns the first result of a gate that is not ADMIT, or ADMIT if there is none. A WAIT also blocks the request."""
        for gate in self._gates:
            decision = gate(request)
            if decision is ADMIT:
                continue
            if decision.verdict is Verdict.WAIT:
                self._queues.waiting.block(request, self._most_kv(request, len(request.kv.token_key) // TOKEN_BYTES))
            return decision
        return ADMIT

    def _most_kv(self, request: Request, extend: int) -> int:
        """Returns the tokens of KV that admission needs for `extend` tokens, the output and one more page.

        PrefillAdder reserves the additional page as well.
        """
        page_size = self.config.page_size
        left = request.most_outputs - len(request.progress.output_ids)
        outputs = left if request.params.ignore_eos else min(left, CLIP_MAX_NEW_TOKENS)
        return (-(-extend // page_size) + 1) * page_size + outputs

    def _num_left(self, request: Request) -> int:
        """Returns the number of tokens that a started extend has left to compute."""
        assert request.kv.lease is not None
        return int(self._columns.target[request.kv.lease.slot] - self._columns.computed[request.kv.lease.slot])

    def _admit(self, request: Request, rows: StepRows, now: float) -> AddResult:
        """Admits a request if the tokens after its prefix hit fit. If they do not fit, no lock on the hit is left."""
        hit = self._memory.match(request.namespace, request.kv.token_key, request.prefix_limit())
        self._memory.lock(hit)
        result, count = self._may_admit(request, hit)
        if result is not AddResult.CONTINUE:
            self._memory.unlock(hit)
            return result
        lease = self._lifecycle.admit(request, hit, now)
        added = self._add(request, hit.depth * self.config.page_size, count, rows)
        assert added, "an admitted request gets a first page"
        rows.admit(request, lease.slot, self._gets_drafts(lease.slot))
        self._prefixes.add_extend(request)
        return result

    def _gets_drafts(self, slot: int) -> bool:
        """Decides whether the request that was admitted to the slot gets draft tokens, and records it in `draftable`."""
        draftable = self._columns.draftable
        if self._draft_controller is None or not draftable[slot]:
            return False
        self._draft_controller.begin(slot)
        if self._draft_controller.is_limited:
            running = [r.kv.lease.slot for r in (*self._queues.extending, *self._queues.decoding) if r.kv.lease is not None]
            draftable[slot] = self._draft_controller.may_add_request(
                [each for each in running if draftable[each] and each != slot]
            )
        return bool(draftable[slot])

    def _may_admit(self, request: Request, hit: TreeNode) -> tuple[AddResult, int]:
        """Returns whether the request fits into the budgets, and its tokens in this step. `hit` is locked."""
        start = hit.depth * self.config.page_size
        extend = len(request.kv.token_key) // TOKEN_BYTES - start
        if self._memory.units is not None and not self._can_reserve_units(self._memory.units, extend):
            return AddResult.NO_TOKEN, 0
        available = self._memory.num_available * self.config.page_size
        if self._queues.waiting.num_blocked:
            available -= self._queues.waiting.reserved_before(request.rank).tokens
        result, count = self._check_budgets(request, hit, available)
        if result is AddResult.NO_TOKEN and not self._queues.num_running:
            # No running request can end and free memory. This request must therefore be admitted now. submit() has checked that
            # its prompt fits into the pool. If no page is available, running operations use the pages, and the request waits for
            # their end.
            self._lifecycle.release_pins()
            if self._memory.num_available:
                return AddResult.CONTINUE, self._adder.chunk(start, extend, _computes_logprobs(request))
        return result, count

    def _can_reserve_units(self, units: CacheUnits, extend: int) -> bool:
        """Returns whether units can be reserved for one more request.

        If they cannot and no request runs, releases the pins of waiting requests and tries again.
        """
        if units.can_reserve(extend):
            return True
        return not self._queues.num_running and self._lifecycle.release_pins() and units.can_reserve(extend)

    def _check_budgets(self, request: Request, hit: TreeNode, available: int) -> tuple[AddResult, int]:
        """Checks a request against the budgets, with `available` tokens of KV. Returns the same as PrefillAdder.admit()."""
        start = hit.depth * self.config.page_size
        extend = len(request.kv.token_key) // TOKEN_BYTES - start
        max_new = request.most_outputs - len(request.progress.output_ids)
        return self._adder.admit(available, start, extend, max_new, request.params.ignore_eos, _computes_logprobs(request))

    def _add(self, request: Request, start: int, count: int, rows: StepRows) -> bool:
        """Plans `count` tokens from `start` on, or fewer if the pages do not suffice.

        Returns:
            False if no token could be planned.
        """
        lease = request.kv.lease
        assert lease is not None
        columns, units = self._columns, self._memory.units
        target = int(columns.target[lease.slot])
        if units is not None:
            units.leave_extend(lease.slot, start, int(self._memory.slots.num_shared[lease.slot]))
            count = units.chunk(lease.slot, start, count, target)
        count = self._memory.grow(lease, start + count) - start
        if count <= 0:
            return False
        assert start == columns.computed[lease.slot], "a chunk begins where the previous chunk ended"
        assert start + count <= target, "a chunk ends at the target or before"
        last = start + count == target
        logprobs = _computes_logprobs(request)
        assert request.flow is not None, "an extending request has prompt tokens to plan"
        self._queues.shares.charge(request.flow, count)
        rows.add(request, start, count, last)
        if units is not None:
            states = units.extend(lease.slot, start, count, target)
            rows.states += [states] if units.states is not None else []
        columns.computed[lease.slot] = start + count
        max_new = request.most_outputs - len(request.progress.output_ids)
        self._adder.added(count, target - start - count, max_new, request.params.ignore_eos, logprobs)
        if last:
            columns.planned_out[lease.slot] += 1
            self._lifecycle.decode(request)
        return True


def _extending(flight: Step | None) -> list[Request]:
    return flight.requests[: flight.plan.num_extend] if flight else []


def _by_arrival(request: Request) -> tuple[int, int]:
    return request.rank, request.seq


def _by_share(request: Request) -> tuple[int, float, float, int]:
    assert request.flow is not None, "an extending request has prompt tokens to plan"
    return request.rank, *request.flow.sort_key, request.seq


def _computes_logprobs(request: Request) -> bool:
    """Returns whether further prompt tokens of the request need logprobs."""
    return request.params.prompt_logprobs_from >= 0 and request.progress.logprob_planned < request.num_prompt_tokens
