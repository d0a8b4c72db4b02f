"""The orders of admission and of retraction (docs/design/scheduler.md#policies; thresholds as in SGLang).

Pure functions of the queue and the radix tree. They lock and allocate nothing. With priority scheduling, an order holds within
equal ranks.
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

IN_BATCH_CHECK_THRESHOLD = 32  # a request with a longer hit is not looked at for in-batch sharing
IN_BATCH_DEPRIORITIZE_THRESHOLD = 32  # tokens shared with an earlier waiting request that let a request stand back


@dataclass(frozen=True, slots=True)
class _Hit:
    """num_tokens of the request are cached; node: where the hit ends. later: another one will compute its prefix."""

    request: Request
    node: TreeNode | None
    num_tokens: int
    later: bool


def service_order(
    config: SchedulerConfig,
    queue: WaitingQueue,
    running: Sequence[Request],
    memory: KVMemory,
    random: np.random.Generator,
    several: bool,
) -> Iterator[Request]:
    """Of those that no gate holds. Lazily, for a caller that may take out or hold the one it has before it asks for the next.
    several: there are flows that may have to share; the policy then orders each one's requests."""
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
    """lpm costs a match per waiting request, so a long queue is served first come, first served."""
    if config.schedule_policy is SchedulePolicy.LPM and num_waiting > config.lpm_fallback_threshold:
        return SchedulePolicy.FCFS
    if not config.enable_radix_cache and config.schedule_policy in (SchedulePolicy.LPM, SchedulePolicy.DFS_WEIGHT):
        return SchedulePolicy.FCFS
    return config.schedule_policy


def _hits(requests: Sequence[Request], memory: KVMemory) -> list[_Hit]:
    """In-batch prefix caching: of requests that share an uncached prefix the first computes it, the others stand back
    and find it cached."""
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
    """Depth first through the radix tree, into the branch with the most waiting requests first; a node's own requests come
    after those below it. Requests that stand back, and those without a hit, are last."""
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
    """One more request at `node`, and at all above it."""
    walk: TreeNode | None = node
    while walk is not None:
        seen = walk in weight
        weight[walk] += 1
        if not seen:
            (children[walk.parent] if walk.parent is not None else roots).append(walk)
        walk = walk.parent


def _by_routing_key(requests: Sequence[Request], running: Sequence[Request]) -> list[Request]:
    """Keys that run already come first, the most frequent one in front; the rest in order of arrival."""
    counts = Counter(r.routing_key for r in running if r.routing_key)
    if not counts:
        return list(requests)
    return sorted(requests, key=lambda r: (-counts.get(r.routing_key, 0), r.routing_key if r.routing_key in counts else ""))


def victim_order(request: Request) -> tuple[int, int, int]:
    """The smallest goes first: least urgent, then least output, then longest prompt."""
    return -request.rank, len(request.progress.output_ids), -request.num_prompt_tokens


def preemption_order(request: Request) -> tuple[int, int]:
    """The smallest is displaced first: least urgent, then the latest to arrive."""
    return -request.rank, -request.seq


def preemptible(config: SchedulerConfig, request: Request, running: Sequence[Request]) -> list[Request]:
    """Running requests that `request` may displace, in order: those that are less urgent by more than the threshold."""
    victims = [r for r in running if r.rank - request.rank > config.priority_preemption_threshold]
    return sorted(victims, key=preemption_order)


# Fair between flows (docs/design/scheduler.md#shares)


def fairly(requests: Iterable[Request]) -> Iterator[Request]:
    """requests: by rank. Whose turn it is, is looked at anew after each: the one before it may have been planned meanwhile."""
    for _, alike in groupby(requests, key=lambda r: r.rank):
        flows: dict[Flow, list[Request]] = {}
        for request in alike:
            assert request.flow is not None, "who waits has prompt tokens to be planned"
            flows.setdefault(request.flow, []).append(request)
        yield from _merged(flows)


def in_fair_turn(queue: WaitingQueue) -> Iterator[Request]:
    """As WaitingQueue.in_turn, but fair among those that have never run."""
    for rank in queue.ranks():
        back, flows = queue.back(rank), queue.flows(rank)
        yield from [request for request in back if not request.held]
        yield from _merged(flows)


def due_before(queue: WaitingQueue, first: Request) -> Iterator[Request]:
    """Those who are more urgent than `first`, which has begun, and those as urgent whose turn is before its."""
    assert first.flow is not None, "who extends has prompt tokens to be planned"
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
    """Flows of equal turns in their order here. Held requests are passed over."""
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
