"""The waiting queue, and the orders in which requests are admitted and lose their lease. RequestQueues owns the queue.

The queue is sorted by rank. Within a rank, requests that ran before come first, then the other requests by arrival. The policy
fcfs serves this order; other policies sort the requests of each rank (docs/design/scheduler.md#policies). A request that a gate
blocks keeps its position, and admission passes skip it until the gate unblocks it.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, islice

import numpy as np

from rootstock_llm.services.worker.core.contracts.config import SchedulePolicy, SchedulerConfig
from rootstock_llm.services.worker.core.kv.memory import KVMemory
from rootstock_llm.services.worker.core.kv.tree_node import TOKEN_BYTES, TreeNode
from rootstock_llm.services.worker.core.requests.request import Request
from rootstock_llm.services.worker.core.requests.shares import Flow

# Thresholds of in-batch prefix caching, in tokens; names and values as in SGLang.
IN_BATCH_CHECK_THRESHOLD = 32  # requests with a longer prefix hit are not compared with other waiting requests
IN_BATCH_DEPRIORITIZE_THRESHOLD = 32  # a request that shares this many first tokens with an earlier one is served later


@dataclass(slots=True)
class _Rank:
    """The waiting requests of one rank."""

    fresh: dict[int, Request] = field(default_factory=dict)  # requests that never ran, by seq, in order of arrival
    flows: dict[Flow, dict[int, Request]] = field(default_factory=dict)  # the requests of `fresh`, by flow and seq
    back: list[Request] = field(default_factory=list)  # requests that ran before, in order of arrival


@dataclass(slots=True)
class ReservedCapacity:
    """The slots and the KV that stay free for blocked requests, so that less urgent requests do not take them."""

    slots: int = 0
    tokens: int = 0  # upper limit of the blocked requests' KV, in tokens

    def add(self, slots: int, tokens: int) -> None:
        self.slots += slots
        self.tokens += tokens


class WaitingQueue:
    """The waiting requests, by rank."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._order: list[int] = []  # the ranks that have requests, most urgent first
        self._size = 0
        self._reserved: dict[int, ReservedCapacity] = {}  # capacity reserved for the blocked requests, by rank
        self.num_blocked = 0  # number of requests that gates block
        self.num_tokens = 0  # prompt and output tokens, counted when the requests were added
        self._have_run: set[int] = set()  # seqs of the requests that have run on this worker

    def __len__(self) -> int:
        return self._size

    @property
    def num_retracted(self) -> int:
        """Number of waiting requests that have run on this worker before."""
        return len(self._have_run)

    def add(self, request: Request, back: bool = False) -> None:
        assert not request.blocked_tokens, "no gate blocks a request that enters the queue"
        rank = self._ranks.get(request.rank)
        if rank is None:
            self._ranks = {each: self._ranks[each] for each in self._order}  # drops the ranks without requests
            rank = self._ranks[request.rank] = _Rank()
        if not rank.fresh and not rank.back:
            insort(self._order, request.rank)
        if back:
            rank.back.append(request)
            rank.back.sort(key=lambda r: r.seq)
            if request.progress.queue_s >= 0:
                self._have_run.add(request.seq)
        else:
            assert request.seq not in rank.fresh, "a request is in the queue once"
            assert request.flow is not None, "a waiting request has prompt tokens to plan"
            rank.fresh = _with(rank.fresh, request)
            rank.flows[request.flow] = _with(rank.flows.get(request.flow, {}), request)
        self._size += 1
        request.queued_tokens = request.num_prompt_tokens + len(request.progress.output_ids)
        self.num_tokens += request.queued_tokens

    def remove(self, request: Request) -> None:
        if request.blocked_tokens:
            self.unblock(request)
        rank = self._ranks[request.rank]
        if rank.fresh.pop(request.seq, None) is None:
            rank.back.remove(request)
            self._have_run.discard(request.seq)
        else:
            assert request.flow is not None, "a waiting request has prompt tokens to plan"
            mine = rank.flows[request.flow]
            del mine[request.seq]
            if not mine:
                del rank.flows[request.flow]
        self._size -= 1
        self.num_tokens -= request.queued_tokens
        assert 0 <= self._size <= self.num_tokens, "each waiting request has at least one token"
        if not rank.fresh and not rank.back:
            self._order.remove(request.rank)
            rank.fresh = {}  # a dict that was large stays slow to iterate

    def block(self, request: Request, tokens: int) -> None:
        """Makes passes skip a request until unblock().

        A slot and KV for `tokens` tokens stay free for the request. `tokens`, at least 1, is the most that the request can need.
        """
        assert tokens > 0 and not request.blocked_tokens, "a request is blocked at most once"
        reserved = self._reserved.get(request.rank)
        if reserved is None:
            reserved = self._reserved[request.rank] = ReservedCapacity()
        reserved.add(1, tokens)
        request.blocked_tokens = tokens
        self.num_blocked += 1
        assert self.num_blocked <= self._size, "only requests of the queue are blocked"

    def unblock(self, request: Request) -> None:
        """Ends the block of a request, so that the next pass considers it again."""
        assert request.blocked_tokens > 0, "only blocked requests are unblocked"
        reserved = self._reserved[request.rank]
        reserved.add(-1, -request.blocked_tokens)
        assert reserved.slots >= 0 and reserved.tokens >= 0, "unblock() frees what block() has reserved"
        if not reserved.slots:
            assert not reserved.tokens, "tokens are reserved only for blocked requests"
            del self._reserved[request.rank]
        request.blocked_tokens = 0
        self.num_blocked -= 1

    def reserved_before(self, rank: int) -> ReservedCapacity:
        """Returns the slots and the KV that a request of rank `rank` must leave free for more urgent blocked requests."""
        if not self.num_blocked or rank == self._order[0]:
            return ReservedCapacity()
        above = [reserved for each, reserved in self._reserved.items() if each < rank]
        return ReservedCapacity(sum(reserved.slots for reserved in above), sum(reserved.tokens for reserved in above))

    def reserved_by_rank(self) -> dict[int, ReservedCapacity]:
        """Returns the slots and the KV reserved for blocked requests, by rank, for checks."""
        return {rank: replace(reserved) for rank, reserved in self._reserved.items()}

    def last_fresh(self) -> Request | None:
        """Returns the last request of the queue that never ran, or None."""
        for rank in reversed(self._order):
            if fresh := self._ranks[rank].fresh:
                return next(reversed(fresh.values()))
        return None

    def __iter__(self) -> Iterator[Request]:
        """Yields all requests in the queue's order, including blocked ones. The queue must not change during the iteration."""
        for rank in self._order:
            yield from self._ranks[rank].back
            yield from self._ranks[rank].fresh.values()

    def ranks(self) -> tuple[int, ...]:
        """Returns the ranks of the waiting requests, most urgent first."""
        return tuple(self._order)

    def back(self, rank: int) -> list[Request]:
        """Returns the requests of the rank that ran before, by arrival, including blocked requests."""
        return list(self._ranks[rank].back)

    def flows(self, rank: int) -> dict[Flow, list[Request]]:
        """Returns the requests of the rank that never ran, by flow and arrival, including blocked requests."""
        return {flow: list(requests.values()) for flow, requests in self._ranks[rank].flows.items()}

    def eligible(self) -> list[Request]:
        """Returns the requests that no gate blocks, in the queue's order."""
        return [request for request in self if not request.blocked_tokens] if self.num_blocked else list(self)

    def first(self) -> Request | None:
        """Returns the first request of the queue that no gate blocks, or None."""
        for rank in self._order:
            mine = self._ranks[rank]
            for request in mine.back:
                if not request.blocked_tokens:
                    return request
            for request in mine.fresh.values():
                if not request.blocked_tokens:
                    return request
        return None

    def in_order(self) -> Iterator[Request]:
        """Yields the requests of eligible() in the same order.

        In contrast to eligible(), the caller may remove or block a request before it takes the next one.
        """
        while not self.num_blocked and (request := self.first()) is not None:
            yield request
        if self.num_blocked == self._size:
            return
        for rank in tuple(self._order):
            mine = self._ranks[rank]
            yield from [request for request in mine.back if not request.blocked_tokens]
            passed, size = 0, 8
            while some := list(islice(mine.fresh.values(), passed, passed + size)):
                free = [request for request in some if not request.blocked_tokens]
                yield from free
                passed += len(some) - sum(request.seq not in mine.fresh for request in free)
                size *= 2


