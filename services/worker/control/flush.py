"""Forgetting cached prefixes, by the tier that keeps them."""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.core.contracts.transfers import Tier
from services.worker.core.scheduler import Scheduler
from services.worker.exec.contracts.operations import ClearStorage
from services.worker.exec.contracts.protocol import Executor

USUAL = (Tier.DEVICE, Tier.HOST)  # a prefix that was forgotten must not come back; what a storage keeps is there to outlive this


def flush(core: Scheduler, executor: Executor, names: Sequence[str]) -> int:
    """Pages that were forgotten. names: of tiers; none: USUAL. On the loop's thread. Raises ValueError for a name of none."""
    unknown = [name for name in names if name not in set(Tier)]
    if unknown:
        raise ValueError(f"tiers: {unknown[0]} is none of {', '.join(Tier)}")
    tiers = [Tier(name) for name in names] or list(USUAL)
    pages = core.flush_cache() if Tier.DEVICE in tiers else 0
    if Tier.STORAGE in tiers:
        executor.apply(ClearStorage())
    return pages + core.flush_tiers(tiers)
