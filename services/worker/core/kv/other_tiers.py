"""What the queue asks of the tiers below the pool, and what it says of a prompt (implemented in core/tiers)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from services.worker.core.kv.backup_queue import BackupQueue
from services.worker.core.kv.memory import KVMemory

Asker = tuple[int, int]
"""(peer, handle) of a request."""


class PeerSource(Protocol):
    """Of pages in another worker."""

    @property
    def room(self) -> object:
        """Equal where it is the same one."""

    @property
    def address(self) -> str: ...

    @property
    def num_pages(self) -> int: ...


@dataclass(slots=True, eq=False)
class Wanted:
    """A prompt of a request: the tree that it is matched in, its tokens as bytes, how many pages of it a hit may cover. keys: of
    its first pages; more are made as they are needed. rank: see TreeNode. arrived: pages that came while it waited, by tier.
    let_go: it does not wait for more. source: another worker that has its first pages. ahead: they are read before its request
    comes."""

    seq: int
    tree: str
    tokens: bytes
    limit: int
    rank: int = 0
    keys: list[bytes] = field(default_factory=list)
    arrived: Counter[str] = field(default_factory=Counter)
    let_go: bool = False
    source: PeerSource | None = None
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class TierStats:
    """Gauges as they are now, then counters since the start: see StepStats, where each stands by the same name."""

    host_pages: int
    host_pages_used: int
    host_salts: int
    host_over_quota_pages_total: int
    storage_pages: int
    storage_bytes: int
    storage_salts: int
    storage_over_quota_pages_total: int
    storage_deleted_pages_total: int
    num_importing: int
    backed_up_pages_total: int
    stored_pages_total: int
    lost_pages_total: int
    unstored_pages_total: int
    loaded_pages_total: int
    fetched_pages_total: int
    pulled_pages_total: int
    prefetched_pages_total: int
    refused_pulls_total: int
    load_bytes_s: float
    fetch_bytes_s: float
    pull_bytes_s: float
    pulls_lose: bool
    host_saves: float | None
    storage_saves: float | None
    recomputed_pages_total: int
    given_up_operations_total: int
    failed_operations_total: int
    host_evicted_pages_total: int


class OtherTiers(Protocol):
    """queue: what the tree offers for copies. num_running: operations under way that read or write the device's pages.
    num_quarantined: pages that these write."""

    @property
    def queue(self) -> BackupQueue: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_quarantined(self) -> int: ...

    def consider(self, wanted: Wanted, memory: KVMemory) -> bool:
        """Whether more of the prompt than the tree has is elsewhere, and sooner here than computed: the request waits, then."""

    def waiting(self) -> set[int]:
        """Those that wait, by seq."""

    def admitted(self, seq: int, keys: list[bytes], hit: int) -> None:
        """The request begins, with so many pages of its prompt from the tree. keys: of its first pages."""

    def leave(self, seq: int) -> None:
        """The request has ended: what was kept for it is not any more."""

    def take_prefetched(self, asker: Asker, seq: int) -> Counter[str]:
        """The request has come: what was read ahead for it is kept for it. Returns the pages that came, by tier."""

    def let_go(self) -> bool:
        """Pages are wanted by who runs: what is pinned for who waits may go. Whether there was anything."""

    def retired(self, names: Collection[str]) -> None:
        """Trees whose salt was deleted, by the names that they had."""

    def forget_tree(self) -> None:
        """The device's pages are given up. Only while no operation runs."""

    def stats(self) -> TierStats: ...

    def violations(self) -> list[str]:
        """For checks."""
