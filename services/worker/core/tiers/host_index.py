"""The index of the host tier, which maps page keys to pages of host memory. The executor has the memory itself.

Each page is in exactly one state: free, being written by an operation, cached under its key, or forgotten while an operation
reads it; free + writing + cached + forgotten = total. A page that an operation reads is pinned. The least recently used page is
evicted first. The pages of a prompt are marked as used in reverse order, so that its last page is evicted first. If a salt is at
its quota, new pages of the salt evict pages of the same salt. A salt is identified by its tag (page_keys.py). Tiers is the owner.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.tiers.page_keys import UNSALTED, tag_of

I32 = NDArray[np.int32]


class HostIndex:
    """The pages of the host tier, as ids."""

    def __init__(self, num_pages: int, salt_pages: int = 0) -> None:
        """Starts with free pages.

        Args:
            num_pages: size of the tier.
            salt_pages: pages that one salt may have, including pages that are being written; 0: no limit.
        """
        self.num_pages = num_pages
        self.on_gone: Callable[[bytes], None] = lambda key: None  # called with each page key that leaves the tier
        self._salt_pages = salt_pages
        self._free = list(range(num_pages))[::-1]
        self._writing: dict[int, bytes] = {}  # tag of the salt by page
        self._cached: OrderedDict[bytes, int] = OrderedDict()  # page by key, least recently used first
        self._of_salt: dict[bytes, OrderedDict[bytes, None]] = {}  # cached keys of each salt by tag, least recently used first
        self._written_for: Counter[bytes] = Counter()  # number of pages being written, by tag
        self._pins: Counter[int] = Counter()  # number of operations that read a page
        self._forgotten: set[int] = set()  # forgotten pages, which become free when the last operation that reads them ends
        # Evicted pages; of these, pages that were evicted because their salt was at its quota.
        self.evicted_total = self.over_quota_total = 0

    def __contains__(self, key: object) -> bool:
        return key in self._cached

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_writing(self) -> int:
        return len(self._writing)

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    @property
    def num_salts(self) -> int:
        """Number of salts with a cached page."""
        return len(self._of_salt)

    def most_pages(self, tag: bytes) -> int:
        """Returns the largest number of pages that the salt may have."""
        return min(self._salt_pages, self.num_pages) if self._has_quota(tag) else self.num_pages

    def is_full(self, tag: bytes, count: int = 1) -> bool:
        """Returns whether the salt's quota has no space for `count` more pages."""
        return self._has_quota(tag) and self._num_of(tag) + count > self._salt_pages

    def take(self, count: int, tag: bytes = UNSALTED) -> I32:
        """Allocates at most `count` pages for writing. Evicts the least recently used pages that no operation reads.

        A salt at its quota evicts only its own pages.

        Args:
            count: largest number of pages.
            tag: tag of the pages' salt.

        Returns:
            The pages as int32[n], n <= count.
        """
        if self._has_quota(tag):
            while self._num_of(tag) + count > self._salt_pages and self._evict_own(tag):
                pass
            count = min(count, max(self._salt_pages - self._num_of(tag), 0))
        pages: list[int] = []
        while len(pages) < count and (self._free or self._evict()):
            pages.append(self._free.pop())
        self._writing |= dict.fromkeys(pages, tag)
        self._written_for.update([tag] * len(pages))
        return np.array(pages, dtype=np.int32)

    def put(self, keys: Sequence[bytes], pages: I32) -> None:
        """Caches written pages under their keys. If a key is cached already, its new page is freed."""
        assert len(keys) == len(pages), "each key has a page"
        for key, page in zip(reversed(keys), reversed(pages.tolist()), strict=True):
            self._end_writing(page)
            if key in self._cached:
                self._free.append(page)
            else:
                self._cache(key, page)
            self._use(key)
        assert self._adds_up, "free + writing + cached + forgotten = total"

    def give_back(self, pages: I32) -> None:
        """Frees pages that were allocated for writing and have no valid content."""
        for page in pages.tolist():
            self._end_writing(page)
            self._free.append(page)
        assert self._adds_up, "free + writing + cached + forgotten = total"

    def pin(self, keys: Sequence[bytes]) -> I32:
        """Pins the pages of cached keys until unpin(), and returns them as int32[n]."""
        pages = [self._cached[key] for key in keys]
        self._pins.update(pages)
        return np.array(pages, dtype=np.int32)

    def unpin(self, pages: I32) -> None:
        for page in pages.tolist():
            assert self._pins[page] > 0, "unpin without pin"
            self._pins[page] -= 1
            if not self._pins[page]:
                del self._pins[page]
                if page in self._forgotten:
                    self._forgotten.remove(page)
                    self._free.append(page)
        assert self._adds_up, "free + writing + cached + forgotten = total"

    def touch(self, keys: Sequence[bytes]) -> None:
        """Marks the keys of a prompt as used, the last one first. Keys that are not cached are ignored."""
        for key in reversed(keys):
            if key in self._cached:
                self._use(key)

    def clear(self) -> int:
        """Forgets every key and returns their number. Pages that an operation reads become free when it ends."""
        return self._forget(list(self._cached))

    def forget_salt(self, tag: bytes) -> int:
        """Forgets the keys of one salt and returns their number. Pages that an operation reads become free when it ends."""
        return self._forget([key for key in self._cached if tag_of(key) == tag])

    def _forget(self, keys: Iterable[bytes]) -> int:
        count = 0
        for key in keys:
            page = self._uncache(key)
            if page in self._pins:
                self._forgotten.add(page)
            else:
                self._free.append(page)
            self.on_gone(key)
            count += 1
        assert self._adds_up, "free + writing + cached + forgotten = total"
        return count

    def _evict(self) -> bool:
        """Evicts the least recently used page that no operation reads. Returns False if operations read all cached pages."""
        for _ in range(len(self._cached)):
            key = next(iter(self._cached))
            if self._cached[key] not in self._pins:
                self._evict_key(key)
                return True
            self._use(key)  # so that the next eviction does not examine this pinned page first
        return False

    def _evict_own(self, tag: bytes) -> bool:
        """Evicts the salt's least recently used page that no operation reads. Returns False if there is no such page."""
        for key in self._of_salt.get(tag, ()):
            if self._cached[key] not in self._pins:
                self._evict_key(key)
                self.over_quota_total += 1
                return True
        return False

    def _evict_key(self, key: bytes) -> None:
        self._free.append(self._uncache(key))
        self.evicted_total += 1
        self.on_gone(key)

    def _has_quota(self, tag: bytes) -> bool:
        return self._salt_pages > 0 and tag != UNSALTED

    def _num_of(self, tag: bytes) -> int:
        """Returns the number of the salt's pages that are cached or are being written."""
        return len(self._of_salt.get(tag, ())) + self._written_for[tag]

    def _cache(self, key: bytes, page: int) -> None:
        self._cached[key] = page
        if (tag := tag_of(key)) != UNSALTED:
            self._of_salt.setdefault(tag, OrderedDict())[key] = None

    def _uncache(self, key: bytes) -> int:
        """Removes a key and returns its page. The caller frees the page or records it as forgotten."""
        if (tag := tag_of(key)) != UNSALTED:
            own = self._of_salt[tag]
            del own[key]
            if not own:
                del self._of_salt[tag]
        return self._cached.pop(key)

    def _use(self, key: bytes) -> None:
        """Marks a key as the most recently used."""
        self._cached.move_to_end(key)
        if (tag := tag_of(key)) != UNSALTED:
            self._of_salt[tag].move_to_end(key)

    def _end_writing(self, page: int) -> None:
        tag = self._writing.pop(page)
        self._written_for[tag] -= 1
        if not self._written_for[tag]:
            del self._written_for[tag]

    @property
    def _adds_up(self) -> bool:
        used = len(self._writing) + len(self._cached) + len(self._forgotten)
        return len(self._free) + used == self.num_pages
