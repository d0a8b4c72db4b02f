"""Operations on pages beside the forward stream, and the facts that they end in (docs/design/scheduler.md#operations-and-facts).

A plan carries operations; the executor begins each once every step launched before that plan has ended, and gives exactly one
fact of it, whatever becomes of it. Pages of the device that an operation writes are quarantined until then, pages that it reads
are pinned. Of a load from the host the fact may come before its last bytes: what is launched from then on waits for them, on the
device, where it comes to them. Columns are numpy int32, parallel to `keys` where they are not empty.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.core.contracts.reservations import KvSource

I32 = NDArray[np.int32]
NO_PAGES: I32 = np.empty(0, dtype=np.int32)
EARLY_S = 0.02  # that a load may still take, as far as is known, when its fact comes: what else a step computes may wait as long
UNASKED = -1  # in place of an operation's number: news of a store that nobody asked for


class Tier(enum.StrEnum):
    """Where KV is kept. Named as in SGLang's cached_tokens_details, which has no peers."""

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
    """Which cached pages are copied down the tiers (SGLang's --hicache-write-policy)."""

    WRITE_BACK = "write_back"  # those that nobody uses any more, the coldest first, ahead of their eviction
    WRITE_THROUGH = "write_through"  # all, as soon as they are computed
    WRITE_THROUGH_SELECTIVE = "write_through_selective"  # those that are hit again


@dataclass(frozen=True, slots=True)
class Pull:
    """Pages of a room, from page `first` on. proof: of the prompt up to the last of them, see reservations.py."""

    source: KvSource
    first: int
    proof: bytes


@dataclass(frozen=True, slots=True)
class KeptBlock:
    """A block of the prefix index that pages below the device have the tokens of. weights: bytes[8], that computed them; its name
    is of these. keys: of its pages, in order."""

    name: bytes
    weights: bytes
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PageOperation:
    """keys: one for each page, consecutive in one prompt. pages: of the device, empty for STORE. host_pages: empty for FETCH and
    PULL. group: the cache group whose pages these are. pull: with PULL alone, what is read. blocks: with STORE alone, those that
    end in these pages, to be told again after a restart."""

    op_id: int
    kind: OperationKind
    keys: tuple[bytes, ...]
    pages: I32
    host_pages: I32
    group: int = 0
    pull: Pull | None = None
    blocks: tuple[KeptBlock, ...] = ()

    def __post_init__(self) -> None:
        assert (self.pull is not None) == (self.kind is OperationKind.PULL), "a pull says where from"
        assert self.keys, "an operation moves a page"
        for column in (self.pages, self.host_pages):
            assert len(column) in (0, len(self.keys)), "columns of the same pages"


@dataclass(frozen=True, slots=True)
class Selection:
    """Pages that are to go. tag: of their salt; None: of any. older_than_s: that were written so long ago or longer, by the wall
    clock; None: whenever they were."""

    tag: bytes | None = None
    older_than_s: float | None = None


ALL = Selection()


@dataclass(frozen=True, slots=True)
class Deleted:
    """What a deletion came to. pages: that are gone. dropped: keys that were held here and are not. pending: why some are still
    there, "" if none is."""

    pages: int
    dropped: tuple[bytes, ...] = ()
    pending: str = ""


@dataclass(frozen=True, slots=True)
class StorageUse:
    """Of a storage, as its owner last saw it. num_bytes: of its pages, with what is kept beside them. num_salts: with a page in
    it. over_quota_pages, deleted_pages: that went since it was opened because their salt had more than it may, and because
    somebody asked for it."""

    num_bytes: int = 0
    num_salts: int = 0
    over_quota_pages: int = 0
    deleted_pages: int = 0


NO_USE = StorageUse()


@dataclass(frozen=True, slots=True)
class Fact:
    """What an operation has come to. count: pages from its beginning that were moved, all of them whole; 0: it failed. Of a
    store: that the storage has now, whoever brought them. seconds: that moving them took. stored, dropped: keys that the storage
    holds now and did not, and the other way about. blocks: that the storage's pages were said to be of, before its start.
    use: of the storage then, where that may have changed. early: of a load from the host, whose last bytes are on their way;
    behind it comes one that says when they are there, with loaded: its pages, and the seconds that it took."""

    op_id: int
    count: int = 0
    seconds: float = 0.0
    stored: tuple[bytes, ...] = ()
    dropped: tuple[bytes, ...] = ()
    use: StorageUse | None = None
    blocks: tuple[KeptBlock, ...] = ()
    early: bool = False
    loaded: tuple[int, float] | None = None
