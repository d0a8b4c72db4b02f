"""The interface through which the scheduler uses the tiers below the device. core/tiers implements it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from rootstock_llm.services.worker.core.kv.backup_queue import BackupQueue
from rootstock_llm.services.worker.core.kv.memory import KVMemory

RequestKey = tuple[int, int]
"""(peer, handle) of a request."""


class PeerSource(Protocol):
    """A KV reservation in another worker, as far as core/kv uses it. KvSource implements this interface."""

    @property
    def reservation(self) -> object:
        """The identity of the reservation. Equal values mean the same reservation."""

    @property
    def address(self) -> str: ...

    @property
    def num_pages(self) -> int: ...


@dataclass(slots=True, eq=False)
class Wanted:
    """A prompt whose pages are searched for in lower tiers and in a remote worker, for a request or a prefetch."""

    seq: int  # number of the request or prefetch
    tree: str  # name of the prompt's radix tree
    tokens: bytes  # tokens of the prompt as bytes of int32
    limit: int  # number of the prompt's first pages that may be read
    rank: int = 0  # see TreeNode.rank
    keys: list[bytes] = field(
        default_factory=list
    )  # page keys of the prompt's first pages; further keys are computed when needed
    arrived: Counter[str] = field(default_factory=Counter)  # pages that arrived while the request or prefetch waited, by tier
    end: int = 0  # page end up to which pages and units are read now; 0: not chosen yet
    hit: int = 0  # pages of the prefix hit when `end` was chosen
    num_rows: int = 0  # pages and parts of units that were missing when `end` was chosen; 0 without cache groups
    # With cache groups: pages that arrived, by tier. They move to `arrived` when the prefix hit reaches `end`.
    unused: Counter[str] = field(default_factory=Counter)
    num_unit_reads: int = 0  # number of times that reads of units began
    # Page end at which `source` has the units that the next token reads; 0 without a source.
    source_end: int = 0
    given_up: bool = False  # whether no further operation begins for the prompt, so that the next plan() ends the wait
    source: PeerSource | None = None  # reservation in another worker with the prompt's first pages; None: there is none
    is_prefetch: bool = False  # whether the pages are for a prefetch, whose request has not arrived


@dataclass(frozen=True, slots=True)
class TierStats:
    """Gauges and counters of the tiers. For each field, StepStats has a field of the same name with an explanation."""

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
    """The tiers below the device."""

    @property
    def queue(self) -> BackupQueue:
        """The nodes that the tree offers for copies."""

    @property
    def num_running(self) -> int:
        """Number of running operations that read or write device pages."""

    @property
    def num_quarantined(self) -> int:
        """Number of device pages that running operations write."""

    def num_quarantined_units(self, index: int) -> int:
        """Returns the number of units of a cache group that running operations write."""

    def consider(self, wanted: Wanted, memory: KVMemory) -> bool:
        """Begins an import if another tier or worker has more of the prompt than the tree, and reading is faster than computing.

        Returns:
            Whether the request waits for the import.
        """

    def waiting(self) -> set[int]:
        """Returns the seqs of the requests that wait for imports."""

    def admitted(self, seq: int, keys: list[bytes], hit: int) -> None:
        """Releases the pins of a request that is admitted with a prefix hit of `hit` pages. `keys` are its first page keys."""

    def cancel(self, seq: int) -> None:
        """Releases the pins and ends the wait of a request that has ended."""

    def take_prefetched(self, request_key: RequestKey, seq: int) -> Counter[str]:
        """Passes the pins of prefetched pages to the request `seq`, which has arrived.

        Returns:
            The number of prefetched pages by tier.
        """

    def release_pins(self) -> bool:
        """Releases the pins of waiting requests, because running requests need pages. Returns whether a request had a pin."""

    def retired(self, names: Collection[str]) -> None:
        """Discards the imports of trees whose salt was deleted. `names` are the names of the trees before the deletion."""

    def forget_tree(self) -> None:
        """Forgets everything about the device pages, which are reset. No operation may run."""

    def stats(self) -> TierStats: ...

    def violations(self) -> list[str]:
        """Returns one sentence per broken invariant, for checks."""
