"""The input of the routing policies: workers as parallel arrays with one row per worker, and the request to place.

Only the dispatcher writes the arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_FIRST_ROWS = 8
HOST_SAVES, STORAGE_SAVES = 0.8, 0.5  # defaults until a worker reports measured values
_COUNTS = ("requests", "ahead", "tokens", "limit", "running", "last_pick")
_SAVES = ("host_saves", "storage_saves")


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
        self.requests = np.zeros(0, np.int64)  # open requests of all gateways, and those of `ahead`
        self.ahead = np.zeros(0, np.int64)  # requests still to come, whose pages the worker prefetches
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
class Ask:
    """A request to place."""

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
