"""The invariants that hold between two calls of the scheduler. Tests check them after every step, and idle workers check them."""

from __future__ import annotations

from collections import Counter

import numpy as np

from rootstock_llm.services.worker.core.kv.memory import KVMemory
from rootstock_llm.services.worker.core.kv.other_tiers import OtherTiers
from rootstock_llm.services.worker.core.kv.tree_node import TreeNode
from rootstock_llm.services.worker.core.kv.unit_pool import NO_UNIT
from rootstock_llm.services.worker.core.requests.queues import RequestQueues
from rootstock_llm.services.worker.core.requests.request import Phase
from rootstock_llm.services.worker.core.requests.sessions import SessionTable
from rootstock_llm.services.worker.core.requests.waiting_queue import ReservedCapacity


def violations(queues: RequestQueues, memory: KVMemory, sessions: SessionTable, tiers: OtherTiers | None) -> list[str]:
    """Returns one sentence per broken invariant; empty if all invariants hold. Takes O(pool size)."""
    return (
        _page_states(queues, memory)
        + _units(queues, memory)
        + _leases(queues, memory)
        + _blocked(queues)
        + _shares(queues)
        + _tree(memory)
        + _sessions(queues, memory, sessions)
        + _tiers(queues, memory, tiers)
    )


def _page_states(queues: RequestQueues, memory: KVMemory) -> list[str]:
    """Checks that each page is in exactly one state: free, leased, cached or quarantined."""
    owners = np.zeros(memory.pages.num_pages, dtype=np.int64)
    np.add.at(owners, memory.pages.free_pages(), 1)
    np.add.at(owners, list(memory.quarantined), 1)
    for node in memory.tree.nodes():
        np.add.at(owners, node.pages, 1)
    for request in queues.running():
        if request.kv.lease is not None:
            slot = request.kv.lease.slot
            shared, have = memory.slots.num_shared[slot], memory.slots.num_pages[slot]
            np.add.at(owners, memory.slots.page_table[slot, shared:have], 1)
    out = []
    if (owners == 0).any():
        out.append(f"{int((owners == 0).sum())} pages have no owner")
    if (owners > 1).any():
        out.append(f"{int((owners > 1).sum())} pages have several owners")
    return out


def _units(queues: RequestQueues, memory: KVMemory) -> list[str]:
    """Checks that each unit of a cache group is free, quarantined, held by one slot or owned by one cached page."""
    units, out = memory.units, []
    if units is None:
        return []
    leases = [request.kv.lease for request in queues.running() if request.kv.lease is not None]
    held: list[list[int]] = [[] for _ in units.pools]
    for lease in leases:
        sizes = int(memory.slots.num_shared[lease.slot]), int(memory.slots.num_pages[lease.slot])
        for index, found in enumerate(units.slot_units(lease.slot, *sizes)):
            held[index] += found
    if units.states is not None:
        held[units.states.index] += units.leaving_units()
    for pool in units.pools:
        owned = [unit for unit, _ in pool.owned()]
        free = pool.free_units().tolist()
        owners = np.bincount([*free, *owned, *held[pool.index], *pool.quarantined], minlength=pool.num_units)
        if (owners != 1).any():
            out.append(f"{int((owners != 1).sum())} units of group {pool.index} have no owner or several")
        cached = [unit for node in memory.tree.nodes() for unit in node.units[pool.index].tolist() if unit != NO_UNIT]
        if sorted(cached) != owned or any((node.units[pool.index] == unit).sum() != 1 for unit, node in pool.owned()):
            out.append(f"the units of group {pool.index} are not those of the cached pages")
    owned_units = {(pool.index, unit) for pool in units.pools for unit, _ in pool.owned()}
    if units.hit_ends is not None and any(not owned_units.issuperset(end.units) for end in units.hit_ends.ends()):
        out.append("the prefix index has a hit end without its units")
    if memory.unit_pins is not None:
        out += memory.unit_pins.violations()
    if units.num_slots != len(leases):
        out.append("the cache units miscount the slots in use")
    if units.num_reserved and not leases:
        out.append("window units are reserved, but no request runs")
    slots = {lease.slot for lease in leases}
    out += [
        f"slot {slot} has more window units than it reserved"
        for slot in slots
        if units.num_spare_pages(slot, int(memory.slots.num_pages[slot])) < 0
    ]
    if stale := units.slots_with_ends() - slots:
        out.append(f"free slots {sorted(stale)} have page ends of earlier requests")
    return out


def _leases(queues: RequestQueues, memory: KVMemory) -> list[str]:
    out = []
    slots = [r.kv.lease.slot for r in queues.by_key.values() if r.kv.lease is not None]
    if len(set(slots)) != len(slots):
        out.append("two requests have the same slot")
    if len(slots) + memory.slots.num_free != len(memory.slots.num_pages):
        out.append("free slots and slots of requests do not add up to all slots")
    running = queues.running()
    for request in queues.by_key.values():
        holds = request.kv.lease is not None
        if holds != (request.phase in (Phase.EXTEND, Phase.DECODE)) or holds != any(request is r for r in running):
            out.append(
                f"request {request.request_id} in the phase {request.phase.name}: its lease does not fit its phase or its queue"
            )
    if len(running) + queues.num_waiting != len(queues.by_key):
        out.append("the queues together do not contain each request exactly once")
    if queues.waiting_tokens != sum(r.queued_tokens for r in queues.by_key.values() if r.kv.lease is None):
        out.append("waiting_tokens is not the sum over the requests without a lease")
    for slot in slots:
        row = memory.slots.page_table[slot, : memory.slots.num_pages[slot]]
        if len(np.unique(row)) != len(row):
            out.append(f"slot {slot} has a page twice")
    return out


