"""Operations that move pages outside of the forward stream, and the facts that report their ends.

A plan carries operations. The executor begins an operation when every step launched before that plan has ended, and reports
exactly one fact for it. Until then, device pages that the operation writes are quarantined, and pages that it reads are pinned.
The fact of a load from the host may precede the load's last bytes; later steps then wait for these bytes on the device. Columns
are numpy int32, parallel to `keys` unless they are empty. docs/design/scheduler.md#operations-and-facts has the rules.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.reservations import KvSource

I32 = NDArray[np.int32]
NO_PAGES: I32 = np.empty(0, dtype=np.int32)
# Seconds. A load's fact is reported when the rest takes less than this, because a step may wait for that long on the device.
EARLY_S = 0.02
UNASKED = -1  # op_id of a fact that reports changes of a storage and belongs to no operation


class Tier(enum.StrEnum):
    """A place of KV, named as in SGLang's cached_tokens_details, which has no remote workers."""

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
    """The cached pages that are copied down the tiers (SGLang's --hicache-write-policy)."""

    WRITE_BACK = "write_back"  # pages without users, the coldest first, before their eviction
    WRITE_THROUGH = "write_through"  # all pages, when they are computed
    WRITE_THROUGH_SELECTIVE = "write_through_selective"  # pages with a second hit


@dataclass(frozen=True, slots=True)
class Pull:
    """The pages of a reservation that a PULL reads."""

    source: KvSource
    first: int  # first page of the reservation to read
    proof: bytes  # proof of the prompt up to the last page, see reservations.py


@dataclass(frozen=True, slots=True)
class KeptBlock:
    """A block of the prefix index with its pages in the tiers below the device."""

    name: bytes  # hash of the block
    weights: bytes  # bytes[8], digest of the weights that computed the block
    keys: tuple[bytes, ...]  # page keys of its pages, in order


@dataclass(frozen=True, slots=True)
class PageOperation:
    """A copy of consecutive pages of one prompt."""

    op_id: int
    kind: OperationKind
    keys: tuple[bytes, ...]  # page key of each page
    pages: I32  # device pages; empty for STORE
    host_pages: I32  # pages of the host tier; empty for FETCH and PULL
    group: int = 0  # cache group of the pages
    pull: Pull | None = None  # source of the pages; set for PULL only
    blocks: tuple[KeptBlock, ...] = ()  # for STORE only: blocks that end in these pages, reported again after a restart

    def __post_init__(self) -> None:
        assert (self.pull is not None) == (self.kind is OperationKind.PULL), "a pull says where from"
        assert self.keys, "an operation moves a page"
        for column in (self.pages, self.host_pages):
            assert len(column) in (0, len(self.keys)), "columns of the same pages"


@dataclass(frozen=True, slots=True)
class Selection:
    """Pages to delete."""

    tag: bytes | None = None  # tag of the pages' salt, or None to select every salt
    older_than_s: float | None = None  # least age by the wall clock, or None to select every age


ALL = Selection()


@dataclass(frozen=True, slots=True)
class Deleted:
    """The result of a deletion."""

    pages: int  # deleted pages
    dropped: tuple[bytes, ...] = ()  # keys of deleted pages that this worker had
    pending: str = ""  # reason why some pages are not deleted yet; empty if all are


@dataclass(frozen=True, slots=True)
class StorageUse:
    """The size of a storage at its owner's last look, and its counters since it was opened."""

    num_bytes: int = 0  # bytes of its pages and their metadata
    num_salts: int = 0  # salts with a page in the storage
    over_quota_pages: int = 0  # pages that were removed because of the quota of a salt
    deleted_pages: int = 0  # pages that were deleted on demand


NO_USE = StorageUse()


@dataclass(frozen=True, slots=True)
class Fact:
    """The result of an operation, or changes of a storage (op_id UNASKED)."""

    op_id: int
    count: int = 0  # first pages that were moved completely; for STORE, pages that the storage has now
    seconds: float = 0.0  # time of the move
    stored: tuple[bytes, ...] = ()  # keys that the storage has gained
    dropped: tuple[bytes, ...] = ()  # keys that the storage has lost
    use: StorageUse | None = None  # present state of the storage, if it may have changed
    blocks: tuple[KeptBlock, ...] = ()  # blocks of the storage's pages that were recorded before the worker's start
    early: bool = False  # a load's last bytes have not arrived; a later fact with `loaded` reports their arrival
    loaded: tuple[int, float] | None = None  # pages and seconds of the oldest early load, which is now complete
