"""The two pools of the field: TokenToKVPool gives out pages of KV, ReqToTokenPool gives out slots, each with a page table row.

Ids only; the tensors behind them are the executor's. Single owner: KVMemory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]


class TokenToKVPool:
    """Free pages as a stack. A page is either in here or with whoever allocated it."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack: I32 = np.arange(num_pages, dtype=np.int32)[::-1].copy()
        self.num_free = num_pages

    def alloc(self, count: int) -> I32:
        """int32[count]. Asks for no more than num_free."""
        assert 0 <= count <= self.num_free, "allocation beyond the pool"
        self.num_free -= count
        return self._stack[self.num_free : self.num_free + count][::-1].copy()

    def free(self, pages: I32) -> None:
        end = self.num_free + len(pages)
        assert end <= self.num_pages, "a page was freed twice"
        self._stack[self.num_free : end] = pages
        self.num_free = end

    def free_pages(self) -> I32:
        """int32[num_free], a copy. For checks."""
        return self._stack[: self.num_free].copy()


class ReqToTokenPool:
    """Slots and their page tables.

    page_table: int32[slots, pages per request]; row s is meaningful for its first num_pages[s] entries, of which the
    first num_shared[s] belong to the radix tree and the rest to the slot's lease.
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
