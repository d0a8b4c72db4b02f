"""What keeps pages of KV under the tiers that have addresses: by key, beyond the life of a process. No torch here.

A key is 40 bytes that decide the page's bytes: who asks for it twice gets the same, or nothing. Its first 8 are a tag: pages of
one tag are of one salt (core/tiers/page_keys.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.worker.core.contracts.transfers import ALL, Deleted, Selection, StorageUse


@dataclass(frozen=True, slots=True)
class Written:
    """What a write came to. stored: keys that are held now and were not before it. dropped: keys that were held before it and
    went to make room. held: how many of those asked for were held before it, by another worker's write, say, and are now."""

    stored: tuple[bytes, ...]
    dropped: tuple[bytes, ...]
    held: int = 0


@dataclass(frozen=True, slots=True)
class News:
    """What others have done to a store. stored: keys that it holds, as far as is known here; dropped: and that it does not.
    more: there are further ones."""

    stored: tuple[bytes, ...]
    dropped: tuple[bytes, ...]
    more: bool = False


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """corrupt_pages: that were found not to be what was written. failed_reads: pages that an error kept from being read.
    failed_writes: times that an error cut short a write, or left what was to go. All three since the store was opened, what that
    came upon included. bytes_on_disk: sizes of all its files. pages: held."""

    corrupt_pages: int
    failed_reads: int
    failed_writes: int
    bytes_on_disk: int
    pages: int


class PageStore(Protocol):
    """Called from one thread at a time. Calls take as long as a disk does: whoever has no time gives the store its own thread.

    Raises nothing for what a disk may do: a page that cannot be read is one that is not there, and counted.
    page_bytes: of every page. shared: others write it, too: news() is called from time to time.

    A quota is of bytes that the pages of one tag may take, those of UNSALTED aside: a write that would pass it takes the tag's
    oldest pages away first, and none of another's for that.
    """

    page_bytes: int
    shared: bool

    def keys(self) -> Sequence[bytes]:
        """Held, oldest first; from memory, valid until the next call."""

    def read(self, keys: Sequence[bytes], out: memoryview) -> int:
        """Fills `out`, page after page, and returns how many of the first pages are there and whole; it stops at the first that
        is not, which is forgotten. out: writable, len(keys) * page_bytes bytes; undefined behind the pages returned."""

    def take_lost(self) -> tuple[bytes, ...]:
        """Keys that have been forgotten since the last call because a read found no whole page; none of them is held."""

    def write(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> Written:
        """Stores as many as the disk takes, from the first on, and skips keys that it holds. What it says to be stored survives
        the death of the process. pages: of page_bytes bytes for each key, read during the call alone."""

    def news(self) -> News:
        """What others have done since the last call; of a store that is not shared nothing."""

    def delete(self, which: Selection = ALL) -> Deleted:
        """Forgets and deletes pages; more than these where they cannot be told apart, as in one file. What an error keeps is
        forgotten all the same, in this life of a store that is not shared, and its deletion is tried again before anything else
        is written, and with every further one."""

    def use(self) -> StorageUse: ...

    def counts(self) -> StoreCounts: ...

    def close(self) -> None:
        """Pages stay on disk. No other call follows."""
