"""The units of one cache group. Cached units without a pin are evicted by recency.

Each unit is free, in a slot, owned by a cached page, or quarantined while an operation writes it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.kv.tree_node import TreeNode

I32 = NDArray[np.int32]
NO_UNIT = -1


class UnitPool:
    """The units of one cache group. CacheUnits is the owner."""

    def __init__(
        self, num_units: int, index: int, on_lost: Callable[[TreeNode], None], on_disowned: Callable[[int, int], None]
    ) -> None:
        """Starts with all units free.

        Args:
            num_units: number of units.
            index: index of the group, and of its units in TreeNode.units.
            on_lost: called with a node that stays in the tree and has lost a unit.
            on_disowned: called with (index of the group, unit) when a page has lost its unit, or has left the tree with it.
        """
        self.num_units, self.index = num_units, index
        self._on_lost, self._on_disowned = on_lost, on_disowned
        self._stack: I32 = np.arange(num_units, dtype=np.int32)[::-1].copy()
        self.num_free = num_units
        self.num_owned = 0  # units of cached pages
        self.quarantined: set[int] = set()  # units that operations write
        self.num_lent = 0  # quarantined units, plus the pins of operations, waiting requests and reservations; see UnitPins
        self.evicted_total = 0
        self.missed_pages_total = 0  # see CacheUnits.count_misses()
        self._owners: list[TreeNode | None] = [None] * num_units
        self._pins: I32 = np.zeros(num_units, dtype=np.int32)
        self._needed: NDArray[np.bool_] = np.zeros(num_units, dtype=np.bool_)
        # Owned units without a pin, least recently used first. When the first unit is to be evicted and a session holds its node,
        # the unit moves to the second dictionary.
        self._order: dict[int, None] = {}
        self._session_order: dict[int, None] = {}

    @property
    def num_in_slots(self) -> int:
        """Number of units that belong to slots."""
        return self.num_units - self.num_free - self.num_owned - len(self.quarantined)

    @property
    def num_evictable(self) -> int:
        """Number of units of cached pages without a pin."""
        return len(self._order) + len(self._session_order)

    def alloc(self, count: int) -> I32:
        """Allocates units for a slot or an operation, as int32[count]. At least `count` units must be free or without a pin."""
        while self.num_free < count:
            self._evict()
        self.num_free -= count
        return self._stack[self.num_free : self.num_free + count][::-1].copy()

    def free(self, units: I32) -> None:
        """Frees units that no page owns and no operation writes."""
        end = self.num_free + len(units)
        assert end <= self.num_units, "a unit was freed twice"
        self._stack[self.num_free : end] = units
        self.num_free = end

    def free_units(self) -> I32:
        """Returns a copy of the free units as int32[num_free], for checks."""
        return self._stack[: self.num_free].copy()

    def quarantine(self, count: int) -> I32:
        """Allocates units that an operation will write, as int32[count]. The condition of alloc() applies."""
        units = self.alloc(count)
        self.quarantined.update(units.tolist())
        return units

    def leave_quarantine(self, units: I32) -> None:
        """Ends the quarantine of units. The caller then frees each unit or gives it to a page."""
        assert self.quarantined.issuperset(units.tolist()), "only quarantined units leave the quarantine"
        self.quarantined.difference_update(units.tolist())

    def own(self, unit: int, node: TreeNode, page: int) -> None:
        """Gives an allocated unit that no page owns to a page of the tree. `page` is the page's index in the node."""
        assert self._owners[unit] is None and node.units[self.index][page] == NO_UNIT, "a page has at most one unit"
        self._owners[unit], node.units[self.index][page] = node, unit
        self.num_owned += 1
        self._order[unit] = None

    def moved(self, unit: int, node: TreeNode) -> None:
        """Records that a split has moved the unit's page to another node."""
        self._owners[unit] = node

    def disown(self, unit: int) -> None:
        """Frees the unit of a page that leaves the tree or loses its unit. The unit has no pin."""
        assert not self._pins[unit], "a page leaves the tree with a pinned unit"
        self._owners[unit], self._needed[unit] = None, False
        self._order.pop(unit, None)
        self._session_order.pop(unit, None)
        self.num_owned -= 1
        self.free(np.array([unit], dtype=np.int32))
        self._on_disowned(self.index, unit)

    def pin(self, unit: int) -> None:
        """Protects an owned unit from eviction, because a request or an operation reads it."""
        assert self._owners[unit] is not None, "a page owns the pinned unit"
        if not self._pins[unit]:
            self._order.pop(unit, None)
            self._session_order.pop(unit, None)
        self._pins[unit] += 1

    def unpin(self, unit: int) -> None:
        """Undoes one pin(). The unit is then the most recently used one. If no hit can need it, it is freed."""
        assert self._pins[unit] > 0, "unpin without pin"
        self._pins[unit] -= 1
        if self._pins[unit]:
            return
        if self._needed[unit]:
            self._order[unit] = None
        else:
            self._drop_from_page(unit)

    def need(self, unit: int) -> None:
        """Marks an owned unit as part of a possible prefix hit, so that it stays cached after its last pin."""
        self._needed[unit] = True

    def are_needed(self, units: I32) -> NDArray[np.bool_]:
        """Returns for each element of int32[n] whether need() has marked this unit; False for NO_UNIT."""
        found: NDArray[np.bool_] = (units != NO_UNIT) & self._needed[units]
        return found

    def owned(self) -> list[tuple[int, TreeNode]]:
        """Returns the owned units with their nodes, for checks."""
        return [(unit, node) for unit, node in enumerate(self._owners) if node is not None]

    def _evict(self) -> None:
        """Frees the least recently used unit without a pin. Units of pages that sessions hold are evicted last."""
        while self._order:
            unit = next(iter(self._order))
            node = self._owners[unit]
            assert node is not None, "the order has only owned units"
            if not node.holds:
                break
            del self._order[unit]
            self._session_order[unit] = None
        else:
            assert self._session_order, "admission reserves the units of all slots, so that some unit can be evicted"
            first = next(iter(self._session_order))
            unit = next((each for each in self._session_order if not self._is_of_session(each)), first)
        self.evicted_total += 1
        self._drop_from_page(unit)

    def _is_of_session(self, unit: int) -> bool:
        node = self._owners[unit]
        return node is not None and node.holds > 0

    def _drop_from_page(self, unit: int) -> None:
        """Frees an unpinned unit whose page stays cached."""
        node = self._owners[unit]
        assert node is not None, "a page owns the unit"
        units = node.units[self.index]
        units[units == unit] = NO_UNIT
        self.disown(unit)
        self._on_lost(node)
