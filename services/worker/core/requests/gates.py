"""Admission gates: checks of a waiting request that precede its budgets.

A pass calls the gates in order until one of them does not return ADMIT. WAIT holds the request in the queue: the pass continues
with the next request, and passes skip the held one until its gate frees it (WaitingQueue.free). REJECT ends the request. A gate
allocates nothing and does not touch the radix tree.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from services.worker.core.contracts.config import SchedulerConfig
from services.worker.core.contracts.messages import ErrorCode, FinishReason
from services.worker.core.kv.memory import KVMemory
from services.worker.core.kv.tree_node import TOKEN_BYTES, TreeNode
from services.worker.core.requests.finish import FinishDecision
from services.worker.core.requests.policy import IN_BATCH_DEPRIORITIZE_THRESHOLD
from services.worker.core.requests.request import Request
from services.worker.core.requests.slot_columns import SlotColumns
from services.worker.core.requests.waiting_queue import WaitingQueue


class Verdict(enum.Enum):
    ADMIT = enum.auto()
    WAIT = enum.auto()
    REJECT = enum.auto()


@dataclass(frozen=True, slots=True)
class GateDecision:
    """The result of a gate."""

    verdict: Verdict
    ending: FinishDecision | None = None  # ending of the request; set with REJECT


ADMIT, WAIT = GateDecision(Verdict.ADMIT), GateDecision(Verdict.WAIT)
Gate = Callable[[Request], GateDecision]


def too_small(config: SchedulerConfig) -> FinishDecision:
    """Returns the ending of a request that does not fit into the whole pool."""
    message = f"this request needs more KV than the whole pool of {config.num_pages * config.page_size} tokens has"
    return FinishDecision(FinishReason.ABORT, error=ErrorCode.OUT_OF_MEMORY, message=message)


class PoolGate:
    """Rejects a retracted request whose prompt and output have outgrown the pool."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._most_bytes = config.num_pages * config.page_size * TOKEN_BYTES
        self._rejection = GateDecision(Verdict.REJECT, too_small(config))

    def look(self, request: Request) -> GateDecision:
        return ADMIT if len(request.kv.token_key) <= self._most_bytes else self._rejection


MAX_PASSES = 8  # passes without progress after which a request stops waiting for an extend


@dataclass(slots=True, eq=False)
class _Wait:
    """A request that waits for an extend."""

    request: Request
    limit: int  # bytes of its token key that a hit may cover
    since: int  # pass from which on passes without progress are counted


@dataclass(slots=True, eq=False)
class _Lead:
    """An extend that other requests wait for."""

    request: Request
    slot: int
    epoch: int  # epoch of the slot when the wait began
    committed: int  # bytes of its token key, in whole pages, that were committed at the last look
    due: int  # first pass in which a wait may end without progress
    waits: list[_Wait] = field(default_factory=list)


