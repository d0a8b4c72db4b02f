"""The pages of host memory: which key's KV lies in which, as ids; the memory behind them is the executor's.

Each page is in exactly one state: free, being written by an operation, cached under its key, or forgotten while an operation
reads it; free + writing + cached + forgotten = total. A page that an operation reads is pinned. What was used longest ago goes
first; who touches keys of a prompt touches the last one first, so that prefixes outlive what is built on them. A salt with all
the pages that it may have makes room among its own. Single owner: Tiers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from services.worker.core.tiers.page_keys import UNSALTED, tag_of

I32 = NDArray[np.int32]


class HostIndex:
    """salt_pages: that one salt may have, what is being written for it among them; 0: as many as there are.
    evicted_total: pages that made room for others; over_quota_total: of these, for others of their own salt that has no more.
    on_gone: told of each key that is not held any more."""

    def __init__(self, num_pages: int, salt_pages: int = 0) -> None:
        self.num_pages = num_pages
        self.on_gone: Callable[[bytes], None] = lambda key: None
        self._salt_pages = salt_pages
        self._free = list(range(num_pages))[::-1]
        self._writing: dict[int, bytes] = {}  # tags by page
        self._cached: OrderedDict[bytes, int] = OrderedDict()  # the coldest first
        self._of_salt: dict[bytes, OrderedDict[bytes, None]] = {}  # the same, by tag, of those with a salt
        self._written_for: Counter[bytes] = Counter()  # pages being written, by tag
        self._pins: Counter[int] = Counter()
        self._forgotten: set[int] = set()
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
        """With a page that is cached."""
        return len(self._of_salt)

    def most_pages(self, tag: bytes) -> int:
        """That the salt may have."""
        return min(self._salt_pages, self.num_pages) if self._has_quota(tag) else self.num_pages

    def is_full(self, tag: bytes) -> bool:
        """The salt has all that it may have."""
        return self._has_quota(tag) and self._num_of(tag) >= self._salt_pages

    def take(self, count: int, tag: bytes = UNSALTED) -> I32:
        """int32[n], n at most `count`: free pages, and those of the coldest keys that no operation reads; of the salt's own where
        it has no more. They are being written from now on."""
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
        """They hold the KV of these keys now. A key that is held already keeps its page."""
        assert len(keys) == len(pages), "a page for each key"
        for key, page in zip(reversed(keys), reversed(pages.tolist()), strict=True):
            self._end_writing(page)
            if key in self._cached:
                self._free.append(page)
            else:
                self._hold(key, page)
            self._use(key)
        assert self._adds_up, "free + writing + cached + forgotten = total"

    def give_back(self, pages: I32) -> None:
        """Nothing was written to them that counts."""
        for page in pages.tolist():
            self._end_writing(page)
            self._free.append(page)
        assert self._adds_up, "free + writing + cached + forgotten = total"

    def pin(self, keys: Sequence[bytes]) -> I32:
        """The pages of keys that are held; they stay until unpin."""
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
        """The prompt that these keys lead through is in use; those that are not held do not count."""
        for key in reversed(keys):
            if key in self._cached:
                self._use(key)

    def clear(self) -> int:
        """Forgets every key; returns their number. Pages that operations read are free once that has ended."""
        return self._forget(list(self._cached))

    def forget_salt(self, tag: bytes) -> int:
        """The same, of the keys of one salt."""
        return self._forget([key for key in self._cached if tag_of(key) == tag])

    def _forget(self, keys: Iterable[bytes]) -> int:
        count = 0
        for key in keys:
            page = self._let_go(key)
            if page in self._pins:
                self._forgotten.add(page)
            else:
                self._free.append(page)
            self.on_gone(key)
            count += 1
        assert self._adds_up, "free + writing + cached + forgotten = total"
        return count

    def _evict(self) -> bool:
        for _ in range(len(self._cached)):
            key = next(iter(self._cached))
            if self._cached[key] not in self._pins:
                self._evict_key(key)
                return True
            self._use(key)  # it is in use, and no reason to be looked at again soon
        return False

    def _evict_own(self, tag: bytes) -> bool:
        """The coldest one of a salt that nothing reads."""
        for key in self._of_salt.get(tag, ()):
            if self._cached[key] not in self._pins:
                self._evict_key(key)
                self.over_quota_total += 1
                return True
        return False

    def _evict_key(self, key: bytes) -> None:
        self._free.append(self._let_go(key))
        self.evicted_total += 1
        self.on_gone(key)

    def _has_quota(self, tag: bytes) -> bool:
        return self._salt_pages > 0 and tag != UNSALTED

    def _num_of(self, tag: bytes) -> int:
        """Pages of a salt, cached and being written."""
        return len(self._of_salt.get(tag, ())) + self._written_for[tag]

    def _hold(self, key: bytes, page: int) -> None:
        self._cached[key] = page
        if (tag := tag_of(key)) != UNSALTED:
            self._of_salt.setdefault(tag, OrderedDict())[key] = None

    def _let_go(self, key: bytes) -> int:
        """Its page, which is nobody's then."""
        if (tag := tag_of(key)) != UNSALTED:
            own = self._of_salt[tag]
            del own[key]
            if not own:
                del self._of_salt[tag]
        return self._cached.pop(key)

    def _use(self, key: bytes) -> None:
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
        held = len(self._writing) + len(self._cached) + len(self._forgotten)
        return len(self._free) + held == self.num_pages
