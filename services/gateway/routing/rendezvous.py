"""Rendezvous hashing (Thaler and Ravishankar 1998) for routing keys.

Each key has its own order of all workers. If a worker is added or removed, only the keys that it wins move.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def rendezvous_weights(key: str, worker_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns a uint64 weight per worker. The worker with the greatest weight wins the key.

    The weight is the finalizer of splitmix64 over the hash of the key and the worker's bits.
    """
    seed = np.uint64(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little"))
    mixed = worker_keys ^ seed
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))