def _with(requests: dict[int, Request], request: Request) -> dict[int, Request]:
    """Adds the request to a dictionary by seq, and returns the dictionary in order of arrival.

    The result is a new dictionary if the request arrived earlier than the last request of `requests`.
    """
    came_back = bool(requests) and next(reversed(requests)) > request.seq
    requests[request.seq] = request
    return dict(sorted(requests.items())) if came_back else requests


@dataclass(frozen=True, slots=True)
class _Hit:
    """The prefix hit of a waiting request."""

    request: Request
    node: TreeNode | None  # tree node in which the hit ends; None: the request's namespace has no tree
    num_tokens: int
    later: bool  # an earlier waiting request has the same uncached prefix and will compute it


def service_order(
    config: SchedulerConfig,
    queue: WaitingQueue,
    running: Sequence[Request],
    memory: KVMemory,
    random: np.random.Generator,
    several: bool,
) -> Iterator[Request]:
    """Yields the waiting requests that no gate blocks, in the policy's order.

    The caller may remove or block a request before it takes the next one.

    Args:
        config: the configuration.
        queue: the waiting requests.
        running: the decoding requests, for the policy `routing-key`.
        memory: the tree, for policies by prefix.
        random: generator for the policy `random`.
        several: whether more than one flow has requests. If so, flows are served fairly, and the policy orders each flow.
    """
    policy = effective_policy(config, len(queue))
    if policy is SchedulePolicy.FCFS:
        return in_fair_order(queue) if several else queue.in_order()
    requests = queue.eligible()
    match policy:
        case SchedulePolicy.LPM:
            hits = _hits(requests, memory)
            hits.sort(key=lambda hit: (hit.later, -hit.num_tokens))
            order = [hit.request for hit in hits]
        case SchedulePolicy.DFS_WEIGHT:
            order = _by_dfs_weight(_hits(requests, memory))
        case SchedulePolicy.LOF:
            order = sorted(requests, key=lambda r: -r.params.max_new_tokens)
        case SchedulePolicy.RANDOM:
            order = [requests[i] for i in random.permutation(len(requests)).tolist()]
        case SchedulePolicy.ROUTING_KEY:
            order = _by_routing_key(requests, running)
    assert len(order) == len(requests), "a policy drops no request"
    order.sort(key=lambda r: r.rank)
    return fairly(order) if several else iter(order)