def _blocked(queues: RequestQueues) -> list[str]:
    """Checks that blocked requests are in the waiting queue, and that the KV reserved for them is counted."""
    queue, out = queues.waiting, []
    blocked = [request for request in queue if request.blocked_tokens]
    if len(blocked) != queue.num_blocked or len(blocked) != sum(request.blocked_tokens > 0 for request in queues.by_key.values()):
        out.append("a request that a gate blocks is not in the waiting queue, or is not counted")
    reserved: dict[int, ReservedCapacity] = {}
    for request in blocked:
        reserved.setdefault(request.rank, ReservedCapacity()).add(1, request.blocked_tokens)
    if reserved != queue.reserved_by_rank():
        out.append("the queue miscounts the slots and the KV reserved for blocked requests")
    return out


def _shares(queues: RequestQueues) -> list[str]:
    """Checks that the flows count the waiting and extending requests."""
    pending = [r for r in queues.by_key.values() if r.phase in (Phase.WAITING, Phase.EXTEND)]
    out = []
    if Counter(request.payer for request in pending) != queues.shares.pending():
        out.append("a flow's number of requests is not that of its waiting and extending requests")
    if any((request.flow is not None) != (request in pending) for request in queues.by_key.values()):
        out.append("the requests in flows are not the waiting and extending requests")
    if queues.shares.num_flows != len(queues.shares.pending()):
        out.append("num_flows is not the number of flows with requests")
    return out


def _tree(memory: KVMemory) -> list[str]:
    tree = memory.tree
    nodes = tree.nodes()
    out = []
    if len(nodes) != tree.num_nodes:
        out.append("the tree miscounts its nodes")
    if sum(len(n.pages) for n in nodes) != tree.num_pages:
        out.append("the tree miscounts its pages")
    if sum(len(n.pages) for n in nodes if n.lock_ref == 0) != tree.num_evictable:
        out.append("the tree miscounts its evictable pages")
    below: Counter[TreeNode] = Counter()
    for node in nodes:
        if node.parent is not None:
            below[node.parent] += node.lock_ref
    if any(parent.lock_ref < locks for parent, locks in below.items()):
        out.append("a node has fewer locks than its children together")
    for node in nodes:
        parent = node.parent
        assert parent is not None
        if node.gone:
            out.append("an evicted node is in the tree")
        if node.depth != parent.depth + len(node.pages):
            out.append("a node's depth is not its parent's depth plus its pages")
        if not node.pages.size:
            out.append("a node has no pages")
    return out


def _sessions(queues: RequestQueues, memory: KVMemory, sessions: SessionTable) -> list[str]:
    """Checks that the tree's holds are those of the sessions' turns, and that running turns have unfinished requests."""
    out = []
    expected: Counter[TreeNode] = Counter()
    for node in sessions.turn_nodes():
        walk: TreeNode | None = node
        while walk is not None:
            expected[walk] += 1
            walk = walk.parent
    if any(node.holds != expected[node] for node in memory.tree.nodes()):
        out.append("a node's holds are not those of the sessions' turns")
    here = {(r.session_number, r.request_id) for r in queues.by_key.values() if r.session is not None}
    if sessions.running_turns() - here:
        out.append("a session has a running turn whose request has ended")
    if sessions.num_tokens != sessions.count_tokens():
        out.append("num_tokens of the sessions is not the sum over their turns")
    if sessions.overfull():
        out.append("a session has more tokens than its capacity")
    return out


def _tiers(queues: RequestQueues, memory: KVMemory, tiers: OtherTiers | None) -> list[str]:
    """Checks that operations own the quarantined pages, and that the requests waiting for an import are gated."""
    if tiers is None:
        units = memory.units.pools if memory.units is not None else ()
        has_any = memory.quarantined or any(pool.quarantined for pool in units)
        return ["pages or units are quarantined although there are no tiers"] if has_any else []
    out = tiers.violations()
    if len(memory.quarantined) != tiers.num_quarantined:
        out.append("the quarantined pages are not those of the running operations")
    for pool in memory.units.pools if memory.units is not None else ():
        if len(pool.quarantined) != tiers.num_quarantined_units(pool.index):
            out.append(f"the quarantined units of group {pool.index} are not those of the running operations")
        if not memory.num_pins and pool.num_lent:
            out.append(f"units of group {pool.index} are lent although no operation, request or reservation uses them")
    if set(queues.importing) != tiers.waiting():
        out.append("the requests that wait for imports are not those in the queue `importing`")
    if any(request.phase is not Phase.GATED for request in queues.importing.values()):
        out.append("a request in the queue `importing` is not in the phase GATED")
    return out
