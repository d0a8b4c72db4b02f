"""Computes the worth of prefix hits at workers that have some of the blocks below their device.

Such blocks must be read first, so that a hit saves only a part of the time of computing them. The code does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.gateway.routing.columns import WorkerColumns
from services.shared.index.block_hash import BLOCK_TOKENS
from services.shared.index.block_tier import BlockTier

TRIED_SAVES = 0.1  # assumed saving of a tier that is tried again although it saved nothing recently


@dataclass(frozen=True, slots=True)
class Hits:
    """The prefix hits of one prompt."""

    matched: NDArray[np.int64]  # int64[capacity]: prompt tokens that each worker has and would use
    saved: NDArray[np.float64] | None  # float64[capacity]: tokens of which computing takes the time saved; None: `matched`


def hits_of(reach: NDArray[np.int64], workers: WorkerColumns, tries: bool = False) -> Hits:
    """Computes the prefix hits of each worker.

    A worker does not use blocks of a tier that it reads no faster than it computes them, nor any blocks after those.

    Args:
        reach: See PrefixIndex.reach().
        tries: Assumes a saving of TRIED_SAVES for tiers that save nothing.
    """
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
