"""The units of the cache groups beside full attention: KV of windowed layers, and states of recurrent layers.

A page of tokens may have one unit in each group. In a WINDOW group, the unit has the keys and values of the page's tokens; in a
STATE group, it is the state after the page's last token. A unit moves with its page when the page is published or its tree node
is split, and is freed at the latest when the page is evicted. A prefix hit ends at a page end at which every group has the units
that the next token reads. The units of running requests are in SlotWindows and SlotStates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.cache_groups import CacheGroup, CacheKind, states_per_slot
from rootstock_llm.services.worker.core.kv.cache_events import CacheEventLog
from rootstock_llm.services.worker.core.kv.hit_ends import HitEnds
from rootstock_llm.services.worker.core.kv.slot_states import (
    NO_DECODE_STATES,
    NO_STATES,
    DecodeStates,
    RowStates,
    SlotStates,
)
from rootstock_llm.services.worker.core.kv.slot_windows import SlotWindows
from rootstock_llm.services.worker.core.kv.tree_node import TreeNode, backwards, page_of
from rootstock_llm.services.worker.core.kv.unit_pool import NO_UNIT, UnitPool

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
NO_LIMIT = 1 << 30
_NONE: I32 = np.empty(0, dtype=np.int32)


class CacheUnits:
    """The units of all cache groups, and the units of each slot. KVMemory is the owner."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        page_size: int,
        num_slots: int,
        pages_per_slot: int,
        state_interval: int,
        max_chunk: int,
        max_drafts: int,
        keeps_ends: bool,
        on_lost: Callable[[TreeNode], None],
        events: CacheEventLog | None,
    ) -> None:
        """Starts with all units free.

        Args:
            groups: at most one group of each kind.
            page_size: tokens of a page.
            num_slots: number of slots.
            pages_per_slot: pages of a slot's row in the page table.
            state_interval: smallest distance in tokens between two chunk ends whose units are kept for hits.
            max_chunk: largest number of tokens of a chunk.
            max_drafts: largest number of draft tokens of a decode row.
            keeps_ends: whether slots keep the units of page ends for hits. False if nothing is cached.
            on_lost: called with a node that stays in the tree and has lost a unit.
            events: log of the page ends at which hits can end; None if no prefix index reads it.
        """
        kinds = [group.kind for group in groups]
        assert len(set(kinds)) == len(kinds), "at most one group of each kind"
        self._events, self.hit_ends = events, HitEnds(events) if events is not None else None
        pools = {group.kind: UnitPool(group.num_units, index, on_lost, self._disowned) for index, group in enumerate(groups)}
        self.pools = list(pools.values())
        self.windows, self.states = pools.get(CacheKind.WINDOW), pools.get(CacheKind.STATE)
        self._page_size, self._interval, self._keeps_ends = page_size, state_interval, keeps_ends
        self._max_drafts, self._states_per_slot = max_drafts, states_per_slot(max_drafts)
        self.num_slots = 0  # number of slots between begin() and end()
        # Whether a request waits only because units are lent to operations, waiting requests or reservations, see UnitPins.
        self.is_short = False
        # By slot: last page end at which units are kept for hits; page end after which the prompt differs from cached prompts, 0
        # for none; draft tokens of the newest row.
        self._last_end, self._branch, self._drafts = np.zeros((3, num_slots), dtype=np.int64)
        # Page ends of planned chunks, rising, with their states. publish() gives the units to the pages when they are computed.
        self._ends: dict[int, list[tuple[int, int]]] = {}
        self.slot_windows = self.slot_states = None
        if self.windows is not None:
            window = next(group.window for group in groups if group.kind is CacheKind.WINDOW)
            sizes = window, page_size, num_slots, pages_per_slot, max_chunk, max_drafts
            self.slot_windows = SlotWindows(self.windows, *sizes)
        if self.states is not None:
            flags = max_drafts > 0, keeps_ends
            self.slot_states = SlotStates(self.states, page_size, num_slots, *flags, self._ends, self._drafts)

    # Prefix hits

    def hit_end(self, path: Sequence[tuple[TreeNode, int]], limit: int) -> int:
        """Returns the number of pages of the longest prefix hit.

        Args:
            path: nodes below the root, in order, each with its number of matching pages.
            limit: largest number of pages of the hit.
        """
        total = min(sum(count for _, count in path), limit)
        if total <= 0:
            return 0
        fits = np.ones(total, dtype=np.bool_)
        for pool in self.pools:
            fits &= self._has_units(pool, path, total)
        return _last_end(fits)

    def count_misses(self, path: Sequence[tuple[TreeNode, int]]) -> None:
        """Counts, for each group, the cached pages of an admitted prompt after the last page end with the group's units."""
        total = sum(count for _, count in path)
        for pool in self.pools if total else ():
            pool.missed_pages_total += total - _last_end(self._has_units(pool, path, total))

    def _has_units(self, pool: UnitPool, path: Sequence[tuple[TreeNode, int]], total: int) -> NDArray[np.bool_]:
        """Returns for each page end of a path, from 1 to `total`, whether the group has the units that the next token reads."""
        missing: NDArray[np.bool_] = _along(path, pool.index)[:total] == NO_UNIT
        return self._fits_at_ends(pool, missing)

    def _fits_at_ends(self, pool: UnitPool, missing: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Returns for each page end whether no unit that the next token reads is missing, bool[n]. `missing` is by page."""
        if pool is not self.windows or self.slot_windows is None:
            return ~missing
        ends, counts = np.arange(1, len(missing) + 1), np.zeros(len(missing) + 1, dtype=np.int64)
        np.cumsum(missing, out=counts[1:])
        found: NDArray[np.bool_] = counts[ends] == counts[self.slot_windows.first_pages(ends)]
        return found

    def is_reachable(self, node: TreeNode) -> bool:
        """Returns whether a hit may end in the node. Checks only the node's own units of the last group."""
        return bool(node.units) and bool((node.units[-1] != NO_UNIT).any())

    def kept_ends(self, path: Sequence[tuple[TreeNode, int]]) -> list[int]:
        """Returns the page ends of a path at which all groups keep the units that the next token reads, rising."""
        total = sum(count for _, count in path)
        fits = np.ones(total, dtype=np.bool_)
        for pool in self.pools if total else ():
            kept = pool.are_needed(_along(path, pool.index))
            fits &= self._fits_at_ends(pool, ~kept)
        return (np.flatnonzero(fits) + 1).tolist()

    def read_at(self, index: int, end: int) -> range:
        """Returns the pages whose units of a group the token after the page end `end` reads."""
        return range(end - 1 if self.pools[index] is self.states else self._first_page(end), end)

    def unit_of(self, index: int, end: TreeNode, page: int) -> int:
        """Returns the unit of a page, or NO_UNIT. `end` is a node at the page or after it."""
        node, at = page_of(end, page)
        return int(node.units[index][at])

    # Nodes

    def appended(self, node: TreeNode) -> None:
        node.units = [np.full(len(node.pages), NO_UNIT, dtype=np.int32) for _ in self.pools]

    def split(self, upper: TreeNode, lower: TreeNode, num_pages: int) -> None:
        """Divides the units of `lower`, whose first `num_pages` pages have become the node `upper`."""
        upper.units = [units[:num_pages].copy() for units in lower.units]
        lower.units = [units[num_pages:].copy() for units in lower.units]
        for pool, units in zip(self.pools, upper.units, strict=True):
            for unit in units[units != NO_UNIT].tolist():
                pool.moved(unit, upper)

    def removed(self, node: TreeNode) -> None:
        """Frees the units of a node that leaves the tree."""
        for pool, units in zip(self.pools, node.units, strict=True):
            for unit in units[units != NO_UNIT].tolist():
                pool.disown(unit)

    # Slots

    def can_reserve(self, num_extend: int) -> bool:
        """Returns whether enough units are unreserved for one more request, which extends by `num_extend` tokens.

        Operations and reservations must leave the reserved units free or evictable, see UnitPins.
        """
        fits = is_first = True
        for pool in self.pools:
            more = self._states_per_slot
            if self.slot_windows is not None and pool is self.windows:
                more = self.slot_windows.extend_pages(num_extend)
            left = pool.num_units - self.num_reserved_of(pool) - more
            fits &= left >= pool.num_lent
            is_first &= left >= 0
        self.is_short = is_first and not fits
        return fits

    def can_reserve_without(self, slots: Sequence[int], num_extend: int) -> bool:
        """Returns whether units for one more request would be unreserved if these slots had ended and no unit were lent."""
        windows = self.slot_windows
        if windows is not None:
            needed = windows.num_reserved_without(slots) + windows.extend_pages(num_extend)
            if needed > windows.num_units:
                return False
        return self.states is None or self._states_per_slot * (self.num_slots - len(slots) + 1) <= self.states.num_units

    @property
    def num_reserved(self) -> int:
        """Number of window units that are reserved for the slots."""
        return 0 if self.slot_windows is None else self.slot_windows.num_reserved

    def num_reserved_of(self, pool: UnitPool) -> int:
        """Returns the number of the group's units that are reserved for the slots."""
        return self._states_per_slot * self.num_slots if pool is self.states else self.num_reserved

    def begin(self, slot: int, hit: TreeNode, branch: int, num_extend: int) -> tuple[int, I32]:
        """Reserves window units for a slot, and pins the units of the slot's hit.

        Args:
            slot: a free slot.
            hit: end of the hit, which hit_end() has found.
            branch: number of cached pages of the prompt, at least the pages of the hit.
            num_extend: number of tokens after the hit to which the request extends.

        Returns:
            The first page with a window unit, and the units from this page on.
        """
        self.num_slots += 1
        self._last_end[slot], self._branch[slot] = hit.depth, branch if branch > hit.depth else 0
        self._drafts[slot] = 0
        if self.slot_states is not None:
            self.slot_states.begin(slot, hit)
        return (0, _NONE) if self.slot_windows is None else self.slot_windows.begin(slot, hit, num_extend)

    def end(self, slot: int, num_shared: int, num_pages: int) -> None:
        """Frees and unpins all units of a slot.

        Args:
            slot: the slot.
            num_shared: number of the slot's first pages that the tree owns.
            num_pages: number of the slot's pages.
        """
        self.num_slots -= 1
        if self.slot_windows is not None:
            self.slot_windows.end(slot, num_shared, num_pages)
        unpublished = [unit for _, unit in self._ends.pop(slot, ())]
        if self.slot_states is not None:
            self.slot_states.end(slot, unpublished)

    def slots_with_ends(self) -> set[int]:
        """Returns the slots with page ends that are planned and not published."""
        return set(self._ends)

    def num_spare_pages(self, slot: int, num_pages: int) -> int:
        """Returns the number of pages that a slot with `num_pages` pages may still get."""
        return NO_LIMIT if self.slot_windows is None else self.slot_windows.num_spare_pages(slot, num_pages)

    def grow(self, slot: int, have: int, count: int) -> I32:
        """Allocates the window units of further pages of a slot. Returns them, int32[count]; empty without a window."""
        return _NONE if self.slot_windows is None else self.slot_windows.grow(slot, have, count)

    def grow_each(self, slots: I32, pages: I32) -> I32:
        """Allocates the window unit of one further page for each slot. Returns them, int32[n]; empty without a window."""
        return _NONE if self.slot_windows is None else self.slot_windows.grow_each(slots, pages)

    # Steps

    def begin_plan(self) -> None:
        """Frees or unpins the states that the previous plan read. Called before the rows of a step are planned."""
        if self.slot_states is not None:
            self.slot_states.begin_plan()

    def chunk(self, slot: int, start: int, count: int, target: int) -> int:
        """Shortens a chunk so that one step can store the states at the page ends inside it. Returns the chunk's tokens.

        Args:
            slot: the slot.
            start: first position of the chunk, to which the previous steps have computed the request.
            count: tokens of the chunk, 1 or more.
            target: number of tokens to extend to.
        """
        if self.slot_states is None:
            return count
        inside, cuts = self._ends_inside(slot, start, count, target), self.slot_states.num_cuts(slot)
        return count if len(inside) <= cuts else inside[cuts] * self._page_size - start

    def extend(self, slot: int, start: int, count: int, target: int) -> RowStates:
        """Allocates the states of a chunk that chunk() has accepted, and records the page ends at which units are kept."""
        inside, last = self._ends_inside(slot, start, count, target), (start + count) // self._page_size
        assert self.slot_states is None or len(inside) <= 1, "chunk() allows one cut"
        is_kept = (start + count) % self._page_size == 0 and self._is_kept(slot, last, target)
        if inside or is_kept:
            self._last_end[slot] = last if is_kept else inside[-1]
        states = NO_STATES
        if self.slot_states is not None:
            cut = inside[0] * self._page_size - start if inside else 0
            states = self.slot_states.extend(slot, start, count, cut)
        self._drafts[slot] = 0
        ends = [(end, states.at_cut) for end in inside] + [(last, states.after)] * is_kept
        if ends:
            self._ends.setdefault(slot, []).extend(ends)
        return states

    def decode(self, slots: I64, starts: I64, drafts: I32) -> DecodeStates:
        """Allocates the states of decode rows.

        Args:
            slots: int64[n], distinct.
            starts: int64[n], the row's first position, which is the number of its planned tokens before this step.
            drafts: int32[n], number of draft tokens of each row; empty without a drafter.
        """
        states = NO_DECODE_STATES if self.slot_states is None else self.slot_states.decode(slots, starts, drafts)
        self._drafts[slots] = drafts if len(drafts) else 0
        return states

    def reject(self, slots: I32, rejected: I64) -> None:
        """Corrects the positions of states whose rows were planned before a step was committed.

        Args:
            slots: int32[n], distinct slots with a row after the committed step.
            rejected: int64[n], tokens of the committed step that the plan of the later row has counted and that were rejected.
        """
        if self.slot_states is not None:
            self.slot_states.reject(slots, rejected)

    def drop_row(self, slot: int, num_committed: int) -> None:
        """Undoes the states of a slot's decode row in flight, if they cover more tokens than the first `num_committed`.

        Called between the plan of the row and the next plan, because a grammar has replaced the tokens.
        """
        if self.slot_states is not None and self.slot_states.drop_row(slot, num_committed):
            self._drafts[slot] = 0

    def leave_extend(self, slot: int, start: int, num_shared: int) -> None:
        """Frees and unpins the window units that a slot no longer needs when it extends from `start` on."""
        if self.slot_windows is not None:
            self.slot_windows.leave(slot, self._first_needed(slot, start // self._page_size), num_shared)

    def leave_decode(self, slots: I64, planned: I64, committed: I64, num_pages: I32, num_shared: I32) -> bool:
        """Frees and unpins the window units that decode rows no longer need.

        A row keeps the window before the last page end up to which all of its tokens are committed. One planned token of a row
        may be in flight; this page end is therefore at most at `planned` - 1. If draft tokens are in flight, it is also at most
        at `committed`, because they may be rejected.

        Args:
            slots: int64[n].
            planned: int64[n], number of planned tokens of each row.
            committed: int64[n], number of committed tokens of each row.
            num_pages: int32[slots], number of each slot's pages.
            num_shared: int32[slots], number of each slot's first pages that the tree owns.

        Returns:
            Whether fewer units are reserved than before, so that further requests may be admitted.
        """
        windows, states = self.slot_windows, self.slot_states
        if windows is None:
            return False
        positions = planned
        if self._max_drafts:
            positions = np.where(self._drafts[slots] > 0, np.minimum(planned, committed + 1), planned)
        ends = (positions - 1) // self._page_size
        first = windows.first_pages(ends)
        if self._max_drafts and states is not None:
            # The kept state needs the window before its page end. The reserved units limit how much of this window stays.
            kept = np.where(states.kept[slots] != NO_UNIT, windows.first_pages(states.kept_end[slots]), first)
            first = np.minimum(first, np.maximum(kept, windows.first_to_keep(slots, planned, num_pages)))
        for row in windows.behind(slots, first):
            slot = int(slots[row])
            windows.leave(slot, min(int(first[row]), self._first_needed(slot, int(ends[row]))), int(num_shared[slot]))
        return windows.shrink(slots, num_pages)

    # Cached pages

    def publish(self, slot: int, end: TreeNode, first: int) -> tuple[int, I32]:
        """Gives the slot's units to newly published pages. If a page has a unit already, the slot's unit is freed.

        Args:
            slot: the slot.
            end: node at the end of the slot's published pages.
            first: first newly published page.

        Returns:
            The first page whose window unit has changed, and the slot's units from this page on; empty if no unit has changed.
        """
        changed = end.depth if self.slot_windows is None else self.slot_windows.publish(slot, end, first)
        ends = self._ends.get(slot, ())
        done = [(at, unit) for at, unit in ends if at <= end.depth]
        if done:
            rest = [(at, unit) for at, unit in ends if at > end.depth]
            if rest:
                self._ends[slot] = rest
            else:
                del self._ends[slot]
            for at, unit in done:
                self._keep_end(slot, end, at, unit)
        return changed, _NONE if self.slot_windows is None else self.slot_windows.table[slot, changed : end.depth].copy()

    def publish_last(self, slot: int, end: TreeNode, num_committed: int) -> None:
        """Gives the state at the slot's last page end to the page before this page end. Called before the slot ends.

        Args:
            slot: the slot.
            end: end of the published pages.
            num_committed: number of the slot's committed tokens.
        """
        at, unit = end.depth, NO_UNIT
        if self.slot_states is not None:
            at, unit = self.slot_states.take_last(slot, end.depth, num_committed)
        if at:
            self._keep_end(slot, end, at, unit)

    def _keep_end(self, slot: int, end: TreeNode, at: int, unit: int) -> None:
        """Gives a slot's state to the page before the page end `at`, and marks the units of the window before it as needed.

        Args:
            slot: the slot.
            end: node of the published pages, at the page end or after it.
            at: number of pages.
            unit: state at the page end; NO_UNIT without states.
        """
        if self.slot_states is not None and unit != NO_UNIT:
            self.slot_states.give(slot, unit, *page_of(end, at - 1))
        self.note_end(end, at)

    def note_end(self, end: TreeNode, at: int) -> None:
        """Marks the window units before the page end `at` as needed, and reports the page end to the prefix index.

        `end` is a node at the page end or after it.
        """
        if self.windows is not None:
            for node, page, _ in backwards(end, self._first_page(at), at):
                unit = int(node.units[self.windows.index][page])
                if unit != NO_UNIT:
                    self.windows.need(unit)
        if self.hit_ends is not None:
            self._report_end(end, at)

    def _report_end(self, end: TreeNode, at: int) -> None:
        """Reports the page end `at` to the prefix index if its pages have all units that the next token reads."""
        assert self._events is not None and self.hit_ends is not None
        units: list[tuple[int, int]] = []
        if self.states is not None:
            node, page = page_of(end, at - 1)
            units.append((self.states.index, int(node.units[self.states.index][page])))
        if self.windows is not None:
            index = self.windows.index
            units += [(index, int(node.units[index][page])) for node, page, _ in backwards(end, self._first_page(at), at)]
        mark = self._events.mark_of(end, at)
        if mark is not None and units and all(unit != NO_UNIT for _, unit in units):
            self.hit_ends.kept(mark, units)

    def _disowned(self, index: int, unit: int) -> None:
        if self.hit_ends is not None:
            self.hit_ends.freed(index, unit)

    # Checks

    def slot_units(self, slot: int, num_shared: int, num_pages: int) -> list[list[int]]:
        """Returns the units that a leased slot holds, by group."""
        found: list[list[int]] = [[] for _ in self.pools]
        if self.windows is not None and self.slot_windows is not None:
            found[self.windows.index] = self.slot_windows.own_units(slot, num_shared, num_pages)
        if self.states is not None and self.slot_states is not None:
            found[self.states.index] = self.slot_states.own_units(slot)
        return found

    def leaving_units(self) -> list[int]:
        """Returns the states that no slot uses and that the next begin_plan() frees."""
        return [] if self.slot_states is None else self.slot_states.leaving_units()

    # Details

    def _first_page(self, end: int) -> int:
        """Returns the first page that the token after the page end `end` attends to in windowed layers."""
        return 0 if self.slot_windows is None else self.slot_windows.first_page(end)

    def _first_needed(self, slot: int, end: int) -> int:
        """Returns the first page that the slot needs after the page end `end` or after one of its unpublished page ends."""
        return min([self._first_page(end), *(self._first_page(at) for at, _ in self._ends.get(slot, ()))])

    def _ends_inside(self, slot: int, start: int, count: int, target: int) -> list[int]:
        """Returns the page ends inside a chunk at which units are kept independently of state_interval, rising."""
        size = self._page_size
        if not self._keeps_ends:
            return []
        wanted = {int(self._branch[slot]), (target - 1) // size}
        return sorted(end for end in wanted if start < end * size < start + count)

    def _is_kept(self, slot: int, end: int, target: int) -> bool:
        """Returns whether units are kept at the page end `end`, which is the end of a chunk."""
        if not self._keeps_ends:
            return False
        if end in (int(self._branch[slot]), (target - 1) // self._page_size):
            return True
        return (end - int(self._last_end[slot])) * self._page_size >= self._interval


def _last_end(fits: NDArray[np.bool_]) -> int:
    """Returns the number of pages up to the last page end that fits, 0 if none does."""
    found = np.flatnonzero(fits)
    return int(found[-1]) + 1 if len(found) else 0


def _along(path: Sequence[tuple[TreeNode, int]], index: int) -> I32:
    """Returns the units of a cache group for the pages of a path, as int32[n]."""
    return np.concatenate([node.units[index][:count] for node, count in path])
