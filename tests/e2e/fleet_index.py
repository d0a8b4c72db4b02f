"""Checks the prefix index in Redis: its keys are consistent, and workers and gateways report matching numbers of blocks."""

from __future__ import annotations

from rootstock_llm.services.shared.index import prefix_index
from rootstock_llm.services.shared.index.prefix_index import BlockTier
from tests.e2e.fleet import MODEL, Fleet


def index_faults(fleet: Fleet) -> list[str]:
    """Returns the inconsistencies of the prefix index; empty if it has none. The fleet must be idle.

    Reads the Redis keys that prefix_index.py documents. Each worker must report as many blocks as the index has of this worker.
    All gateways must report the same number of blocks.
    """
    faults: list[str] = []
    known = {bytes(member).decode() for member in fleet.redis.smembers(prefix_index.workers_key(MODEL))}
    if missing := set(fleet.workers) - known:
        faults.append(f"the index lacks the workers {sorted(missing)}")
    for worker in sorted(known):
        lease = fleet.redis.get(prefix_index.lease_key(worker))
        if lease is None:
            faults.append(f"{worker} has no lease in Redis")
            continue
        generation = int(lease)
        if str(generation).encode() not in fleet.redis.smembers(prefix_index.generations_key(worker)):
            faults.append(f"the generation of {worker} is not in the set that the sweeper reads")
        faults += _block_faults(fleet, worker, generation)
    copies = {name: fleet.metric(name, "rootstock_gateway_index_blocks") for name in fleet.urls}
    if len(set(copies.values())) != 1:
        faults.append(f"gateways have different numbers of blocks: {copies}")
    return faults


def _block_faults(fleet: Fleet, worker: str, generation: int) -> list[str]:
    """Returns the inconsistencies of one worker: blocks of its set that do not name it, and a wrong reported number of blocks."""
    field = prefix_index.owner_field(worker, generation)
    blocks = sorted(fleet.redis.smembers(prefix_index.own_key(worker, generation)))
    with fleet.redis.pipeline(transaction=False) as pipeline:
        for block in blocks:
            pipeline.hexists(prefix_index.block_key(MODEL, block), field)
        named = pipeline.execute()
    unnamed = len(blocks) - sum(named)
    faults = [f"{unnamed} of {len(blocks)} blocks in the reverse index of {worker} do not name this worker"] if unnamed else []
    below = [tier for tier in BlockTier if tier is not BlockTier.DEVICE]
    count = len(blocks) + sum(fleet.redis.scard(prefix_index.own_key(worker, generation, tier)) for tier in below)
    if (held := fleet.metric(worker, "rootstock_worker_index_held_blocks")) != count:
        faults.append(f"{worker} reports {held:.0f} blocks, and the index has {count}")
    return faults
