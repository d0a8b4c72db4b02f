"""The orders of admission and retraction (docs/design/scheduler.md#policies; thresholds as in SGLang).

All functions are pure functions of the queue and the radix tree. They lock and allocate nothing. With priority scheduling, an
order applies within equal ranks.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import numpy as np

from services.worker.core.contracts.config import SchedulePolicy, SchedulerConfig
from services.worker.core.kv.memory import KVMemory
from services.worker.core.kv.tree_node import TOKEN_BYTES, TreeNode
from services.worker.core.requests.request import Request
from services.worker.core.requests.shares import Flow
from services.worker.core.requests.waiting_queue import WaitingQueue

IN_BATCH_CHECK_THRESHOLD = 32  # tokens of a hit above which a request is not considered for in-batch sharing
IN_BATCH_DEPRIORITIZE_THRESHOLD = 32  # shared tokens for which a request waits behind an earlier waiting request


@dataclass(frozen=True, slots=True)
class _Hit:
    """The prefix hit of a waiting request."""

    request: Request
    node: TreeNode | None  # end of the hit
    num_tokens: int
    later: bool  # an earlier waiting request will compute its prefix


def service_order(
    config: SchedulerConfig,
    queue: WaitingQueue,
    running: Sequence[Request],
    memory: KVMemory,
    random: np.random.Generator,
    several: bool,
) -> Iterator[Request]:
    """Yields the waiting requests that no gate holds, in the policy's order.

    The caller may remove or hold a request before it takes the next one.

    Args:
        config: the configuration.
        queue: the waiting requests.
        running: the decoding requests, for the policy `routing-key`.
        memory: the tree, for policies by prefix.
        random: generator for the policy `random`.
        several: whether several flows share the worker. The policy then orders the requests of each flow.
    """
    policy = effective_policy(config, len(queue))
    if policy is SchedulePolicy.FCFS:
        return in_fair_turn(queue) if several else queue.in_turn()
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
    assert len(order) == len(requests), "an order of all that may be looked at"
    order.sort(key=lambda r: r.rank)
    return fairly(order) if several else iter(order)


def effective_policy(config: SchedulerConfig, num_waiting: int) -> SchedulePolicy:
    """Returns the policy in effect.

    `lpm` costs one match per waiting request, so that a long queue is served in order of arrival. Policies by prefix need the
    radix cache.
    """
    if config.schedule_policy is SchedulePolicy.LPM and num_waiting > config.lpm_fallback_threshold:
        return SchedulePolicy.FCFS
    if not config.enable_radix_cache and config.schedule_policy in (SchedulePolicy.LPM, SchedulePolicy.DFS_WEIGHT):
        return SchedulePolicy.FCFS
    return config.schedule_policy


def _hits(requests: Sequence[Request], memory: KVMemory) -> list[_Hit]:
    """Returns the hits of the requests, for in-batch prefix caching.

    The first request with an uncached prefix computes it. Other requests with this prefix are marked as later.
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

    The requests of a node follow those below it. Later requests, and requests without a hit, are last.
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
    """Counts a request at `node` and at its ancestors."""
    walk: TreeNode | None = node
    while walk is not None:
        seen = walk in weight
        weight[walk] += 1
        if not seen:
            (children[walk.parent] if walk.parent is not None else roots).append(walk)
        walk = walk.parent


def _by_routing_key(requests: Sequence[Request], running: Sequence[Request]) -> list[Request]:
    """Orders requests by the number of running requests with their routing key; requests with other keys follow by arrival."""
    counts = Counter(r.routing_key for r in running if r.routing_key)
    if not counts:
        return list(requests)
    return sorted(requests, key=lambda r: (-counts.get(r.routing_key, 0), r.routing_key if r.routing_key in counts else ""))


def victim_order(request: Request) -> tuple[int, int, int]:
    """Returns the sort key of retraction. The least urgent request is first, then the least output, then the longest prompt."""
    return -request.rank, len(request.progress.output_ids), -request.num_prompt_tokens


def preemption_order(request: Request) -> tuple[int, int]:
    """Returns the sort key of preemption. The least urgent request is first, then the latest arrival."""
    return -request.rank, -request.seq


def preemptible(config: SchedulerConfig, request: Request, running: Sequence[Request]) -> list[Request]:
    """Returns the running requests that `request` may displace, in order. They are less urgent by more than the threshold."""
    victims = [r for r in running if r.rank - request.rank > config.priority_preemption_threshold]
    return sorted(victims, key=preemption_order)


# Fair between flows (docs/design/scheduler.md#shares)


def fairly(requests: Iterable[Request]) -> Iterator[Request]:
    """Yields requests that are sorted by rank, fairly between the flows of each rank.

    The turns of the flows are compared again after each request.
    """
    for _, alike in groupby(requests, key=lambda r: r.rank):
        flows: dict[Flow, list[Request]] = {}
        for request in alike:
            assert request.flow is not None, "a waiting request has prompt tokens to plan"
            flows.setdefault(request.flow, []).append(request)
        yield from _merged(flows)


def in_fair_turn(queue: WaitingQueue) -> Iterator[Request]:
    """Yields the requests of WaitingQueue.in_turn(), but fairly between flows if they never ran."""
    for rank in queue.ranks():
        back, flows = queue.back(rank), queue.flows(rank)
        yield from [request for request in back if not request.held]
        yield from _merged(flows)


def due_before(queue: WaitingQueue, first: Request) -> Iterator[Request]:
    """Yields the waiting requests that precede the extending request `first`.

    They are more urgent, or equally urgent with an earlier turn of their flow.
    """
    assert first.flow is not None, "an extending request has prompt tokens to plan"
    for rank in queue.ranks():
        if rank > first.rank:
            return
        flows: dict[Flow, list[Request]] = {}
        for request in chain(queue.back(rank), *queue.flows(rank).values()):
            if request.flow is not None and (rank < first.rank or request.flow.turn < first.flow.turn):
                flows.setdefault(request.flow, []).append(request)
        for request in _merged(flows):
            if request.flow is not None and (rank < first.rank or request.flow.turn < first.flow.turn):
                yield request


def _merged(flows: dict[Flow, list[Request]]) -> Iterator[Request]:
    """Merges flows by turn; flows of equal turns keep their order. Skips held requests."""
    if len(flows) == 1:
        yield from [request for requests in flows.values() for request in requests if not request.held]
        return
    heap = [(flow.turn, place, flow, iter(requests)) for place, (flow, requests) in enumerate(flows.items())]
    heapq.heapify(heap)
    while heap:
        turn, place, flow, rest = heap[0]
        if flow.turn != turn:
            heapq.heapreplace(heap, (flow.turn, place, flow, rest))
            continue
        request = next((request for request in rest if not request.held), None)
        if request is None:
            heapq.heappop(heap)
        else:
            yield request
