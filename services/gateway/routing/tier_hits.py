"""What a prefix is worth to workers that have some of it below their device: it has to be read first, which saves less than all
of computing it. Pure, as the policies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.gateway.routing.columns import WorkerColumns
from services.shared.index.block_hash import BLOCK_TOKENS
from services.shared.index.block_tier import BlockTier

TRIED_SAVES = 0.1  # that a tier is taken to save that is asked although it saved nothing lately


@dataclass(frozen=True, slots=True)
class Hits:
    """matched: int64[capacity], prompt tokens that each row's worker has and would use. saved: float64[capacity], prompt tokens
    whose computing that is worth there, at most as many; None: as many."""

    matched: NDArray[np.int64]
    saved: NDArray[np.float64] | None


def hits_of(reach: NDArray[np.int64], workers: WorkerColumns, tries: bool = False) -> Hits:
    """reach: see PrefixIndex. What a worker reads no faster than it computes, and what is behind that, it computes: no hit.
    tries: reading that saves nothing is taken to save TRIED_SAVES."""
    num_owners = reach.shape[1]
    if not num_owners:
        return Hits(np.zeros(workers.capacity, np.int64), None)
    known = (workers.owner >= 0) & (workers.owner < num_owners)
    tokens = np.where(known, reach[:, np.where(known, workers.owner, 0)], 0) * BLOCK_TOKENS
    device = tokens[BlockTier.DEVICE]
    if len(tokens) == 1:
        return Hits(device, None)
    to_host, to_storage = tokens[BlockTier.HOST], tokens[BlockTier.STORAGE]
    host_saves, storage_saves = workers.host_saves, workers.storage_saves
    if tries:
        host_saves, storage_saves = (np.where(saves > 0, saves, TRIED_SAVES) for saves in (host_saves, storage_saves))
    to_host = np.where(host_saves > 0, to_host, device)
    reads_on = (storage_saves > 0) & (to_host == tokens[BlockTier.HOST])
    to_storage = np.where(reads_on, to_storage, to_host)
    saved = device + (to_host - device) * host_saves + (to_storage - to_host) * storage_saves
    return Hits(to_storage, saved)