class PrefixGate:
    """Holds a request while a running extend computes its uncached prefix, so that n choices of one prompt compute it once.

    A wait is for one extend, its lead. It ends when the extend has committed the shared tokens, when the extend ends or is
    retracted, and after MAX_PASSES passes without progress. Waiting requests are listed with their lead, so that a pass costs
    nothing for requests whose lead has not advanced.
    """

    def __init__(self, page_size: int, memory: KVMemory, columns: SlotColumns, waiting: WaitingQueue) -> None:
        self._memory, self._columns, self._waiting = memory, columns, waiting
        self._page_bytes = page_size * TOKEN_BYTES
        # Bytes after the hit that must be shared.
        self._cut = max(IN_BATCH_DEPRIORITIZE_THRESHOLD * TOKEN_BYTES, self._page_bytes)
        self._leads: dict[int, _Lead] = {}
        self._extends: dict[TreeNode, dict[bytes, list[Request]]] = {}
        self._computing: list[Request] = []  # extends that are not listed in _extends yet
        self.num_passes = 0  # admission passes that have ended
        # By seq: requests that stopped waiting since the last pass over the whole queue. Some of them may have ended.
        self.freed: dict[int, Request] = {}

    @property
    def concerns_anybody(self) -> bool:
        """Whether a request waits, or has stopped waiting since the last pass over the whole queue."""
        return bool(self._leads or self.freed)

    def begin(self, computing: Iterable[Request]) -> None:
        """Begins a pass, and frees the requests that need not wait any longer.

        Args:
            computing: the extending requests of the uncommitted step, of the step that is being planned, and between two chunks.
                A request may occur twice.
        """
        self._extends.clear()
        self._computing = list(computing)
        for lead in list(self._leads.values()):
            self._follow(lead)

    def end_pass(self) -> None:
        """Ends a pass."""
        self.num_passes += 1

    def note(self, request: Request) -> None:
        """Adds a request that has just been admitted to the extends."""
        self.freed.pop(request.seq, None)
        self._computing.append(request)

    def look(self, request: Request) -> GateDecision:
        """Returns WAIT if an extend computes enough of the request's prefix beyond its hit, otherwise ADMIT."""
        if self._computing:
            self._list_extends()
        if not self._extends:
            return ADMIT
        kv, most = request.kv, request.prefix_limit()
        key = kv.token_key
        node, num_cached = self._memory.peek(request.namespace, key, most)
        hit, limit = num_cached * TOKEN_BYTES, min(most * TOKEN_BYTES, len(key) - TOKEN_BYTES)
        if hit + self._cut > limit:
            return ADMIT
        other = self._extend_of(node, key, hit, hit + self._cut)
        if other is None:
            return ADMIT
        if hit > kv.prefix_seen:
            kv.prefix_seen, kv.prefix_passes = hit, 0
        if kv.prefix_passes >= MAX_PASSES:
            return ADMIT
        wait = _Wait(request, limit, self.num_passes - kv.prefix_passes)
        lead = self._leads.get(other.seq) or self._lead(other)
        lead.due = min(lead.due, wait.since + MAX_PASSES)
        lead.waits.append(wait)
        if self.freed:
            self.freed.pop(request.seq, None)
        return WAIT

    def _list_extends(self) -> None:
        """Lists each extend under the node where its own hit ends, because it computes the tokens after that node."""
        for request in self._computing:
            if request.kv.lease is not None:
                node = request.kv.lease.node
                at = node.depth * self._page_bytes
                beyond = request.kv.token_key[at : at + self._cut]
                if len(beyond) == self._cut:
                    self._extends.setdefault(node, {}).setdefault(beyond, []).append(request)
        self._computing.clear()

    def _extend_of(self, node: TreeNode | None, key: bytes, hit: int, end: int) -> Request | None:
        """Returns an extend whose token key begins with key[:end], or None.

        Args:
            node: node in which the request's hit ends. The extend is listed at a node of the path to it.
            key: token key of the request.
            hit: bytes of the hit.
            end: bytes that must be shared.
        """
        while node is not None:
            at = node.depth * self._page_bytes
            if at <= hit and (extends := self._extends.get(node)):
                for other in extends.get(key[at : at + self._cut], ()):
                    if other.kv.lease is not None and other.kv.token_key[at:end] == key[at:end]:
                        return other
            node = node.parent
        return None

    def _lead(self, other: Request) -> _Lead:
        assert other.kv.lease is not None
        slot = other.kv.lease.slot
        epoch, committed = int(self._columns.epoch[slot]), self._committed(slot)
        lead = self._leads[other.seq] = _Lead(other, slot, epoch, committed, self.num_passes + MAX_PASSES)
        return lead

    def _committed(self, slot: int) -> int:
        return int(self._columns.committed[slot]) * TOKEN_BYTES // self._page_bytes * self._page_bytes

    def _follow(self, lead: _Lead) -> None:
        """Frees the requests that share no uncommitted token with the extend, or that have waited too long without progress."""
        if lead.request.kv.lease is None or self._columns.epoch[lead.slot] != lead.epoch:
            self._free_all(lead)
            return
        before, committed = lead.committed, self._committed(lead.slot)
        assert committed >= before, "an extend has lost what it had committed"
        if committed == before and self.num_passes < lead.due:
            return
        end = committed + self._cut
        beyond = lead.request.kv.token_key[before:end]  # the keys are known to agree before this part
        waits, lead.waits = lead.waits, []
        lead.committed, lead.due = committed, self.num_passes + MAX_PASSES
        for wait in waits:
            request = wait.request
            if committed > request.kv.prefix_seen:
                request.kv.prefix_seen, wait.since = committed, self.num_passes
            vain = self.num_passes - wait.since
            if vain >= MAX_PASSES or end > wait.limit or request.kv.token_key[before:end] != beyond:
                self._free(wait)
            elif request.held:
                lead.due = min(lead.due, wait.since + MAX_PASSES)
                lead.waits.append(wait)
        if not lead.waits:
            del self._leads[lead.request.seq]

    def _free_all(self, lead: _Lead) -> None:
        for wait in lead.waits:
            self._free(wait)
        del self._leads[lead.request.seq]

    def _free(self, wait: _Wait) -> None:
        """Ends a wait, and lets passes look at the request again if it is still in the queue."""
        wait.request.kv.prefix_passes = self.num_passes - wait.since
        if wait.request.held:
            self._waiting.free(wait.request)
            self.freed[wait.request.seq] = wait.request
