"""Operations that move pages beside the forward stream, and the facts that they end in
(docs/design/scheduler.md#operations-and-facts).

A plan carries operations. The executor begins an operation once every step launched before that plan has ended, and reports
exactly one fact of it. Device pages that an operation writes are quarantined until then; pages that it reads are pinned. The
fact of a load from the host may come before its last bytes; later steps then wait for these on the device. Columns are numpy
int32, parallel to `keys` unless they are empty.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.core.contracts.reservations import KvSource

I32 = NDArray[np.int32]
NO_PAGES: I32 = np.empty(0, dtype=np.int32)
EARLY_S = 0.02  # expected rest of a load at which its fact is reported early, because a step may wait so long
UNASKED = -1  # op_id of a fact that reports changes of a storage and ends no operation


class Tier(enum.StrEnum):
    """A place of KV. The names are those of SGLang's cached_tokens_details, which has no peers."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"
    PEER = "peer"  # another worker's device


class OperationKind(enum.IntEnum):
    BACK_UP = 0  # device to host
    STORE = 1  # host to storage
    LOAD = 2  # host to device
    FETCH = 3  # storage to device
    PULL = 4  # another worker's device to this one's


class WritePolicy(enum.StrEnum):
    """The cached pages that are copied down the tiers (SGLang's --hicache-write-policy)."""

    WRITE_BACK = "write_back"  # unused pages, the coldest first, before their eviction
    WRITE_THROUGH = "write_through"  # all pages, as soon as they are computed
    WRITE_THROUGH_SELECTIVE = "write_through_selective"  # pages with a further hit


@dataclass(frozen=True, slots=True)
class Pull:
    """The pages of a reservation that a PULL reads."""

    source: KvSource
    first: int  # first page of the reservation to read
    proof: bytes  # of the prompt up to the last page, see reservations.py


@dataclass(frozen=True, slots=True)
class KeptBlock:
    """A block of the prefix index whose tokens are in pages below the device."""

    name: bytes
    weights: bytes  # bytes[8], digest of the weights that computed it
    keys: tuple[bytes, ...]  # of its pages, in order


@dataclass(frozen=True, slots=True)
class PageOperation:
    """A copy of consecutive pages of one prompt."""

    op_id: int
    kind: OperationKind
    keys: tuple[bytes, ...]  # one for each page
    pages: I32  # of the device; empty for STORE
    host_pages: I32  # empty for FETCH and PULL
    group: int = 0  # cache group of the pages
    pull: Pull | None = None  # with PULL alone
    blocks: tuple[KeptBlock, ...] = ()  # with STORE alone: blocks that end in these pages, reported again after a restart

    def __post_init__(self) -> None:
        assert (self.pull is not None) == (self.kind is OperationKind.PULL), "a pull says where from"
        assert self.keys, "an operation moves a page"
        for column in (self.pages, self.host_pages):
            assert len(column) in (0, len(self.keys)), "columns of the same pages"


@dataclass(frozen=True, slots=True)
class Selection:
    """Pages to delete."""

    tag: bytes | None = None  # tag of their salt; None: any
    older_than_s: float | None = None  # least age by the wall clock; None: any


ALL = Selection()


@dataclass(frozen=True, slots=True)
class Deleted:
    """The result of a deletion."""

    pages: int  # deleted pages
    dropped: tuple[bytes, ...] = ()  # deleted keys that this worker held
    pending: str = ""  # why some pages are still there; empty if none is


@dataclass(frozen=True, slots=True)
class StorageUse:
    """The state of a storage when its owner looked at it last."""

    num_bytes: int = 0  # of its pages and their metadata
    num_salts: int = 0  # salts with a page in it
    over_quota_pages: int = 0  # pages that went since it was opened because their salt had its whole quota
    deleted_pages: int = 0  # pages that were deleted on demand since it was opened


NO_USE = StorageUse()


@dataclass(frozen=True, slots=True)
class Fact:
    """The result of an operation, or changes of a storage (op_id UNASKED)."""

    op_id: int
    count: int = 0  # pages from the beginning that were moved whole; of a STORE, pages that the storage has now
    seconds: float = 0.0  # time that moving them took
    stored: tuple[bytes, ...] = ()  # keys that the storage has gained
    dropped: tuple[bytes, ...] = ()  # keys that the storage has lost
    use: StorageUse | None = None  # if it may have changed
    blocks: tuple[KeptBlock, ...] = ()  # blocks of the storage's pages, as recorded before the worker's start
    early: bool = False  # the last bytes of a load are on their way; a later fact with `loaded` reports their arrival
    loaded: tuple[int, float] | None = None  # pages and seconds of the oldest early load, which is complete now
