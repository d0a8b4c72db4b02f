"""What routing sees of the workers: parallel arrays, one row per worker. Plain data; the dispatcher is its one writer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_FIRST_ROWS = 8
HOST_SAVES, STORAGE_SAVES = 0.8, 0.5  # until a worker says what it has measured
_COUNTS = ("requests", "ahead", "tokens", "limit", "running", "last_pick")
_SAVES = ("host_saves", "storage_saves")


class WorkerColumns:
    """Arrays of `capacity` rows; a row is meaningful while `used`. Rows keep their number while their worker is known.

    usable: it may get new requests. serves: whole ones, and not only prompts to compute for others. requests: open on it, over
    all gateways, and those to come, whose pages it reads ahead; ahead: these alone. tokens: prompt and output tokens of
    requests. limit: requests that it may have before more wait at the gateway; running: of those, how many it can run at once.
    owner: its number in the PrefixIndex, -1 for none. host_saves, storage_saves: 0 to 1, the share of computing a prefix that
    reading it from there saves. last_pick: counts up over all picks. key: 64 random bits that stay the worker's own (of its
    id), for rendezvous hashing.
    """

    def __init__(self) -> None:
        self.ids: list[str] = []  # worker ids by row, "" where unused
        self.loras: list[frozenset[str]] = []
        self.used = np.zeros(0, np.bool_)
        self.usable = np.zeros(0, np.bool_)
        self.serves = np.zeros(0, np.bool_)
        self.requests = np.zeros(0, np.int64)
        self.ahead = np.zeros(0, np.int64)
        self.tokens = np.zeros(0, np.int64)
        self.limit = np.zeros(0, np.int64)
        self.running = np.zeros(0, np.int64)
        self.owner = np.full(0, -1, np.int64)
        self.host_saves = np.zeros(0, np.float64)
        self.storage_saves = np.zeros(0, np.float64)
        self.last_pick = np.zeros(0, np.int64)
        self.key = np.zeros(0, np.uint64)

    @property
    def takes(self) -> NDArray[np.bool_]:
        """bool[capacity]: it may get new, whole requests."""
        return self.used & self.usable & self.serves

    @property
    def capacity(self) -> int:
        return len(self.ids)

    def add(self, worker_id: str, key: int) -> int:
        """A zeroed row that is used and not yet usable."""
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
    """One request to be placed. matched: int64[capacity], prompt tokens that each row's worker is thought to have cached, or
    None if nothing is known. key: routing key, "" for none. lora: adapter, "" for none. allowed: bool[capacity] to choose
    from, or None for all. first_block: name of the prompt's first block, b"" where it has none or nobody knows it. prefill: its
    prompt alone is to be computed, by one of those that are there for that. saved: see Hits; None: all that is matched."""

    prompt_tokens: int
    matched: NDArray[np.int64] | None = None
    key: str = ""
    lora: str = ""
    allowed: NDArray[np.bool_] | None = None
    first_block: bytes = b""
    prefill: bool = False
    saved: NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True)
class Pick:
    """reason: a policy's word for why, from policies.REASONS. predicted_tokens: cached there, as far as is known."""

    row: int
    reason: str
    predicted_tokens: int
