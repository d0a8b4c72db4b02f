"""The pools of pages and slots, named as in SGLang.

TokenToKVPool allocates pages of KV, ReqToTokenPool allocates slots with a page table each. They hold ids; the executor owns the
tensors. KVMemory is their only owner.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]


class TokenToKVPool:
    """A stack of free pages."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack: I32 = np.arange(num_pages, dtype=np.int32)[::-1].copy()
        self.num_free = num_pages

    def alloc(self, count: int) -> I32:
        """Allocates pages and returns them as int32[count]. `count` is at most num_free."""
        assert 0 <= count <= self.num_free, "allocation beyond the pool"
        self.num_free -= count
        return self._stack[self.num_free : self.num_free + count][::-1].copy()

    def free(self, pages: I32) -> None:
        end = self.num_free + len(pages)
        assert end <= self.num_pages, "a page was freed twice"
        self._stack[self.num_free : end] = pages
        self.num_free = end

    def free_pages(self) -> I32:
        """Returns a copy of the free pages as int32[num_free], for checks."""
        return self._stack[: self.num_free].copy()


class ReqToTokenPool:
    """Slots and their page tables.

    Row s of page_table (int32[slots, pages per request]) is valid for its first num_pages[s] entries. The first num_shared[s]
    of these pages belong to the radix tree, the others to the slot's lease.
    """

    def __init__(self, num_slots: int, pages_per_request: int) -> None:
        self.page_table: I32 = np.full((num_slots, pages_per_request), -1, dtype=np.int32)
        self.num_pages: I32 = np.zeros(num_slots, dtype=np.int32)
        self.num_shared: I32 = np.zeros(num_slots, dtype=np.int32)
        self._free = list(range(num_slots))[::-1]
        self._is_free = [True] * num_slots

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_leased(self) -> int:
        return len(self.num_pages) - len(self._free)

    def alloc(self) -> int:
        assert self._free, "more requests run than there are slots"
        slot = self._free.pop()
        assert self.num_pages[slot] == 0, "a free slot holds pages"
        self._is_free[slot] = False
        return slot

    def free(self, slot: int) -> None:
        assert not self._is_free[slot], "a slot was freed twice"
        self._is_free[slot] = True
        self.num_pages[slot] = self.num_shared[slot] = 0
        self._free.append(slot)
