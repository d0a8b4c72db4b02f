"""The window units of slots: tables of units beside the page tables, and the units that admission reserves.

A slot has the units of its last pages. The unit of a page that the tree owns is pinned; any other unit belongs to the slot.
CacheUnits is the owner.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.cache_groups import draft_window_tokens, window_pages
from rootstock_llm.services.worker.core.kv.tree_node import TreeNode, backwards
from rootstock_llm.services.worker.core.kv.unit_pool import NO_UNIT, UnitPool

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


class SlotWindows:
    """The window tables of all slots."""

    def __init__(
        self, pool: UnitPool, window: int, page_size: int, num_slots: int, pages_per_slot: int, max_chunk: int, max_drafts: int
    ) -> None:
        """Starts with empty tables.

        Args:
            pool: units of the WINDOW group.
            window: number of last tokens to which a token attends.
            page_size: tokens of a page.
            num_slots: number of slots.
            pages_per_slot: pages of a slot's row in the page table.
            max_chunk: largest number of tokens of a chunk.
            max_drafts: largest number of draft tokens of a decode row.
        """
        self._pool, self._window, self._page_size, self._pages_per_slot = pool, window, page_size, pages_per_slot
        self._max_chunk, self._max_drafts, self._draft_tokens = max_chunk, max_drafts, draft_window_tokens(max_drafts)
        self._decode_pages = window_pages(window + self._draft_tokens, page_size, pages_per_slot)
        self.table: I32 = np.full((num_slots, pages_per_slot), NO_UNIT, dtype=np.int32)
        # By slot: first page with a unit in the table; number of reserved units.
        self._first, self._reserved = np.zeros((2, num_slots), dtype=np.int64)
        self.num_reserved = 0  # sum of _reserved

    def first_page(self, end: int) -> int:
        """Returns the first page that the token after the page end `end` attends to."""
        return max((end * self._page_size - self._window + 1) // self._page_size, 0)

    def first_pages(self, ends: I64) -> I64:
        """Returns first_page() of each page end, int64[n]."""
        first: I64 = np.maximum((ends * self._page_size - self._window + 1) // self._page_size, 0)
        return first

    def extend_pages(self, num_extend: int) -> int:
        """Returns the number of units to reserve for a request that extends by `num_extend` tokens.

        These are the pages of a chunk and the window before it. This number also suffices for decoding.
        """
        tokens = max(min(num_extend, self._max_chunk), self._draft_tokens)
        return window_pages(self._window + tokens, self._page_size, self._pages_per_slot)

    @property
    def num_units(self) -> int:
        return self._pool.num_units

    def num_reserved_without(self, slots: Sequence[int]) -> int:
        """Returns the number of units that stay reserved if these slots end."""
        return self.num_reserved - int(self._reserved[list(slots)].sum())

    def begin(self, slot: int, hit: TreeNode, num_extend: int) -> tuple[int, I32]:
        """Reserves units for a slot, and pins the units of the slot's hit. Arguments and result: see CacheUnits.begin()."""
        self._first[slot] = first = self.first_page(hit.depth)
        self._reserve(slot, self.extend_pages(num_extend))
        for node, page, at in backwards(hit, first):
            unit = int(node.units[self._pool.index][page])
            assert unit != NO_UNIT, "a hit has the units of its window"
            self._pool.pin(unit)
            self.table[slot, at] = unit
        return first, self.table[slot, first : hit.depth].copy()

    def end(self, slot: int, num_shared: int, num_pages: int) -> None:
        """Frees and unpins all units of a slot. Arguments: see CacheUnits.end()."""
        self.leave(slot, num_pages, num_shared)
        self._reserve(slot, 0)

    def num_spare_pages(self, slot: int, num_pages: int) -> int:
        """Returns the number of pages that a slot with `num_pages` pages may still get."""
        return int(self._reserved[slot] - (num_pages - self._first[slot]))

    def grow(self, slot: int, have: int, count: int) -> I32:
        """Allocates the units of further pages of a slot. Returns them, int32[count]."""
        units = self._pool.alloc(count)
        self.table[slot, have : have + count] = units
        return units

    def grow_each(self, slots: I32, pages: I32) -> I32:
        """Allocates the unit of one further page for each slot. Returns them, int32[n]."""
        units = self._pool.alloc(len(slots))
        self.table[slots, pages] = units
        return units

    def leave(self, slot: int, first: int, num_shared: int) -> None:
        """Gives up the slot's units before page `first`: unpins the units that the tree owns, and frees the others."""
        begin = int(self._first[slot])
        if first <= begin:
            return
        units = self.table[slot, begin:first]
        shared = max(min(num_shared, first) - begin, 0)
        for unit in units[:shared][units[:shared] != NO_UNIT].tolist():
            self._pool.unpin(unit)
        own = units[shared:]
        self._pool.free(own[own != NO_UNIT].copy())
        units[:] = NO_UNIT
        self._first[slot] = first

    def behind(self, slots: I64, first: I64) -> list[int]:
        """Returns the index in `slots` of each slot with a unit before its page in `first` (int64[n])."""
        return np.flatnonzero(first > self._first[slots]).tolist()

    def first_to_keep(self, slots: I64, planned: I64, num_pages: I32) -> I64:
        """Returns for each decode row the first page whose unit the row's reservation covers after the next step, int64[n]."""
        after = np.maximum(num_pages[slots], -(-(planned + 1 + self._max_drafts) // self._page_size))
        first: I64 = after - self._decode_pages
        return first

    def shrink(self, slots: I64, num_pages: I32) -> bool:
        """Lowers the reservations of decode rows to the units that decoding needs. Returns whether any was lowered."""
        after_step = num_pages[slots] - self._first[slots] + 1 - (-self._max_drafts // self._page_size)
        wide = slots[(self._reserved[slots] > self._decode_pages) & (after_step <= self._decode_pages)]
        for slot in wide.tolist():
            self._reserve(slot, self._decode_pages)
        return len(wide) > 0

    def publish(self, slot: int, end: TreeNode, first: int) -> int:
        """Moves the slot's units of the pages from `first` on to the tree. If a page already has a unit, the slot's is freed.

        Returns:
            The first page whose unit has changed.
        """
        changed, pool = end.depth, self._pool
        for node, page, at in backwards(end, max(first, int(self._first[slot]))):
            mine, theirs = int(self.table[slot, at]), int(node.units[pool.index][page])
            if mine == NO_UNIT:
                continue
            if theirs == NO_UNIT:
                pool.own(mine, node, page)
                pool.pin(mine)
            else:
                pool.pin(theirs)
                pool.free(np.array([mine], dtype=np.int32))
                self.table[slot, at] = theirs
                changed = min(changed, at)
        return changed

    def own_units(self, slot: int, num_shared: int, num_pages: int) -> list[int]:
        """Returns the units that belong to a slot, for checks."""
        own = self.table[slot, num_shared:num_pages]
        units: list[int] = own[own != NO_UNIT].tolist()
        return units

    def _reserve(self, slot: int, count: int) -> None:
        self.num_reserved += count - int(self._reserved[slot])
        self._reserved[slot] = count
