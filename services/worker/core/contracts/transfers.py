"""Operations that move pages outside of the forward stream, and the facts: the executor's reports that an operation has ended.

A plan carries operations. The executor begins an operation when every step launched before that plan has ended, and reports
exactly one fact of the operation when it ends. Only the fact of a load from the host may come earlier (`early`), before the
load's last bytes; later steps then wait for these bytes on the device. Until the fact, device pages that the operation writes are
quarantined, and pages that it reads are pinned. Columns are numpy int32, parallel to `keys` unless they are empty.
docs/design/scheduler.md#operations-and-facts has the rules.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.reservations import KvSource

I32 = NDArray[np.int32]
NO_PAGES: I32 = np.empty(0, dtype=np.int32)
# Seconds. The fact of a load is reported when the load's remaining bytes are expected within this time. A step that reads the
# pages may then wait on the device for this time.
EARLY_S = 0.02
UNASKED = -1  # op_id of a fact that belongs to no operation, such as a report of changes in the storage tier


class Tier(enum.StrEnum):
    """Where KV is stored, named as in SGLang's cached_tokens_details. SGLang has no PEER."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"
    PEER = "peer"  # device of another worker


class OperationKind(enum.IntEnum):
    BACK_UP = 0  # device to host
    STORE = 1  # host to storage
    LOAD = 2  # host to device
    FETCH = 3  # storage to device
    PULL = 4  # device of another worker to this device


class WritePolicy(enum.StrEnum):
    """The pages that are copied to lower tiers, and the time of their copies (SGLang's --hicache-write-policy)."""

    WRITE_BACK = "write_back"  # pages that no request uses, copied in the order in which their last request ended
    WRITE_THROUGH = "write_through"  # all pages, copied when they are computed
    WRITE_THROUGH_SELECTIVE = "write_through_selective"  # pages of prefixes, copied at their second cache hit


@dataclass(frozen=True, slots=True)
class Pull:
    """The pages, or the units of one cache group, that a PULL reads from a reservation."""

    source: KvSource
    # Index in the reservation of the first page to read. For units: index of the first part among the parts of the group's units.
    first: int
    proof: bytes  # proof of the prompt up to the last page, or up to the page end of the units, see reservations.py


@dataclass(frozen=True, slots=True)
class TierBlock:
    """A block of the prefix index in a tier below the device, with the keys of its pages, or the mark of a hit end."""

    name: bytes  # hash of the block, or the mark
    weights: bytes  # bytes[8], digest of the weights that computed the block
    keys: tuple[bytes, ...]  # page keys of its pages, in order; for a mark, the keys of StoredEnd


@dataclass(frozen=True, slots=True)
class PageOperation:
    """A copy of consecutive pages of one prompt, or of the units of one cache group on consecutive pages.

    Below the device, a unit takes whole pages, its parts (CacheGroup.num_parts). The parts of a unit are consecutive in `keys`.
    An operation on device units has all parts of each unit.
    """

    op_id: int
    kind: OperationKind
    keys: tuple[bytes, ...]  # page key of each page, or key of each part of each unit
    pages: I32  # device pages, or device units with len(keys) / len(pages) parts each; empty for STORE
    host_pages: I32  # pages of the host tier, one for each key; empty for FETCH and PULL
    group: int = 0  # 0 for pages; otherwise 1 + index of the cache group
    pull: Pull | None = None  # source of the pages; set for PULL only
    # For STORE only: blocks whose last page is in `keys`. The storage keeps them, so that a restarted worker can report them.
    blocks: tuple[TierBlock, ...] = ()

    def __post_init__(self) -> None:
        assert (self.pull is not None) == (self.kind is OperationKind.PULL), "a PULL, and no other operation, has a source"
        assert self.keys, "an operation moves at least one page"
        assert self.group >= 0, "a group is 0 for pages, or 1 + the index of a cache group"
        assert len(self.host_pages) in (0, len(self.keys)), "each key has one page of the host tier"
        assert (len(self.pages) == 0) == (self.kind is OperationKind.STORE), "only a STORE has no device pages"
        if self.group:
            assert not len(self.pages) or len(self.keys) % len(self.pages) == 0, "all units have the same number of parts"
        else:
            assert len(self.pages) in (0, len(self.keys)), "each key has one device page"

    @property
    def num_parts(self) -> int:
        """Number of keys of each entry of `pages`: 1 for pages, and the parts of a unit for units."""
        return len(self.keys) // max(len(self.pages), 1)


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection of the storage tier's pages, for a deletion."""

    tag: bytes | None = None  # digest of the pages' salt, see PageKeys.tag(); None to select every salt
    older_than_s: float | None = None  # smallest age in seconds by the wall clock, or None to select pages of every age


ALL = Selection()


@dataclass(frozen=True, slots=True)
class Deleted:
    """The result of a deletion in the storage tier."""

    pages: int  # number of deleted pages
    dropped: tuple[bytes, ...] = ()  # page keys of deleted pages that this worker could read
    pending: str = ""  # reason why some selected pages are not deleted yet; empty if all of them are deleted


@dataclass(frozen=True, slots=True)
class StorageUse:
    """The size of a storage when it was last measured, and its counters since it was opened."""

    num_bytes: int = 0  # bytes of all files on the disk, or of the pages in Redis that this worker can read
    num_salts: int = 0  # salts with a page in the storage
    over_quota_pages: int = 0  # pages that were removed because of the quota of a salt
    deleted_pages: int = 0  # pages that operators deleted


NO_USE = StorageUse()


@dataclass(frozen=True, slots=True)
class Fact:
    """The result of an operation, or a report of a storage's changes (op_id UNASKED)."""

    op_id: int
    # Number of the operation's first keys whose pages were moved. For STORE: number of the keys that the storage now has.
    count: int = 0
    seconds: float = 0.0  # duration of the copy
    stored: tuple[bytes, ...] = ()  # page keys that the storage tier has gained
    dropped: tuple[bytes, ...] = ()  # page keys that the storage tier has lost
    use: StorageUse | None = None  # current size and counters of the storage, or None if nothing has changed
    blocks: tuple[TierBlock, ...] = ()  # blocks that the storage had stored with pages before this worker started
    early: bool = False  # whether a load's last bytes have not arrived; a later fact with `loaded` reports their arrival
    # (pages, seconds) of the oldest load with an early fact, whose last bytes have arrived now. None: no such load is complete.
    loaded: tuple[int, float] | None = None
