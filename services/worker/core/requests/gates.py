"""Gates: checks that admit a waiting request, make it wait or end it, before an admission pass checks the step's budgets.

An admission pass asks the pool gate and then the prefix gate about each waiting request. The first result other than ADMIT
decides:

- WAIT blocks the request: this and later passes skip it until its gate unblocks it (WaitingQueue.unblock).
- REJECT ends the request.

These two gates allocate nothing and do not change the radix tree. Requests of the grammar gate wait outside of the waiting queue,
where they delay no other request.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.grammar import GrammarBook, GrammarSpec
from rootstock_llm.services.worker.core.contracts.messages import ErrorCode, Finish, FinishReason
from rootstock_llm.services.worker.core.kv.memory import KVMemory
from rootstock_llm.services.worker.core.kv.tree_node import TOKEN_BYTES, TreeNode
from rootstock_llm.services.worker.core.requests.request import Request, SlotColumns
from rootstock_llm.services.worker.core.requests.waiting_queue import IN_BATCH_DEPRIORITIZE_THRESHOLD, WaitingQueue

# Limit of admission passes in which an extend commits nothing. A request that waits for the extend then stops waiting.
MAX_PASSES = 8
RESUBMIT_S = 0.25  # seconds after which a grammar is submitted again if the compiler was overloaded or had ended
# Limits of one call of GrammarGate.replay(), in which matchers accept given output. The loop calls it once per iteration.
REPLAY_TOKENS = 1024  # tokens of all requests together
REPLAY_S = 0.01  # CPU seconds of all requests together
REPLAY_AT_ONCE = 32  # tokens between two checks of REPLAY_S


class Verdict(enum.Enum):
    ADMIT = enum.auto()
    WAIT = enum.auto()
    REJECT = enum.auto()


@dataclass(frozen=True, slots=True)
class GateDecision:
    """The result of one gate for one request."""

    verdict: Verdict
    ending: Finish | None = None  # ending of the request; set with REJECT


ADMIT, WAIT = GateDecision(Verdict.ADMIT), GateDecision(Verdict.WAIT)
Gate = Callable[[Request], GateDecision]


def too_small(config: SchedulerConfig) -> Finish:
    """Returns the ending of a request that does not fit into the whole pool."""
    message = f"this request needs more KV than the whole pool of {config.num_pages * config.page_size} tokens has"
    return Finish(FinishReason.ABORT, error=ErrorCode.OUT_OF_MEMORY, message=message)


class PoolGate:
    """Rejects a retracted request whose prompt and output have outgrown the pool."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._most_bytes = config.num_pages * config.page_size * TOKEN_BYTES
        self._rejection = GateDecision(Verdict.REJECT, too_small(config))

    def check(self, request: Request) -> GateDecision:
        return ADMIT if len(request.kv.token_key) <= self._most_bytes else self._rejection


@dataclass(slots=True, eq=False)
class _Wait:
    """A request that waits until an extend has computed the common prefix of the two."""

    request: Request
    limit: int  # number of bytes of the request's token key that a prefix hit may cover
    since: int  # value of num_passes when the extend last made progress; later passes count against MAX_PASSES


@dataclass(slots=True, eq=False)
class _Lead:
    """An extend for which other requests wait."""

    request: Request
    slot: int
    epoch: int  # epoch of the slot when the first wait began; a different epoch means that the extend has ended
    committed: int  # committed bytes of the extend's token key, rounded down to whole pages, as begin() last read them
    due: int  # number of the first pass in which a wait may end for lack of progress
    waits: list[_Wait] = field(default_factory=list)


