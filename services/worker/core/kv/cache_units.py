"""The units of the cache groups beside full attention: KV of windowed layers, and states of recurrent layers.

A page of tokens may have one unit in each group. In a WINDOW group, the unit has the keys and values of the page's tokens; in a
STATE group, it is the state after the page's last token. A unit moves with its page when the page is published or split, and is
freed at the latest when the page is evicted. A prefix hit ends at a page end at which every group has the units that the next
token reads.

The slot of a running request has a table of window units, like its page table, and these states:

    kept ── the state at the last page end that the row has passed, for the next prefix hit
    current ── the state after the last planned token, which the next step reads
    next ── the unit that the next step writes; it becomes the current one when the step is planned
    replayed ── the state at a page end between accepted draft tokens, which the newest step may store

A step never writes a unit that it reads. A unit that a step reads is freed when the next step is planned. One forward stream
orders all steps, so that a later step may then write it.

If a decode row has draft tokens, its next state is the state before the row's first token, because draft tokens may be rejected.
The next row of the slot first replays the accepted tokens. The position of the current state is known when a row is planned,
because the step before the previous one is committed then:

    position of the current state      first position of the new row
    ├── accepted tokens of the previous row, replayed ──┤── own token and draft tokens ──
                  └ page end: replayed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.cache_groups import (
    CacheGroup,
    CacheKind,
    draft_window_tokens,
    states_per_slot,
    window_pages,
)
from rootstock_llm.services.worker.core.kv.cache_events import CacheEventLog
from rootstock_llm.services.worker.core.kv.hit_ends import HitEnds
from rootstock_llm.services.worker.core.kv.tree_node import TreeNode
from rootstock_llm.services.worker.core.kv.unit_pool import NO_UNIT, UnitPool

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
NO_LIMIT = 1 << 30
_NONE: I32 = np.empty(0, dtype=np.int32)
_NO_ROWS: I64 = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class RowStates:
    """The state units of one extend row, see BatchPlan."""

    before: int
    after: int
    start: int  # position at which `before` stands
    cut: int = 0
    at_cut: int = NO_UNIT


@dataclass(frozen=True, slots=True)
class DecodeStates:
    """The state units of decode rows, int32[rows] each; empty without states. See BatchPlan."""

    before: I32 = field(default_factory=lambda: _NONE)
    after: I32 = field(default_factory=lambda: _NONE)
    cuts: I32 = field(default_factory=lambda: _NONE)
    at_cut: I32 = field(default_factory=lambda: _NONE)
    starts: I32 = field(default_factory=lambda: _NONE)


NO_STATES = RowStates(NO_UNIT, NO_UNIT, 0)
NO_DECODE_STATES = DecodeStates()


class CacheUnits:
    """The units of all groups, and those of each slot. KVMemory is the owner."""

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
            on_lost: called with a node that has lost a unit by eviction.
            events: log of the page ends at which hits can end; None if no prefix index reads it.
        """
        kinds = [group.kind for group in groups]
        assert len(set(kinds)) == len(kinds), "at most one group of each kind"
        self._events, self.hit_ends = events, HitEnds(events) if events is not None else None
        pools = {group.kind: UnitPool(group.num_units, index, on_lost, self._disowned) for index, group in enumerate(groups)}
        self.pools = list(pools.values())
        self.windows, self.states = pools.get(CacheKind.WINDOW), pools.get(CacheKind.STATE)
        self._window = next((group.window for group in groups if group.kind is CacheKind.WINDOW), 0)
        self._page_size, self._interval, self._keeps_ends = page_size, state_interval, keeps_ends
        self._max_chunk, self._pages_per_slot = max_chunk, pages_per_slot
        self._max_drafts, self._draft_tokens = max_drafts, draft_window_tokens(max_drafts)
        self._slot_states = states_per_slot(max_drafts)
        self.decode_pages = window_pages(self._window + self._draft_tokens, page_size, pages_per_slot)

        def column(value: int) -> I64:
            return np.full(num_slots, value, dtype=np.int64)

        self.window_table: I32 = np.full((num_slots, pages_per_slot if self.windows else 0), NO_UNIT, dtype=np.int32)
        self._first = column(0)  # first page with a unit in the slot's window table
        self._reserved = column(0)  # window units that are reserved for the slot
        self.num_reserved = 0  # sum of _reserved
        self.num_slots = 0  # slots between begin() and end()
        # Whether a request waits only because operations and reservations have units, see UnitPins.
        self.is_short = False
        self._current = column(NO_UNIT)  # state after the last planned token; NO_UNIT: no token is planned
        self._current_is_cached = np.zeros(
            num_slots, dtype=np.bool_
        )  # whether a cached page owns the current state, which is pinned
        self._kept, self._kept_end = column(NO_UNIT), column(0)  # state at a page end that decoding has passed, and the page end
        self._older, self._older_end = column(NO_UNIT), column(0)  # the previous such pair, until the new state is committed
        # Number of the slot's committed tokens from which on a committed step has computed the kept or the older state.
        self._kept_from, self._older_from = column(0), column(0)
        # The following columns are used if there are draft tokens. Positions count all draft tokens in flight as accepted, like
        # SlotColumns.computed; reject() corrects them.
        self._at = column(0)  # position of the current state
        self._drafts = column(0)  # draft tokens of the slot's newest row
        self._replayed, self._replayed_end = column(NO_UNIT), column(0)  # state that the newest row may store, and its page end
        # The state that the newest row reads, its position, and whether a cached page owns it, for drop_row(). NO_UNIT after an
        # extend row.
        self._before, self._before_at = column(NO_UNIT), column(0)
        self._before_is_cached = np.zeros(num_slots, dtype=np.bool_)
        self._last_end = column(0)  # last page end at which the slot keeps units for hits
        self._branch = column(0)  # page end after which the prompt differs from cached prompts; 0: none
        # Page ends of planned chunks, rising, with their states. publish() gives the units to the pages when they are computed.
        self._ends: dict[int, list[tuple[int, int]]] = {}
        self._leaving: list[I32] = []  # states that the newest plan reads, and no later plan
        self._unpinning: list[int] = []  # cached states that the newest plan reads, and no later plan

    # Prefix hits

    def hit_end(self, path: Sequence[tuple[TreeNode, int]], limit: int) -> int:
        """Returns the number of pages of the longest prefix hit.

        Args:
            path: nodes from the root on, with the number of matching pages of each.
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
        """Returns for each page end whether no page whose unit the next token reads is missing, bool[n] as `missing`."""
        total = len(missing)
        if pool is not self.windows:
            return ~missing
        ends, counts = np.arange(1, total + 1), np.zeros(total + 1, dtype=np.int64)
        np.cumsum(missing, out=counts[1:])
        found: NDArray[np.bool_] = (
            counts[ends] == counts[np.maximum((ends * self._page_size - self._window + 1) // self._page_size, 0)]
        )
        return found

    def is_reachable(self, node: TreeNode) -> bool:
        """Returns whether a hit may end in the node. Checks only the node's own units."""
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
            more = self._slot_states if pool is self.states else self._extend_pages(num_extend)
            left = pool.num_units - self.num_reserved_of(pool) - more
            fits &= left >= pool.num_lent
            is_first &= left >= 0
        self.is_short = is_first and not fits
        return fits

    def num_reserved_of(self, pool: UnitPool) -> int:
        """Returns the number of units that are reserved for the slots."""
        return self._slot_states * self.num_slots if pool is self.states else self.num_reserved

    def _extend_pages(self, num_extend: int) -> int:
        """Returns the number of pages of a chunk and the window before it. This number of pages also suffices for decoding."""
        tokens = max(min(num_extend, self._max_chunk), self._draft_tokens)
        return window_pages(self._window + tokens, self._page_size, self._pages_per_slot)

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
        depth = hit.depth
        self.num_slots += 1
        self._last_end[slot], self._branch[slot] = depth, branch if branch > depth else 0
        self._current[slot], self._current_is_cached[slot] = NO_UNIT, False
        self._at[slot], self._drafts[slot], self._before[slot] = depth * self._page_size, 0, NO_UNIT
        if self.states is not None and depth:
            unit = int(hit.units[self.states.index][-1])
            assert unit != NO_UNIT, "a hit ends at a page with a state"
            self.states.pin(unit)
            self._current[slot], self._current_is_cached[slot] = unit, True
        self._first[slot] = first = self._first_page(depth)
        if self.windows is None:
            return 0, _NONE
        self._reserve(slot, self._extend_pages(num_extend))
        for node, page, at in _backwards(hit, first):
            unit = int(node.units[self.windows.index][page])
            assert unit != NO_UNIT, "a hit has the units of its window"
            self.windows.pin(unit)
            self.window_table[slot, at] = unit
        return first, self.window_table[slot, first:depth].copy()

    def end(self, slot: int, num_shared: int, num_pages: int) -> None:
        """Frees and unpins all units of a slot.

        Args:
            slot: the slot.
            num_shared: number of the slot's first pages that the tree owns.
            num_pages: number of the slot's pages.
        """
        self._leave(slot, num_pages, num_shared)
        self._reserve(slot, 0)
        self.num_slots -= 1
        unpublished = [unit for _, unit in self._ends.pop(slot, ())]
        if self.states is None:
            return
        unit = int(self._current[slot])
        if self._current_is_cached[slot]:
            self.states.unpin(unit)
        elif unit != NO_UNIT and unit not in unpublished:
            unpublished.append(unit)
        unpublished += [int(column[slot]) for column in (self._kept, self._older, self._replayed) if column[slot] != NO_UNIT]
        self._current[slot] = self._kept[slot] = self._older[slot] = self._replayed[slot] = NO_UNIT
        self._current_is_cached[slot] = False
        self.states.free(np.array(unpublished, dtype=np.int32))

    def slots_with_ends(self) -> set[int]:
        """Returns the slots with page ends that are planned and not published."""
        return set(self._ends)

    def num_spare_pages(self, slot: int, num_pages: int) -> int:
        """Returns the number of pages that a slot with `num_pages` pages may still get."""
        if self.windows is None:
            return NO_LIMIT
        return int(self._reserved[slot] - (num_pages - self._first[slot]))

    def grow(self, slot: int, have: int, count: int) -> I32:
        """Allocates the window units of further pages of a slot. Returns them, int32[count]; empty without a window."""
        if self.windows is None:
            return _NONE
        units = self.windows.alloc(count)
        self.window_table[slot, have : have + count] = units
        return units

    def grow_each(self, slots: I32, pages: I32) -> I32:
        """Allocates the window unit of one further page for each slot. Returns them, int32[n]; empty without a window."""
        if self.windows is None:
            return _NONE
        units = self.windows.alloc(len(slots))
        self.window_table[slots, pages] = units
        return units

    # Steps

    def begin_plan(self) -> None:
        """Frees the states that the previous plan read. Called before the rows of a step are planned."""
        if self.states is None:
            return
        for units in self._leaving:
            self.states.free(units)
        self._leaving.clear()
        for unit in self._unpinning:
            self.states.unpin(unit)
        self._unpinning.clear()

    def chunk(self, slot: int, start: int, count: int, target: int) -> int:
        """Shortens a chunk so that one step can store the states at the page ends inside it. Returns the chunk's tokens.

        Args:
            slot: the slot.
            start: first position of the chunk, to which the previous steps have computed the request.
            count: tokens of the chunk, 1 or more.
            target: number of tokens to extend to.
        """
        if self.states is None:
            return count
        inside = self._ends_inside(slot, start, count, target)
        cuts = 0 if self._kept[slot] != NO_UNIT or self._has_cut(slot) else 1
        return count if len(inside) <= cuts else inside[cuts] * self._page_size - start

    def extend(self, slot: int, start: int, count: int, target: int) -> RowStates:
        """Allocates the states of a chunk that chunk() has accepted, and records the page ends at which units are kept."""
        inside, size = self._ends_inside(slot, start, count, target), self._page_size
        kept = (
            []
            if (start + count) % size or not self._is_kept(slot, (start + count) // size, target)
            else [(start + count) // size]
        )
        if inside or kept:
            self._last_end[slot] = (inside + kept)[-1]
        ends = self._ends.setdefault(slot, []) if inside or kept else []
        self._free_older(slot)
        if self.states is None:
            ends += [(end, NO_UNIT) for end in inside + kept]
            self._drafts[slot] = 0
            return NO_STATES
        self._settle_replayed(slot)
        before, after = int(self._current[slot]), int(self.states.alloc(1)[0])
        cut, at_cut = 0, NO_UNIT
        if inside:
            assert len(inside) == 1, "chunk() allows one cut"
            cut, at_cut = inside[0] * size - start, int(self.states.alloc(1)[0])
            ends.append((inside[0], at_cut))
        ends += [(end, after) for end in kept]
        self._leave_state(slot, before)
        begin = int(self._at[slot]) if self._max_drafts else start
        self._current[slot], self._current_is_cached[slot] = after, False
        self._at[slot], self._drafts[slot], self._before[slot] = start + count, 0, NO_UNIT
        return RowStates(before, after, begin, cut, at_cut)

    def decode(self, slots: I64, starts: I64, drafts: I32) -> DecodeStates:
        """Allocates the states of decode rows.

        Args:
            slots: int64[n], distinct.
            starts: int64[n], the row's first position, which is the number of its planned tokens before this step.
            drafts: int32[n], number of draft tokens of each row; empty without a drafter.
        """
        states = self.states
        if states is None:
            self._drafts[slots] = drafts if len(drafts) else 0
            return NO_DECODE_STATES
        older = self._older[slots]
        if (older != NO_UNIT).any():
            states.free(older[older != NO_UNIT].astype(np.int32))
            self._older[slots] = NO_UNIT
        at = starts
        if self._max_drafts:
            at = self._at[slots]
            for slot in slots[self._replayed[slots] != NO_UNIT].tolist():
                self._settle_replayed(slot)
        before, cached = self._current[slots], self._current_is_cached[slots]
        at_end = (at % self._page_size == 0) & self._keeps_ends
        plain = ~at_end & ~self._current_is_cached[slots]
        if self._ends:
            plain &= ~np.isin(slots, list(self._ends))
        self._leaving.append(before[plain].astype(np.int32))
        for row in np.flatnonzero(~plain).tolist():
            self._pass_end(int(slots[row]), int(at[row]), bool(at_end[row]))
        after = states.alloc(len(slots)).astype(np.int64)
        self._current[slots], self._current_is_cached[slots] = after, False
        cuts, at_cut = np.zeros(len(slots), dtype=np.int32), np.full(len(slots), NO_UNIT, dtype=np.int32)
        if self._max_drafts:
            self._replay(states, slots, at, starts, before, cuts, at_cut)
            self._before[slots], self._before_at[slots], self._before_is_cached[slots] = before, at, cached
            self._at[slots], self._drafts[slots] = starts + (drafts == 0), drafts
        return DecodeStates(before.astype(np.int32), after.astype(np.int32), cuts, at_cut, at.astype(np.int32))

    def reject(self, slots: I32, rejected: I64) -> None:
        """Corrects the positions of states whose rows were planned before a step was committed.

        Args:
            slots: int32[n], distinct slots with a row after the committed step.
            rejected: int64[n], tokens of the committed step that the plan of the later row has counted and that were rejected.
        """
        self._at[slots] -= rejected

    def drop_row(self, slot: int, num_committed: int) -> None:
        """Undoes the states of a slot's decode row in flight, if they have tokens after the first `num_committed`.

        Called between the plan of the row and the next plan, because a grammar has replaced the tokens.
        """
        if self.states is None:
            return
        beyond = self._at[slot] > num_committed
        if self._replayed[slot] != NO_UNIT and (beyond or self._replayed_end[slot] * self._page_size > num_committed):
            self.states.free(self._replayed[slot : slot + 1].astype(np.int32))
            self._replayed[slot] = NO_UNIT
        if not beyond:
            return
        before, cached = int(self._before[slot]), bool(self._before_is_cached[slot])
        assert before != NO_UNIT and self._before_at[slot] <= num_committed, "a step in flight has read a committed state"
        self.states.free(self._current[slot : slot + 1].astype(np.int32))
        if self._kept[slot] == before:
            self._kept[slot], self._kept_end[slot] = self._older[slot], self._older_end[slot]
            self._kept_from[slot], self._older[slot] = self._older_from[slot], NO_UNIT
        elif cached:
            self._unpinning.remove(before)
        else:
            self._leaving = [units[units != before] for units in self._leaving]
        self._current[slot], self._current_is_cached[slot] = before, cached
        self._at[slot], self._drafts[slot], self._before[slot] = self._before_at[slot], 0, NO_UNIT

    def leave_extend(self, slot: int, start: int, num_shared: int) -> None:
        """Frees and unpins the window units that a slot no longer needs when it extends from `start` on."""
        if self.windows is not None:
            self._leave(slot, self._first_needed(slot, start // self._page_size), num_shared)

    def leave_decode(self, slots: I64, planned: I64, committed: I64, num_pages: I32, num_shared: I32) -> bool:
        """Frees and unpins the window units that decode rows no longer need.

        A row keeps the window of its last committed page end. The row's position may be one token after this page end. The
        planned position assumes that all draft tokens in flight are accepted, so that the smallest possible position decides.

        Args:
            slots: int64[n].
            planned: int64[n], number of planned tokens of each row.
            committed: int64[n], number of committed tokens of each row.
            num_pages: int32[slots], number of each slot's pages.
            num_shared: int32[slots], number of each slot's first pages that the tree owns.

        Returns:
            Whether fewer units are reserved than before, so that further requests may be admitted.
        """
        if self.windows is None:
            return False
        positions = planned
        if self._max_drafts:
            positions = np.where(self._drafts[slots] > 0, np.minimum(planned, committed + 1), planned)
        ends = (positions - 1) // self._page_size
        first = self._first_pages(ends)
        if self._max_drafts and self.states is not None:
            # The kept state needs the window before its page end, as far as the reserved units suffice.
            most = np.maximum(num_pages[slots], -(-(planned + 1 + self._max_drafts) // self._page_size)) - self.decode_pages
            kept = np.where(self._kept[slots] != NO_UNIT, self._first_pages(self._kept_end[slots]), first)
            first = np.minimum(first, np.maximum(kept, most))
        for row in np.flatnonzero(first > self._first[slots]).tolist():
            slot = int(slots[row])
            self._leave(slot, min(int(first[row]), self._first_needed(slot, int(ends[row]))), int(num_shared[slot]))
        after_step = num_pages[slots] - self._first[slots] + 1 - (-self._max_drafts // self._page_size)
        wide = slots[(self._reserved[slots] > self.decode_pages) & (after_step <= self.decode_pages)]
        for slot in wide.tolist():
            self._reserve(slot, self.decode_pages)
        return len(wide) > 0

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
        changed = end.depth
        if self.windows is not None:
            changed = self._publish_windows(slot, self.windows, end, max(first, int(self._first[slot])))
        ends = self._ends.get(slot, ())
        done = [(at, unit) for at, unit in ends if at <= end.depth]
        if done:
            rest = [(at, unit) for at, unit in ends if at > end.depth]
            if rest:
                self._ends[slot] = rest
            else:
                del self._ends[slot]
            for at, unit in done:
                self.keep_end(slot, end, at, unit)
        return changed, self.window_table[slot, changed : end.depth].copy()

    def publish_last(self, slot: int, end: TreeNode, num_committed: int) -> None:
        """Gives the state at the slot's last page end to the page before this page end. Called before the slot ends.

        Args:
            slot: the slot.
            end: end of the published pages.
            num_committed: number of the slot's committed tokens.
        """
        if self.states is None:
            if self.windows is not None and end.depth:
                self.keep_end(slot, end, end.depth, NO_UNIT)
            return
        self._before[slot] = NO_UNIT  # no later call of drop_row()
        if self._max_drafts and (self._kept[slot] == NO_UNIT or self._kept_from[slot] <= num_committed):
            self._keep_newest(slot, num_committed)
        kept = self._kept, self._kept_end, self._kept_from
        for units, ends, since in (kept, (self._older, self._older_end, self._older_from)):
            if units[slot] != NO_UNIT and 0 < ends[slot] <= end.depth and since[slot] <= num_committed:
                unit, units[slot] = int(units[slot]), NO_UNIT
                self.keep_end(slot, end, int(ends[slot]), unit)
                return

    def keep_end(self, slot: int, end: TreeNode, at: int, unit: int) -> None:
        """Gives a slot's state to the page before the page end `at`, and marks the units of the window before it as needed.

        Args:
            slot: the slot.
            end: node of the published pages, at the page end or after it.
            at: number of pages.
            unit: state at the page end; NO_UNIT without states.
        """
        node, page = page_of(end, at - 1)
        if self.states is not None and unit != NO_UNIT:
            is_current = unit == self._current[slot] and not self._current_is_cached[slot]
            is_before = unit == self._before[slot]  # drop_row() may make it the current state again
            if node.units[self.states.index][page] == NO_UNIT:
                self.states.own(unit, node, page)
                self.states.need(unit)
                if is_current or is_before:
                    self.states.pin(unit)
                    self._current_is_cached[slot] |= is_current
                if is_before:
                    self._before_is_cached[slot] = True
                    self._unpinning.append(unit)
            elif is_before:
                self._leaving.append(np.array([unit], dtype=np.int32))
            elif not is_current:
                self.states.free(np.array([unit], dtype=np.int32))
        self.note_end(end, at)

    def note_end(self, end: TreeNode, at: int) -> None:
        """Marks the window units before the page end `at` as needed, and reports the page end to the prefix index.

        `end` is a node at the page end or after it.
        """
        if self.windows is not None:
            for node, page, _ in _backwards(end, self._first_page(at), at):
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
            units += [(index, int(node.units[index][page])) for node, page, _ in _backwards(end, self._first_page(at), at)]
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
        if self.windows is not None:
            own = self.window_table[slot, num_shared:num_pages]
            found[self.windows.index] = own[own != NO_UNIT].tolist()
        if self.states is not None:
            units = {unit for _, unit in self._ends.get(slot, ())}
            units |= {int(column[slot]) for column in (self._kept, self._older, self._replayed)}
            units |= set() if self._current_is_cached[slot] else {int(self._current[slot])}
            found[self.states.index] = sorted(units - {NO_UNIT})
        return found

    def leaving_units(self) -> list[int]:
        """Returns the states that no slot has any more and that the next begin_plan() frees."""
        return [unit for units in self._leaving for unit in units.tolist()]

    # Details

    def _first_page(self, end: int) -> int:
        """Returns the first page that the token after the page end `end` attends to in windowed layers."""
        return max((end * self._page_size - self._window + 1) // self._page_size, 0) if self.windows is not None else 0

    def _first_pages(self, ends: I64) -> I64:
        """Returns _first_page() of each page end, int64[n]."""
        first: I64 = np.maximum((ends * self._page_size - self._window + 1) // self._page_size, 0)
        return first

    def _first_needed(self, slot: int, end: int) -> int:
        """Returns the first page that the slot needs after the page end `end` or after one of its unpublished page ends."""
        return min([self._first_page(end), *(self._first_page(at) for at, _ in self._ends.get(slot, ()))])

    def _reserve(self, slot: int, count: int) -> None:
        self.num_reserved += count - int(self._reserved[slot])
        self._reserved[slot] = count

    def _leave(self, slot: int, first: int, num_shared: int) -> None:
        """Gives up the slot's window units before page `first`: unpins the units that the tree owns, and frees the others."""
        begin = int(self._first[slot])
        if self.windows is None or first <= begin:
            return
        units = self.window_table[slot, begin:first]
        shared = max(min(num_shared, first) - begin, 0)
        for unit in units[:shared][units[:shared] != NO_UNIT].tolist():
            self.windows.unpin(unit)
        own = units[shared:]
        self.windows.free(own[own != NO_UNIT].copy())
        units[:] = NO_UNIT
        self._first[slot] = first

    def _ends_inside(self, slot: int, start: int, count: int, target: int) -> list[int]:
        """Returns the page ends inside a chunk at which units are kept in any case, rising."""
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

    def _has_cut(self, slot: int) -> bool:
        """Returns whether the slot has an unpublished state that is not its current one."""
        return any(unit != self._current[slot] for _, unit in self._ends.get(slot, ()))

    def _leave_state(self, slot: int, unit: int) -> None:
        """Makes begin_plan() of the next step free or unpin a slot's current state, which this step reads."""
        if unit == NO_UNIT or any(unit == other for _, other in self._ends.get(slot, ())):
            return
        if self._current_is_cached[slot]:
            self._unpinning.append(unit)
        else:
            self._leaving.append(np.array([unit], dtype=np.int32))

    def _replay(self, states: UnitPool, slots: I64, at: I64, starts: I64, before: I64, cuts: I32, at_cut: I32) -> None:
        """Allocates a unit for each row that may replay tokens up to a page end. Sets its elements of `cuts` and `at_cut`.

        A slot has at most four states. No unit is allocated if the slot has two states at page ends, and neither is `before`.
        """
        ends = at // self._page_size + 1
        has_unit = (self._older[slots] == NO_UNIT) | (self._kept[slots] == before)
        rows = np.flatnonzero((ends * self._page_size <= starts) & has_unit) if self._keeps_ends else _NO_ROWS
        if len(rows):
            at_cut[rows] = states.alloc(len(rows))
            cuts[rows] = (ends * self._page_size - at)[rows]
            self._replayed[slots[rows]], self._replayed_end[slots[rows]] = at_cut[rows], ends[rows]

    def _settle_replayed(self, slot: int) -> None:
        """Keeps the state that the slot's newest row may have stored at a page end. Frees the unit if the row did not reach it.

        Called when the next row is planned. The first position of the newest row is then known.
        """
        unit = int(self._replayed[slot])
        if unit == NO_UNIT:
            return
        assert self.states is not None
        self._replayed[slot] = NO_UNIT
        start = int(self._at[slot]) - (self._drafts[slot] == 0)
        if self._replayed_end[slot] * self._page_size > start:
            self.states.free(np.array([unit], dtype=np.int32))
        else:
            self._keep(slot, unit, int(self._replayed_end[slot]), start + 1)

    def _keep_newest(self, slot: int, num_committed: int) -> None:
        """Keeps the newest state at a page end of a slot that ends: the current state, or the one that was replayed last."""
        self._free_older(slot)
        self._settle_replayed(slot)
        at, unit = int(self._at[slot]), int(self._current[slot])
        ends = [each for _, each in self._ends.get(slot, ())]
        if unit == NO_UNIT or self._current_is_cached[slot] or unit in ends or at % self._page_size or not self._keeps_ends:
            return
        since = at + (self._drafts[slot] > 0)
        if since <= num_committed:
            self._keep(slot, unit, at // self._page_size, since)
            self._current[slot] = NO_UNIT

    def _keep(self, slot: int, unit: int, end: int, since: int) -> None:
        """Makes a state at a page end the slot's kept state.

        Args:
            slot: the slot.
            unit: the state.
            end: number of pages.
            since: number of committed tokens of the slot from which on a committed step has computed the state.
        """
        if self._older[slot] == NO_UNIT:
            self._older[slot], self._older_end[slot] = self._kept[slot], self._kept_end[slot]
            self._older_from[slot] = self._kept_from[slot]
        elif self._kept[slot] != NO_UNIT:  # the older state is committed, and the kept state is replaced before its commit
            assert self.states is not None
            self.states.free(self._kept[slot : slot + 1].astype(np.int32))
        self._kept[slot], self._kept_end[slot], self._kept_from[slot] = unit, end, since

    def _free_older(self, slot: int) -> None:
        """Frees the kept state that a newer one has replaced. The step that computed the newer one is committed."""
        if self.states is not None and self._older[slot] != NO_UNIT:
            self.states.free(self._older[slot : slot + 1].astype(np.int32))
            self._older[slot] = NO_UNIT

    def _pass_end(self, slot: int, position: int, at_end: bool) -> None:
        """Leaves the current state of a decode row. At a page end, this state becomes the kept state."""
        unit = int(self._current[slot])
        unpublished = any(unit == other for _, other in self._ends.get(slot, ()))
        if not at_end or self._current_is_cached[slot] or unpublished or unit == NO_UNIT:
            self._leave_state(slot, unit)
            return
        self._keep(slot, unit, position // self._page_size, position + (self._drafts[slot] > 0))

    def _publish_windows(self, slot: int, windows: UnitPool, end: TreeNode, first: int) -> int:
        """Publishes the window units from page `first` on. Returns the first page whose unit has changed."""
        changed = end.depth
        for node, page, at in _backwards(end, first):
            mine, theirs = int(self.window_table[slot, at]), int(node.units[windows.index][page])
            if mine == NO_UNIT:
                continue
            if theirs == NO_UNIT:
                windows.own(mine, node, page)
                windows.pin(mine)
            else:
                windows.pin(theirs)
                windows.free(np.array([mine], dtype=np.int32))
                self.window_table[slot, at] = theirs
                changed = min(changed, at)
        return changed


def _last_end(fits: NDArray[np.bool_]) -> int:
    """Returns the number of pages up to the last page end that fits, 0 if none does."""
    found = np.flatnonzero(fits)
    return int(found[-1]) + 1 if len(found) else 0


def _along(path: Sequence[tuple[TreeNode, int]], index: int) -> I32:
    """Returns the units of a group along a path."""
    return np.concatenate([node.units[index][:count] for node, count in path])


def _backwards(end: TreeNode, first: int, stop: int | None = None) -> list[tuple[TreeNode, int, int]]:
    """Returns (node, index of the page in the node, index in the sequence) of the pages from `first` to `stop`, last first.

    Args:
        end: node at the end of the pages, or after it.
        first: first page.
        stop: number of pages; None for all pages up to the end of the node.
    """
    found = []
    node = end
    last = end.depth if stop is None else stop
    while node.parent is not None and node.depth > first:
        begin = node.parent.depth
        found += [(node, at - begin, at) for at in range(min(node.depth, last) - 1, max(begin, first) - 1, -1)]
        node = node.parent
    return found


def page_of(end: TreeNode, page: int) -> tuple[TreeNode, int]:
    """Returns the node that has page `page` of the sequence that ends with the node `end`, and the page's index in the node."""
    node = end
    while node.parent is not None and node.parent.depth > page:
        node = node.parent
    assert node.parent is not None and node.parent.depth <= page < node.depth, "the page is on the path"
    return node, page - node.parent.depth
