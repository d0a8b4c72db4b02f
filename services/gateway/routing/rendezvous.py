"""Rendezvous hashing: every key has its own order of all workers, and a worker that comes or goes moves only its own keys."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def rendezvous_weights(key: str, worker_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """uint64 per worker: the one of greatest weight has the key. splitmix64's finalizer over both parts."""
    seed = np.uint64(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little"))
    mixed = worker_keys ^ seed
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))