class PrefixGate:
    """Holds a request while a running extend computes the same prefix, so that n choices of one prompt compute the prefix once.

    A request waits for one extend, its lead. The wait ends in three cases:

    - The lead has committed so much that fewer than `_cut` bytes of the shared prefix remain.
    - The lead ends or is retracted.
    - The lead commits nothing in MAX_PASSES passes.

    Waiting requests are listed by lead, so that a pass costs nothing for requests whose lead has not advanced.
    """

    def __init__(self, page_size: int, memory: KVMemory, columns: SlotColumns, waiting: WaitingQueue) -> None:
        self._memory, self._columns, self._waiting = memory, columns, waiting
        self._page_bytes = page_size * TOKEN_BYTES
        # A request waits for an extend only if both token keys are equal in this number of bytes after the request's hit.
        self._cut = max(IN_BATCH_DEPRIORITIZE_THRESHOLD * TOKEN_BYTES, self._page_bytes)
        self._leads: dict[int, _Lead] = {}  # by seq of the extend
        # Running extends: first by the node at the end of the extend's lease, then by the next `_cut` bytes of its token key.
        self._extends: dict[TreeNode, dict[bytes, list[Request]]] = {}
        self._computing: list[Request] = []  # extends that are not listed in _extends yet
        self.num_passes = 0  # admission passes that have ended
        # By seq: requests whose wait ended after the last pass over the whole queue. Some of these requests may have ended.
        self.freed: dict[int, Request] = {}

    @property
    def has_waits(self) -> bool:
        """Whether a request waits, or a wait has ended since the last pass over the whole queue."""
        return bool(self._leads or self.freed)

    def begin(self, computing: Iterable[Request]) -> None:
        """Begins a pass, and unblocks the requests whose wait has ended.

        Args:
            computing: the extending requests. Each has a chunk in the uncommitted step or in the step that is being planned, or
                is between two chunks. A request may occur twice.
        """
        self._extends.clear()
        self._computing = list(computing)
        for lead in list(self._leads.values()):
            self._update_lead(lead)

    def end_pass(self) -> None:
        """Ends a pass."""
        self.num_passes += 1

    def add_extend(self, request: Request) -> None:
        """Adds a request that has just been admitted, so that later requests of the pass may wait for it."""
        self.freed.pop(request.seq, None)
        self._computing.append(request)

    def check(self, request: Request) -> GateDecision:
        """Returns WAIT if a running extend computes the next `_cut` bytes after the request's hit, else ADMIT.

        Also returns ADMIT if the request has waited MAX_PASSES passes in which no extend committed more of its prefix.
        """
        if self._computing:
            self._list_extends()
        if not self._extends:
            return ADMIT
        kv, most = request.kv, request.prefix_limit()
        key = kv.token_key
        node, num_cached = self._memory.cached(request.namespace, key, most)
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
        """Lists each extend under the node at the end of its lease, because the extend computes the tokens after that node."""
        for request in self._computing:
            if request.kv.lease is not None:
                node = request.kv.lease.node
                at = node.depth * self._page_bytes
                beyond = request.kv.token_key[at : at + self._cut]
                if len(beyond) == self._cut:
                    self._extends.setdefault(node, {}).setdefault(beyond, []).append(request)
        self._computing.clear()

    def _extend_of(self, node: TreeNode | None, key: bytes, hit: int, end: int) -> Request | None:
        """Returns an extend whose token key begins with key[:end], or None if there is none.

        Args:
            node: node in which the request's hit ends. Extends at the nodes of the path to this node are compared.
            key: token key of the request.
            hit: length of the hit in bytes.
            end: number of first bytes in which both token keys must be equal.
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

    def _update_lead(self, lead: _Lead) -> None:
        """Unblocks the requests that gain nothing by waiting longer for `lead`.

        If the lead has ended or was retracted, these are all requests that wait for it. Otherwise, these are requests with fewer
        than `_cut` common bytes after the lead's committed part, and requests without progress in MAX_PASSES passes.
        """
        if lead.request.kv.lease is None or self._columns.epoch[lead.slot] != lead.epoch:
            self._free_all(lead)
            return
        before, committed = lead.committed, self._committed(lead.slot)
        assert committed >= before, "the committed tokens of an extend only grow"
        if committed == before and self.num_passes < lead.due:
            return
        end = committed + self._cut
        beyond = lead.request.kv.token_key[before:end]  # the token keys were compared up to `before` already
        waits, lead.waits = lead.waits, []
        lead.committed, lead.due = committed, self.num_passes + MAX_PASSES
        for wait in waits:
            request = wait.request
            if committed > request.kv.prefix_seen:
                request.kv.prefix_seen, wait.since = committed, self.num_passes
            vain = self.num_passes - wait.since
            if vain >= MAX_PASSES or end > wait.limit or request.kv.token_key[before:end] != beyond:
                self._free(wait)
            elif request.blocked_tokens:
                lead.due = min(lead.due, wait.since + MAX_PASSES)
                lead.waits.append(wait)
        if not lead.waits:
            del self._leads[lead.request.seq]

    def _free_all(self, lead: _Lead) -> None:
        for wait in lead.waits:
            self._free(wait)
        del self._leads[lead.request.seq]

    def _free(self, wait: _Wait) -> None:
        """Ends a wait, and unblocks the request if it is still in the queue."""
        wait.request.kv.prefix_passes = self.num_passes - wait.since
        if wait.request.blocked_tokens:
            self._waiting.unblock(wait.request)
            self.freed[wait.request.seq] = wait.request


class GrammarGate:
    """The requests that wait until their grammar is compiled, or until their matcher has accepted their given output."""

    def __init__(self, book: GrammarBook | None, replay_tokens: int = REPLAY_TOKENS) -> None:
        self._book = book  # unset if the worker offers no structured output
        self._replay_tokens = replay_tokens
        self._waiting: dict[GrammarSpec, dict[int, Request]] = {}
        self._replaying: dict[int, Request] = {}
        self._postponed: dict[GrammarSpec, float] = {}  # postponed grammars, with the times at which they are submitted again
        self._size = 0
        self.num_tokens = 0  # prompt and output tokens of the waiting requests

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """Yields the requests in any order."""
        for waiting in self._waiting.values():
            yield from waiting.values()
        yield from self._replaying.values()

    @property
    def offers_grammars(self) -> bool:
        return self._book is not None

    def admits(self, request: Request) -> bool:
        """Sets the matcher of a request with a grammar.

        Returns:
            Whether the request may enter the waiting queue. False if its grammar is not compiled, or if its matcher must first
            accept given output. The caller then calls wait().
        """
        spec = request.params.grammar
        if spec is None:
            return True
        assert self._book is not None
        request.matcher = self._book.open(spec, request.payer[0])
        return request.matcher is not None and not request.progress.num_given

    def wait(self, request: Request) -> None:
        self._size += 1
        request.queued_tokens = request.num_prompt_tokens + len(request.progress.output_ids)
        self.num_tokens += request.queued_tokens
        self._list(request)

    def leave(self, request: Request) -> None:
        self._size -= 1
        self.num_tokens -= request.queued_tokens
        assert 0 <= self._size <= self.num_tokens, "each waiting request has at least one token"
        if self._replaying.pop(request.seq, None) is None:
            self._unlist(request)

    def compiled(self, spec: GrammarSpec) -> list[Request]:
        """Returns the requests that may leave the gate, because `spec` is compiled. The caller calls leave() for each of them."""
        free = []
        for request in self.waiting_for(spec):
            if self.admits(request):
                free.append(request)
            elif request.matcher is not None:
                self._unlist(request)
                self._list(request)
        return free

    def waiting_for(self, spec: GrammarSpec) -> list[Request]:
        """Returns the requests that wait for the grammar, in order of arrival."""
        return list(self._waiting.get(spec, {}).values())

    def postpone(self, spec: GrammarSpec, now: float) -> list[Request]:
        """Postpones a grammar, because the compiler is overloaded or has ended.

        Returns:
            The requests without given output, which the caller must refuse. Requests with given output continue to wait.
        """
        waiting = self.waiting_for(spec)
        if any(request.progress.num_given for request in waiting):
            self._postponed[spec] = now + RESUBMIT_S
        return [request for request in waiting if not request.progress.num_given]

    def resubmit(self, now: float) -> list[Request]:
        """Submits postponed grammars again when RESUBMIT_S has passed since they were postponed.

        Returns:
            The requests that may leave the gate, because their grammar is compiled. The caller calls leave() for each of them.
        """
        if not self._postponed:
            return []
        due = [spec for spec, until in self._postponed.items() if until <= now]
        for spec in due:
            del self._postponed[spec]
        return [request for spec in due for request in self.compiled(spec)]

    def replay(self) -> list[Request]:
        """Makes each matcher accept the given output of its request, except the last token. A matcher may refuse a token.

        Stops after REPLAY_TOKENS tokens or REPLAY_S seconds; the next call continues. Calls Matcher.take_cost(), so that this
        CPU time does not count as the time of a step.

        Returns:
            The requests whose matcher has accepted all of these tokens or refused one. The caller calls leave() for each request.
        """
        if not self._replaying:
            return []
        free = []
        left, spent_s = self._replay_tokens, 0.0
        for request in self._replaying.values():
            last, fits = len(request.progress.output_ids) - 1, True
            while fits and request.progress.num_replayed < last and left > 0 and spent_s < REPLAY_S:
                before = request.progress.num_replayed
                fits, cost_s = _replay(request, min(last, before + min(left, REPLAY_AT_ONCE)))
                left -= request.progress.num_replayed - before + (not fits)
                spent_s += cost_s
            if not fits or request.progress.num_replayed == last:
                free.append(request)
            if left <= 0 or spent_s >= REPLAY_S:
                break
        return free

    def _list(self, request: Request) -> None:
        assert request.params.grammar is not None
        if request.matcher is not None:
            self._replaying[request.seq] = request
        else:
            self._waiting.setdefault(request.params.grammar, {})[request.seq] = request

    def _unlist(self, request: Request) -> None:
        assert request.params.grammar is not None
        waiting = self._waiting[request.params.grammar]
        del waiting[request.seq]
        if not waiting:
            del self._waiting[request.params.grammar]


def _replay(request: Request, end: int) -> tuple[bool, float]:
    """Makes the matcher accept the output tokens before index `end`.

    Returns:
        Whether the grammar allows all of these tokens, and the CPU time in seconds.
    """
    matcher = request.matcher
    assert matcher is not None
    assert end < len(request.progress.output_ids), "a matcher accepts the last token when the request enters the queue"
    while request.progress.num_replayed < end:
        if not matcher.accept(request.progress.output_ids[request.progress.num_replayed]):
            return False, matcher.take_cost()
        request.progress.num_replayed += 1
    return True, matcher.take_cost()
