"""The pages of host memory: which key's KV lies in which, as ids; the memory behind them is the executor's.

Each page is in exactly one state: free, being written by an operation, cached under its key, or forgotten while an operation
reads it; free + writing + cached + forgotten = total. A page that an operation reads is pinned. What was used longest ago goes
first; who touches keys of a prompt touches the last one first, so that prefixes outlive what is built on them. Single owner:
Tiers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]


class HostIndex:
    """evicted_total: pages that made room for others. on_gone: told of each key that is not held any more."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.on_gone: Callable[[bytes], None] = lambda key: None
        self._free = list(range(num_pages))[::-1]
        self._writing: set[int] = set()
        self._cached: OrderedDict[bytes, int] = OrderedDict()  # the coldest first
        self._pins: Counter[int] = Counter()
        self._forgotten: set[int] = set()
        self.evicted_total = 0

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

    def take(self, count: int) -> I32:
        """int32[n], n at most `count`: free pages, and those of the coldest keys that no operation reads. They are being written
        from now on."""
        pages: list[int] = []
        while len(pages) < count and (self._free or self._evict()):
            pages.append(self._free.pop())
        self._writing.update(pages)
        return np.array(pages, dtype=np.int32)

    def put(self, keys: Sequence[bytes], pages: I32) -> None:
        """They hold the KV of these keys now. A key that is held already keeps its page."""
        assert len(keys) == len(pages), "a page for each key"
        for key, page in zip(reversed(keys), reversed(pages.tolist()), strict=True):
            self._writing.remove(page)
            if key in self._cached:
                self._free.append(page)
            else:
                self._cached[key] = page
            self._cached.move_to_end(key)
        assert self._adds_up, "free + writing + cached + forgotten = total"

    def give_back(self, pages: I32) -> None:
        """Nothing was written to them that counts."""
        for page in pages.tolist():
            self._writing.remove(page)
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
                self._cached.move_to_end(key)

    def clear(self) -> int:
        """Forgets every key; returns their number. Pages that operations read are free once that has ended."""
        gone, self._cached = self._cached, OrderedDict()
        for key, page in gone.items():
            if page in self._pins:
                self._forgotten.add(page)
            else:
                self._free.append(page)
            self.on_gone(key)
        assert self._adds_up, "free + writing + cached + forgotten = total"
        return len(gone)

    def _evict(self) -> bool:
        for _ in range(len(self._cached)):
            key = next(iter(self._cached))
            if self._cached[key] not in self._pins:
                self._free.append(self._cached.pop(key))
                self.evicted_total += 1
                self.on_gone(key)
                return True
            self._cached.move_to_end(key)  # it is in use, and no reason to be looked at again soon
        return False

    @property
    def _adds_up(self) -> bool:
        held = len(self._writing) + len(self._cached) + len(self._forgotten)
        return len(self._free) + held == self.num_pages
