"""The input of the routing policies: workers as parallel arrays with one row per worker, and the query for one request.

Only the dispatcher writes the arrays. The functions compute loads and prefix hits from them, without I/O. A load is the number of
requests per request that the worker can run at once, so large and small workers are comparable.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.gateway.routing.config import RoutingConfig
from services.shared.index.prefix_index import BLOCK_TOKENS, BlockTier

_FIRST_ROWS = 8
_MEMORY = 32  # approximate number of decisions in the average of a SharingMeter
_ENOUGH = 0.1  # least share of decisions with a match
TRIED_SAVES = 0.1  # assumed saving of a tier that is tried again although it saved nothing recently
HOST_SAVES, STORAGE_SAVES = 0.8, 0.5  # defaults until a worker reports measured values
_COUNTS = ("requests", "prefetches", "tokens", "limit", "running", "last_pick")
_SAVES = ("host_saves", "storage_saves")
Rows = NDArray[np.int64]  # rows of WorkerColumns, rising


class WorkerColumns:
    """The workers of one model, as arrays of `capacity` rows.

    A row has a meaning only while it is used. A worker has the same row as long as the gateway knows it.
    """

    def __init__(self) -> None:
        self.ids: list[str] = []  # worker id; "" in unused rows
        self.loras: list[frozenset[str]] = []  # adapters that are loaded
        self.used = np.zeros(0, np.bool_)
        self.usable = np.zeros(0, np.bool_)  # the worker may get new requests
        self.serves = np.zeros(0, np.bool_)  # the worker serves whole requests; False for a prefill worker
        self.requests = np.zeros(0, np.int64)  # open requests of all gateways, and those of `prefetches`
        self.prefetches = np.zeros(0, np.int64)  # requests still to come, whose pages the worker prefetches
        self.tokens = np.zeros(0, np.int64)  # prompt and output tokens of `requests`
        self.limit = np.zeros(0, np.int64)  # number of requests at which new requests wait in the gateway
        self.running = np.zeros(0, np.int64)  # number of requests that the worker can run at once
        self.owner = np.full(0, -1, np.int64)  # owner number in the PrefixIndex; -1 for none
        self.host_saves = np.zeros(0, np.float64)  # share of the time of computing a prefix that reading it saves, 0 to 1
        self.storage_saves = np.zeros(0, np.float64)  # likewise, from the storage tier
        self.last_pick = np.zeros(0, np.int64)  # number of the last pick of this worker, counted over all workers
        self.key = np.zeros(0, np.uint64)  # hash of the worker id for rendezvous hashing

    @property
    def takes(self) -> NDArray[np.bool_]:
        """bool[capacity]: whether the worker takes new whole requests."""
        return self.used & self.usable & self.serves

    @property
    def capacity(self) -> int:
        return len(self.ids)

    def add(self, worker_id: str, key: int) -> int:
        """Returns a used row with default values, which is not usable yet."""
        free = np.flatnonzero(~self.used)
        if not len(free):
            self._grow()
            return self.add(worker_id, key)
        row = int(free[0])
        for name in ("usable", *_COUNTS):
            getattr(self, name)[row] = 0
        self.ids[row], self.loras[row] = worker_id, frozenset()
        self.used[row], self.owner[row], self.key[row] = True, -1, key
        self.serves[row] = True
        self.host_saves[row], self.storage_saves[row] = HOST_SAVES, STORAGE_SAVES
        return row

    def drop(self, row: int) -> None:
        self.used[row] = self.usable[row] = False
        self.ids[row], self.loras[row], self.owner[row] = "", frozenset(), -1

    def _grow(self) -> None:
        more = max(_FIRST_ROWS, self.capacity)
        self.ids += [""] * more
        self.loras += [frozenset()] * more
        for name in ("used", "usable", "serves", *_COUNTS, "key", *_SAVES):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(more, old.dtype)]))
        self.owner = np.concatenate([self.owner, np.full(more, -1, np.int64)])


@dataclass(frozen=True, slots=True)
class RoutingQuery:
    """A request to place, as the policies see it."""

    prompt_tokens: int
    matched: NDArray[np.int64] | None = None  # int64[capacity]: prompt tokens cached at each worker; None: unknown
    key: str = ""  # routing key; "" for none
    lora: str = ""  # adapter; "" for none
    allowed: NDArray[np.bool_] | None = None  # bool[capacity]: workers to choose from; None: all
    first_block: bytes = b""  # hash of the first block of the prompt; b"" if it has none, or placing by it does not pay
    prefill: bool = False  # only the prompt is computed, by a prefill worker
    saved: NDArray[np.float64] | None = None  # see Hits; None: all of `matched`


@dataclass(frozen=True, slots=True)
class Pick:
    """A chosen worker."""

    row: int
    reason: str  # one of policies.REASONS
    predicted_tokens: int  # prompt tokens that the worker is expected to have cached


def running_slots(rows: Rows, workers: WorkerColumns) -> NDArray[np.int64]:
    return np.maximum(workers.running[rows], 1)


def relative_load(rows: Rows, workers: WorkerColumns) -> NDArray[np.float64]:
    """Returns float64[rows]: open requests per request that the worker can run at once."""
    return workers.requests[rows] / running_slots(rows, workers)


def least(rows: Rows, cost: NDArray[np.float64], workers: WorkerColumns) -> int:
    """Returns the row with the least cost. Ties are decided by fewest requests, then by the earliest pick, then by row."""
    rows = rows[cost == cost.min()]
    for column in (workers.requests, workers.last_pick):
        if len(rows) == 1:
            break
        values = column[rows]
        rows = rows[values == values.min()]
    return int(rows[0])


def over_gate(rows: Rows, ready: Rows, workers: WorkerColumns, config: RoutingConfig) -> NDArray[np.bool_]:
    """Returns bool[rows]: whether a worker's load exceeds the least load of `ready` by more than the gate allows.

    Loads are scaled to requests on a worker of mean size. If all workers have the same size, they are the numbers of requests.
    """
    slots = running_slots(ready, workers)
    size = slots.sum() / len(slots)  # numpy's mean() would take as long as the rest of this function
    loads = workers.requests[ready] / slots
    idlest = loads.min() * size
    requests = (loads if rows is ready else relative_load(rows, workers)) * size
    return np.asarray((requests - idlest > config.gate_abs) & (requests > config.gate_rel * idlest))


def load_over_mean(rows: Rows, ready: Rows, workers: WorkerColumns, config: RoutingConfig) -> NDArray[np.float64]:
    """Returns float64[rows]: the load of each worker with this request, in units of the mean load of `ready`.

    The mean load is the number of all requests per slot, with this request. It counts at least config.load_floor requests per
    worker.
    """
    mean = max(int(workers.requests[ready].sum()) + 1, config.load_floor * len(ready)) / running_slots(ready, workers).sum()
    return np.asarray((workers.requests[rows] + 1) / running_slots(rows, workers) / mean)


def near_idlest(rows: Rows, workers: WorkerColumns, config: RoutingConfig) -> NDArray[np.bool_]:
    """Returns bool[rows]: whether a worker's load is close to the least load. Loads are scaled as in over_gate()."""
    slots = running_slots(rows, workers)
    requests = workers.requests[rows] / slots * (slots.sum() / len(slots))
    mean = requests.sum() / len(requests)
    return np.asarray(requests <= requests.min() + max(config.near_requests, config.near_rel * mean))


@dataclass(frozen=True, slots=True)
class Hits:
    """The prefix hits of one prompt."""

    matched: NDArray[np.int64]  # int64[capacity]: prompt tokens that each worker has and would use
    saved: NDArray[np.float64] | None  # float64[capacity]: tokens of which computing takes the time saved; None: `matched`


def hits_of(reach: NDArray[np.int64], workers: WorkerColumns, tries: bool = False) -> Hits:
    """Computes the prefix hits of each worker.

    Blocks below the device must be read first, so a hit on them saves only a part of the time of computing them.

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


class SharingMeter:
    """The share of recent routing decisions with a match, for one model at this gateway.

    If prompts share prefixes, placing a new prefix on the worker that other gateways would choose too is worth it. The share
    begins at 1, because many prompts may arrive after a cold start before the first match.
    """

    def __init__(self) -> None:
        self._share = 1.0

    @property
    def seen(self) -> bool:
        """Whether at least one in ten of the last decisions had a match."""
        return self._share >= _ENOUGH

    def decided(self, matched: bool) -> None:
        """Counts a decision. `matched`: a worker had a prefix of the prompt."""
        self._share += (matched - self._share) / _MEMORY