def effective_policy(config: SchedulerConfig, num_waiting: int) -> SchedulePolicy:
    """Returns the policy in effect: the configured one, or fcfs in two cases.

    - `lpm` with a queue above the threshold, because `lpm` costs one search of the radix tree per waiting request.
    - A policy by prefix without the radix cache.
    """
    if config.schedule_policy is SchedulePolicy.LPM and num_waiting > config.lpm_fallback_threshold:
        return SchedulePolicy.FCFS
    if not config.enable_radix_cache and config.schedule_policy in (SchedulePolicy.LPM, SchedulePolicy.DFS_WEIGHT):
        return SchedulePolicy.FCFS
    return config.schedule_policy


def _hits(requests: Sequence[Request], memory: KVMemory) -> list[_Hit]:
    """Returns the prefix hits of the requests.

    If several requests have the same uncached prefix, the first of them will compute it, and the others are marked as `later`.
    """
    first_of: set[tuple[str, bytes]] = set()
    hits = []
    cut = IN_BATCH_DEPRIORITIZE_THRESHOLD * TOKEN_BYTES
    for request in requests:
        node, count = memory.peek(request.namespace, request.kv.token_key, request.prefix_limit())
        later = False
        if count <= IN_BATCH_CHECK_THRESHOLD and len(request.kv.token_key) >= cut:
            prefix = (request.namespace, request.kv.token_key[:cut])
            later = prefix in first_of
            first_of.add(prefix)
        hits.append(_Hit(request, node, count, later))
    return hits


def _by_dfs_weight(hits: Sequence[_Hit]) -> list[Request]:
    """Orders requests depth first through the radix tree, beginning with the branch with the most waiting requests.

    The requests of a node follow the requests below the node. Requests marked as `later`, and requests without a hit, are last.
    """
    own: dict[TreeNode, list[Request]] = defaultdict(list)
    weight: Counter[TreeNode] = Counter()
    children: dict[TreeNode, list[TreeNode]] = defaultdict(list)
    roots: list[TreeNode] = []
    last = [hit.request for hit in sorted(hits, key=lambda hit: hit.later) if hit.later or hit.node is None]
    for hit in hits:
        if not hit.later and hit.node is not None:
            own[hit.node].append(hit.request)
            _add_weight(hit.node, weight, children, roots)
    out: list[Request] = []
    stack = [(node, False) for node in sorted(roots, key=lambda n: weight[n])]
    while stack:
        node, below_is_done = stack.pop()
        if below_is_done:
            out += own.get(node, ())
            continue
        stack.append((node, True))
        stack += [(child, False) for child in sorted(children.get(node, ()), key=lambda n: weight[n])]
    return out + last


