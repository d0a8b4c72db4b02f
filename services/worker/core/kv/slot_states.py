"""The states of slots, for recurrent layers.

    kept ── the state at the last page end that the row has passed, for the next prefix hit
    current ── the state after the last planned token, which the next step reads
    next ── the unit that the next step writes; it becomes the current one when the step is planned
    replayed ── the state at a page end between accepted draft tokens, which the newest step may store

The position of a state is the number of the sequence's first tokens that it covers.

A step never writes a unit that it reads. A unit that a step reads is freed when the next step is planned. One forward stream
orders all steps, so that a later step may then write it.

If a decode row has draft tokens, its next state is the state before the row's first token, because draft tokens may be rejected.
The next row of the slot first replays the accepted tokens. The position of the current state is known when a row is planned,
because the step before the previous one is committed then:

    position of the current state      first position of the new row
    ├── accepted tokens of the previous row, replayed ──┤── own token and draft tokens ──
                  └ page end: replayed

CacheUnits is the owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.kv.tree_node import TreeNode
from rootstock_llm.services.worker.core.kv.unit_pool import NO_UNIT, UnitPool

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
PlannedEnds = Mapping[int, Sequence[tuple[int, int]]]
"""By slot: the page ends of planned chunks that are not published yet, rising, with their states."""

_NONE: I32 = np.empty(0, dtype=np.int32)
_NO_ROWS: I64 = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class RowStates:
    """The state units of one extend row, see BatchPlan."""

    before: int
    after: int
    start: int  # position of `before`
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


class SlotStates:
    """The states of recurrent layers, for all slots."""

    def __init__(
        self, pool: UnitPool, page_size: int, num_slots: int, has_drafts: bool, keeps_ends: bool, ends: PlannedEnds, drafts: I64
    ) -> None:
        """Starts without states.

        Args:
            pool: units of the STATE group.
            page_size: tokens of a page.
            num_slots: number of slots.
            has_drafts: whether decode rows may have draft tokens.
            keeps_ends: whether slots keep the states at page ends for hits.
            ends: the planned page ends, which CacheUnits changes.
            drafts: int64[slots], draft tokens of each slot's newest row, which CacheUnits changes after a row is planned.
        """
        self._pool, self._page_size, self._has_drafts, self._keeps_ends = pool, page_size, has_drafts, keeps_ends
        self._ends, self._drafts = ends, drafts

        def column(value: int) -> I64:
            return np.full(num_slots, value, dtype=np.int64)

        def flags() -> NDArray[np.bool_]:
            return np.zeros(num_slots, dtype=np.bool_)

        self._current = column(NO_UNIT)  # state after the last planned token; NO_UNIT: no token is planned
        self._current_is_cached = flags()  # whether a cached page owns the current state, which is pinned
        self.kept, self.kept_end = column(NO_UNIT), column(0)  # state at a page end that decoding has passed, and the page end
        self._older, self._older_end = column(NO_UNIT), column(0)  # the previous such pair, until the new state is committed
        # Smallest numbers of committed tokens with which the steps that computed the kept and the older state are committed.
        self._kept_from, self._older_from = column(0), column(0)
        # The following columns are used if there are draft tokens. Positions count all draft tokens in flight as accepted, like
        # SlotColumns.computed; reject() corrects them.
        self._at = column(0)  # position of the current state
        self._replayed, self._replayed_end = column(NO_UNIT), column(0)  # state that the newest row may store, and its page end
        # The state that the newest row reads, its position, and whether a cached page owns it, for drop_row(). NO_UNIT after an
        # extend row.
        self._before, self._before_at, self._before_is_cached = column(NO_UNIT), column(0), flags()
        self._leaving: list[I32] = []  # states that the newest plan reads, and no later plan
        self._unpinning: list[int] = []  # cached states that the newest plan reads, and no later plan

    # Slots

    def begin(self, slot: int, hit: TreeNode) -> None:
        """Pins the state at the end of the slot's hit. This state becomes the current state."""
        self._current[slot], self._current_is_cached[slot] = NO_UNIT, False
        self._at[slot], self._before[slot] = hit.depth * self._page_size, NO_UNIT
        if hit.depth:
            unit = int(hit.units[self._pool.index][-1])
            assert unit != NO_UNIT, "a hit ends at a page with a state"
            self._pool.pin(unit)
            self._current[slot], self._current_is_cached[slot] = unit, True

    def end(self, slot: int, unpublished: Sequence[int]) -> None:
        """Frees and unpins all states of a slot. `unpublished` are its states at planned page ends that no page owns yet."""
        units = list(unpublished)
        unit = int(self._current[slot])
        if self._current_is_cached[slot]:
            self._pool.unpin(unit)
        elif unit != NO_UNIT and unit not in units:
            units.append(unit)
        units += [int(column[slot]) for column in (self.kept, self._older, self._replayed) if column[slot] != NO_UNIT]
        self._current[slot] = self.kept[slot] = self._older[slot] = self._replayed[slot] = NO_UNIT
        self._current_is_cached[slot] = False
        self._pool.free(np.array(units, dtype=np.int32))

    # Steps

    def begin_plan(self) -> None:
        """Frees or unpins the states that the previous plan read. Called before the rows of a step are planned."""
        for units in self._leaving:
            self._pool.free(units)
        self._leaving.clear()
        for unit in self._unpinning:
            self._pool.unpin(unit)
        self._unpinning.clear()

    def num_cuts(self, slot: int) -> int:
        """Returns the number of page ends, 0 or 1, inside the slot's next chunk at which the step can store the state."""
        has_cut = any(unit != self._current[slot] for _, unit in self._ends.get(slot, ()))
        return 0 if self.kept[slot] != NO_UNIT or has_cut else 1

    def extend(self, slot: int, start: int, count: int, cut: int) -> RowStates:
        """Allocates the states of a chunk of `count` tokens.

        Args:
            slot: the slot.
            start: first position of the chunk.
            count: tokens of the chunk.
            cut: number of the chunk's first tokens after which the state is stored too; 0: it is not.
        """
        self._free_older(slot)
        self._settle_replayed(slot)
        before, after = int(self._current[slot]), int(self._pool.alloc(1)[0])
        at_cut = int(self._pool.alloc(1)[0]) if cut else NO_UNIT
        self._leave(slot, before)
        begin = int(self._at[slot]) if self._has_drafts else start
        self._current[slot], self._current_is_cached[slot] = after, False
        self._at[slot], self._before[slot] = start + count, NO_UNIT
        return RowStates(before, after, begin, cut, at_cut)

    def decode(self, slots: I64, starts: I64, drafts: I32) -> DecodeStates:
        """Allocates the states of decode rows. Arguments: see CacheUnits.decode()."""
        older = self._older[slots]
        if (older != NO_UNIT).any():
            self._pool.free(older[older != NO_UNIT].astype(np.int32))
            self._older[slots] = NO_UNIT
        at = starts
        if self._has_drafts:
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
        after = self._pool.alloc(len(slots)).astype(np.int64)
        self._current[slots], self._current_is_cached[slots] = after, False
        cuts, at_cut = np.zeros(len(slots), dtype=np.int32), np.full(len(slots), NO_UNIT, dtype=np.int32)
        if self._has_drafts:
            self._replay(slots, at, starts, before, cuts, at_cut)
            self._before[slots], self._before_at[slots], self._before_is_cached[slots] = before, at, cached
            self._at[slots] = starts + (drafts == 0)
        return DecodeStates(before.astype(np.int32), after.astype(np.int32), cuts, at_cut, at.astype(np.int32))

    def reject(self, slots: I32, rejected: I64) -> None:
        """Corrects the positions of states. Arguments: see CacheUnits.reject()."""
        self._at[slots] -= rejected

    def drop_row(self, slot: int, num_committed: int) -> bool:
        """Undoes the states of a slot's decode row in flight, see CacheUnits.drop_row(). Returns whether the row is undone."""
        beyond = bool(self._at[slot] > num_committed)
        if self._replayed[slot] != NO_UNIT and (beyond or self._replayed_end[slot] * self._page_size > num_committed):
            self._pool.free(self._replayed[slot : slot + 1].astype(np.int32))
            self._replayed[slot] = NO_UNIT
        if not beyond:
            return False
        before, cached = int(self._before[slot]), bool(self._before_is_cached[slot])
        assert before != NO_UNIT and self._before_at[slot] <= num_committed, "a step in flight has read a committed state"
        self._pool.free(self._current[slot : slot + 1].astype(np.int32))
        if self.kept[slot] == before:
            self.kept[slot], self.kept_end[slot] = self._older[slot], self._older_end[slot]
            self._kept_from[slot], self._older[slot] = self._older_from[slot], NO_UNIT
        elif cached:
            self._unpinning.remove(before)
        else:
            self._leaving = [units[units != before] for units in self._leaving]
        self._current[slot], self._current_is_cached[slot] = before, cached
        self._at[slot], self._before[slot] = self._before_at[slot], NO_UNIT
        return True

    # Page ends

    def give(self, slot: int, unit: int, node: TreeNode, page: int) -> None:
        """Gives a slot's state to a page of the tree. If the page has a state already, the slot's state is freed.

        Args:
            slot: the slot.
            unit: the state.
            node: node of the page.
            page: index of the page in the node.
        """
        is_current = unit == self._current[slot] and not self._current_is_cached[slot]
        is_before = unit == self._before[slot]  # drop_row() may make it the current state again
        if node.units[self._pool.index][page] == NO_UNIT:
            self._pool.own(unit, node, page)
            self._pool.need(unit)
            if is_current or is_before:
                self._pool.pin(unit)
                self._current_is_cached[slot] |= is_current
            if is_before:
                self._before_is_cached[slot] = True
                self._unpinning.append(unit)
        elif is_before:
            self._leaving.append(np.array([unit], dtype=np.int32))
        elif not is_current:
            self._pool.free(np.array([unit], dtype=np.int32))

    def take_last(self, slot: int, num_pages: int, num_committed: int) -> tuple[int, int]:
        """Takes the state at the last page end of a slot that ends, so that the caller can give it to a page.

        Args:
            slot: the slot.
            num_pages: number of the slot's published pages.
            num_committed: number of the slot's committed tokens.

        Returns:
            The page end and the state; (0, NO_UNIT) if the slot has no committed state at a page end.
        """
        self._before[slot] = NO_UNIT  # no later call of drop_row()
        if self._has_drafts and (self.kept[slot] == NO_UNIT or self._kept_from[slot] <= num_committed):
            self._keep_newest(slot, num_committed)
        kept = self.kept, self.kept_end, self._kept_from
        for units, ends, since in (kept, (self._older, self._older_end, self._older_from)):
            if units[slot] != NO_UNIT and 0 < ends[slot] <= num_pages and since[slot] <= num_committed:
                unit, units[slot] = int(units[slot]), NO_UNIT
                return int(ends[slot]), unit
        return 0, NO_UNIT

    # Checks

    def own_units(self, slot: int) -> list[int]:
        """Returns the states that belong to a slot, rising."""
        units = {unit for _, unit in self._ends.get(slot, ())}
        units |= {int(column[slot]) for column in (self.kept, self._older, self._replayed)}
        units |= set() if self._current_is_cached[slot] else {int(self._current[slot])}
        return sorted(units - {NO_UNIT})

    def leaving_units(self) -> list[int]:
        """Returns the states that no slot uses and that the next begin_plan() frees."""
        return [unit for units in self._leaving for unit in units.tolist()]

    # Details

    def _is_planned(self, slot: int, unit: int) -> bool:
        """Returns whether the unit is the state at a planned page end of the slot."""
        return any(unit == other for _, other in self._ends.get(slot, ()))

    def _leave(self, slot: int, unit: int) -> None:
        """Makes begin_plan() of the next step free or unpin a slot's current state, which this step reads."""
        if unit == NO_UNIT or self._is_planned(slot, unit):
            return
        if self._current_is_cached[slot]:
            self._unpinning.append(unit)
        else:
            self._leaving.append(np.array([unit], dtype=np.int32))

    def _replay(self, slots: I64, at: I64, starts: I64, before: I64, cuts: I32, at_cut: I32) -> None:
        """Allocates a unit for each row that may replay tokens up to a page end. Sets its elements of `cuts` and `at_cut`.

        A slot has at most four states. No unit is allocated if the slot has two states at page ends, and neither is `before`.
        """
        ends = at // self._page_size + 1
        has_unit = (self._older[slots] == NO_UNIT) | (self.kept[slots] == before)
        rows = np.flatnonzero((ends * self._page_size <= starts) & has_unit) if self._keeps_ends else _NO_ROWS
        if len(rows):
            at_cut[rows] = self._pool.alloc(len(rows))
            cuts[rows] = (ends * self._page_size - at)[rows]
            self._replayed[slots[rows]], self._replayed_end[slots[rows]] = at_cut[rows], ends[rows]

    def _settle_replayed(self, slot: int) -> None:
        """Keeps the state that the slot's newest row may have stored at a page end. Frees the unit if the row did not reach it.

        Called when the next row is planned. The first position of the newest row is then known.
        """
        unit = int(self._replayed[slot])
        if unit == NO_UNIT:
            return
        self._replayed[slot] = NO_UNIT
        start = int(self._at[slot]) - (self._drafts[slot] == 0)
        if self._replayed_end[slot] * self._page_size > start:
            self._pool.free(np.array([unit], dtype=np.int32))
        else:
            self._keep(slot, unit, int(self._replayed_end[slot]), start + 1)

    def _keep_newest(self, slot: int, num_committed: int) -> None:
        """Keeps the newest state at a page end of a slot that ends: the current state, or the one that was replayed last."""
        self._free_older(slot)
        self._settle_replayed(slot)
        at, unit = int(self._at[slot]), int(self._current[slot])
        if unit == NO_UNIT or self._current_is_cached[slot] or self._is_planned(slot, unit):
            return
        since = at + (self._drafts[slot] > 0)
        if self._keeps_ends and at % self._page_size == 0 and since <= num_committed:
            self._keep(slot, unit, at // self._page_size, since)
            self._current[slot] = NO_UNIT

    def _keep(self, slot: int, unit: int, end: int, since: int) -> None:
        """Makes a state at a page end the slot's kept state.

        Args:
            slot: the slot.
            unit: the state.
            end: number of pages.
            since: smallest number of committed tokens of the slot with which the step that computed the state is committed.
        """
        if self._older[slot] == NO_UNIT:
            self._older[slot], self._older_end[slot] = self.kept[slot], self.kept_end[slot]
            self._older_from[slot] = self._kept_from[slot]
        elif self.kept[slot] != NO_UNIT:  # the older state is committed, and the kept state is replaced before its commit
            self._pool.free(self.kept[slot : slot + 1].astype(np.int32))
        self.kept[slot], self.kept_end[slot], self._kept_from[slot] = unit, end, since

    def _free_older(self, slot: int) -> None:
        """Frees the kept state that a newer one has replaced. The step that computed the newer one is committed."""
        if self._older[slot] != NO_UNIT:
            self._pool.free(self._older[slot : slot + 1].astype(np.int32))
            self._older[slot] = NO_UNIT

    def _pass_end(self, slot: int, position: int, at_end: bool) -> None:
        """Stops using the current state of a decode row. At a page end, this state becomes the kept state."""
        unit = int(self._current[slot])
        if not at_end or self._current_is_cached[slot] or self._is_planned(slot, unit) or unit == NO_UNIT:
            self._leave(slot, unit)
            return
        self._keep(slot, unit, position // self._page_size, position + (self._drafts[slot] > 0))
