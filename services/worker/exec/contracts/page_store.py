"""Declares the storage tier: a store of KV pages by page key, which outlives the process. Imports no torch.

A page key has 40 bytes and determines the page's bytes: two reads of a key return the same bytes, or nothing. Its first 8 bytes
are the tag of the cache salt. Pages with equal tags have equal salts (core/tiers/page_keys.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rootstock_llm.services.worker.core.contracts.transfers import ALL, Deleted, Selection, StorageUse


@dataclass(frozen=True, slots=True)
class Written:
    """The result of a write."""

    stored: tuple[bytes, ...]  # page keys that the write added to the store
    dropped: tuple[bytes, ...]  # page keys that the store evicted to make space
    # number of pages in this write that the store already had, for example from another worker, and still has
    already_stored: int = 0


@dataclass(frozen=True, slots=True)
class News:
    """Changes that other workers made to a shared store."""

    stored: tuple[bytes, ...]  # page keys that this worker now counts as stored
    dropped: tuple[bytes, ...]  # page keys that are not in the store any longer
    more: bool = False  # whether another call of news() would return more changes now


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """The size of a store, and its faults since it was opened. Faults that the recovery at opening has found are included."""

    corrupt_pages: int  # pages whose bytes differ from the written ones
    failed_reads: int  # pages that could not be read because of an error
    failed_writes: int  # errors that ended a write early or prevented a deletion
    bytes_on_disk: int  # size of all files; for a store on a server, size of the known pages
    pages: int  # pages in the store


class PageStore(Protocol):
    """A store of KV pages, called from one thread at a time.

    A call blocks for the disk or the server. A caller that must not block runs the store on a separate thread. An error of the
    disk or the server raises no exception: an unreadable page counts as missing, and StoreCounts counts the error.

    A quota limits the bytes that the pages of one tag may take. Unsalted pages (UNSALTED) have no quota. If a write would exceed
    the quota, the store first evicts the oldest pages of the same tag.
    """

    page_bytes: int  # size of every page
    shared: bool  # whether other workers also write to the store; the owner then polls news()

    def keys(self) -> Sequence[bytes]:
        """Returns the page keys in the store, oldest first. Reads memory only; the result is valid until the next call."""

    def read(self, keys: Sequence[bytes], out: memoryview) -> int:
        """Reads pages into `out`, one after another, and returns the number of pages before the first missing or damaged page.

        The missing or damaged page is removed from the store's keys. So are later pages of `keys` that the store finds to be
        missing. The bytes of `out` after the last whole page are undefined.

        Args:
            keys: page keys.
            out: writable, len(keys) * page_bytes bytes.
        """

    def take_lost(self) -> tuple[bytes, ...]:
        """Returns the page keys that reads have removed since the last call, because the pages are missing or damaged."""

    def write(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> Written:
        """Stores the pages in order until an error occurs. Pages that the store already has are skipped.

        If there is too little space, the store evicts older pages. A page that is reported as stored survives a crash of the
        process.

        Args:
            keys: page keys.
            pages: page_bytes bytes for each page key, read only during the call.
        """

    def news(self) -> News:
        """Returns the changes by other workers since the last call. Empty if the store is not shared."""

    def delete(self, which: Selection = ALL) -> Deleted:
        """Deletes the selected pages, and further pages that cannot be deleted separately, such as those in the same file.

        If an error prevents the deletion of a page, the store removes the page key nevertheless, so that the page is not read.
        The store retries the deletion before its next write and in every later delete(). A store that is not shared may find the
        page again when it is opened the next time.
        """

    def use(self) -> StorageUse: ...

    def counts(self) -> StoreCounts: ...

    def close(self) -> None:
        """Closes the store. Its pages stay on disk. No further call may follow."""
