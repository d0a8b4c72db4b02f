"""Units of cache groups that are used outside of the slots: by page operations, waiting requests and KV reservations.

An operation that writes a unit quarantines it. An operation, a waiting request or a reservation that reads a cached unit pins it.
These units are lent: they cannot be evicted, and a running request never waits for a unit. For each group, therefore

    units reserved for slots + lent units <= all units

holds at any time. A unit that a slot and an operation pin counts twice. KVMemory is the owner.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.kv.cache_units import CacheUnits
from rootstock_llm.services.worker.core.kv.tree_node import TreeNode, page_of
from rootstock_llm.services.worker.core.kv.unit_pool import NO_UNIT

I32 = NDArray[np.int32]


class UnitPins:
    """The lent units of all groups. Groups are named by their index."""

    def __init__(self, units: CacheUnits) -> None:
        self._units = units

    def num_lendable(self, index: int) -> int:
        """Returns the number of units that may be lent now. 0 while a request waits only for lent units."""
        return 0 if self._units.is_short else self._num_unreserved(index)

    def quarantine(self, index: int, count: int) -> I32:
        """Allocates units that an operation will write, as int32[count]. `count` is at most num_lendable()."""
        assert 0 < count <= self._num_unreserved(index), "the caller has counted the units that may be lent"
        pool = self._units.pools[index]
        pool.num_lent += count
        return pool.quarantine(count)

    def free_quarantined(self, index: int, units: I32) -> None:
        """Frees quarantined units whose operation has not written them."""
        pool = self._units.pools[index]
        pool.leave_quarantine(units)
        pool.free(units)
        pool.num_lent -= len(units)

    def publish_quarantined(self, index: int, unit: int, end: TreeNode, page: int) -> None:
        """Gives a written unit to a page of the tree, which keeps it for hits. Frees the unit if the page has one already.

        Args:
            index: index of the group.
            unit: a quarantined unit.
            end: a node at the page or after it.
            page: index of the page in the sequence.
        """
        pool, written = self._units.pools[index], np.array([unit], dtype=np.int32)
        pool.leave_quarantine(written)
        pool.num_lent -= 1
        node, at = page_of(end, page)
        if (present := int(node.units[index][at])) != NO_UNIT:
            pool.free(written)
            unit = present
        else:
            pool.own(unit, node, at)
        pool.need(unit)

    def pin(self, index: int, units: Sequence[int]) -> None:
        """Protects cached units from eviction until unpin(). There are at most num_lendable() units."""
        assert len(units) <= self._num_unreserved(index), "the caller has counted the units that may be lent"
        pool = self._units.pools[index]
        for unit in units:
            pool.pin(unit)
        pool.num_lent += len(units)

    def unpin(self, index: int, units: Sequence[int]) -> None:
        pool = self._units.pools[index]
        for unit in reversed(units):
            pool.unpin(unit)
        pool.num_lent -= len(units)

    def pin_end(self, end: TreeNode, at: int) -> list[list[int]]:
        """Pins the units that the token after the page end `at` reads, if they are cached and may be lent.

        Args:
            end: a node at the page end or after it.
            at: number of pages, at least 1.

        Returns:
            The pinned units of each group, in the order of the prompt. Empty if a unit is missing or may not be lent.
        """
        units = self._units
        found = [[units.unit_of(index, end, page) for page in units.read_at(index, at)] for index in range(len(units.pools))]
        if any(NO_UNIT in each or len(each) > self._num_unreserved(index) for index, each in enumerate(found)):
            return []
        for index, each in enumerate(found):
            self.pin(index, each)
        return found

    def violations(self) -> list[str]:
        """Returns one sentence per broken invariant, for checks."""
        return [
            f"group {pool.index} has fewer units than {pool.num_lent} lent and {self._units.num_reserved_of(pool)} reserved units"
            for pool in self._units.pools
            if pool.num_lent < len(pool.quarantined) or pool.num_lent + self._units.num_reserved_of(pool) > pool.num_units
        ]

    def _num_unreserved(self, index: int) -> int:
        pool = self._units.pools[index]
        return pool.num_units - self._units.num_reserved_of(pool) - pool.num_lent