def _add_weight(
    node: TreeNode, weight: Counter[TreeNode], children: dict[TreeNode, list[TreeNode]], roots: list[TreeNode]
) -> None:
    """Adds 1 to the weight of `node` and of its ancestors. `children` and `roots` get the nodes that had no weight."""
    walk: TreeNode | None = node
    while walk is not None:
        seen = walk in weight
        weight[walk] += 1
        if not seen:
            (children[walk.parent] if walk.parent is not None else roots).append(walk)
        walk = walk.parent


def _by_routing_key(requests: Sequence[Request], running: Sequence[Request]) -> list[Request]:
    """Orders requests by the number of running requests with their routing key, highest first.

    Requests of one routing key stay together. Requests whose routing key no running request has are last. Requests that are equal
    in both respects keep their order.
    """
    counts = Counter(r.routing_key for r in running if r.routing_key)
    if not counts:
        return list(requests)
    return sorted(requests, key=lambda r: (-counts.get(r.routing_key, 0), r.routing_key if r.routing_key in counts else ""))


def victim_order(request: Request) -> tuple[int, int, int]:
    """Returns the sort key of retraction: least urgent first, then shortest output, then longest prompt."""
    return -request.rank, len(request.progress.output_ids), -request.num_prompt_tokens


def preemption_order(request: Request) -> tuple[int, int]:
    """Returns the sort key of preemption: least urgent first, then latest arrival."""
    return -request.rank, -request.seq


def preemptible(config: SchedulerConfig, request: Request, running: Sequence[Request]) -> list[Request]:
    """Returns the running requests that are less urgent than `request` by more than the threshold, in order of preemption."""
    victims = [r for r in running if r.rank - request.rank > config.priority_preemption_threshold]
    return sorted(victims, key=preemption_order)


# Fairness between flows (docs/design/scheduler.md#fairness-between-flows)


def fairly(requests: Iterable[Request]) -> Iterator[Request]:
    """Yields requests that are sorted by rank. Within a rank, serves the flows fairly.

    Before each request, compares the flows' sort keys again, because an admission changes them.
    """
    for _, alike in groupby(requests, key=lambda r: r.rank):
        flows: dict[Flow, list[Request]] = {}
        for request in alike:
            assert request.flow is not None, "a waiting request has prompt tokens to plan"
            flows.setdefault(request.flow, []).append(request)
        yield from _merged(flows)


def in_fair_order(queue: WaitingQueue) -> Iterator[Request]:
    """Yields the requests that no gate blocks, by rank: first requests that ran before, then other requests fairly by flow."""
    for rank in queue.ranks():
        back, flows = queue.back(rank), queue.flows(rank)
        yield from [request for request in back if not request.blocked_tokens]
        yield from _merged(flows)


def due_before(queue: WaitingQueue, first: Request) -> Iterator[Request]:
    """Yields the waiting requests that precede the extending request `first`.

    These are more urgent requests, and equally urgent requests of a flow with a lower sort key.
    """
    assert first.flow is not None, "an extending request has prompt tokens to plan"
    for rank in queue.ranks():
        if rank > first.rank:
            return
        flows: dict[Flow, list[Request]] = {}
        for request in chain(queue.back(rank), *queue.flows(rank).values()):
            if request.flow is not None and (rank < first.rank or request.flow.sort_key < first.flow.sort_key):
                flows.setdefault(request.flow, []).append(request)
        for request in _merged(flows):
            if request.flow is not None and (rank < first.rank or request.flow.sort_key < first.flow.sort_key):
                yield request


def _merged(flows: dict[Flow, list[Request]]) -> Iterator[Request]:
    """Yields the requests that no gate blocks, each time from the flow with the lowest sort key.

    Flows with equal sort keys keep their order.
    """
    if len(flows) == 1:
        yield from [request for requests in flows.values() for request in requests if not request.blocked_tokens]
        return
    heap = [(flow.sort_key, index, flow, iter(requests)) for index, (flow, requests) in enumerate(flows.items())]
    heapq.heapify(heap)
    while heap:
        sort_key, index, flow, rest = heap[0]
        if flow.sort_key != sort_key:
            heapq.heapreplace(heap, (flow.sort_key, index, flow, rest))
            continue
        request = next((request for request in rest if not request.blocked_tokens), None)
        if request is None:
            heapq.heappop(heap)
        else:
            yield request
