"""The page ends at which prefix hits can end, for the prefix index. Only for models with cache groups.

A hit ends at a page end at which all groups have the units that the next token reads (cache_units.py). HitEnds follows the page
ends at which units are kept, and reports each of them until one of its units is freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rootstock_llm.services.worker.core.kv.cache_events import CacheEventLog

Unit = tuple[int, int]
"""(index of the group, unit)."""


@dataclass(frozen=True, slots=True)
class HitEnd:
    """A page end at which a hit can end."""

    mark: bytes  # mark of the last block before the page end, see CacheEventLog.mark_of()
    units: tuple[Unit, ...]  # units that the next token reads


class HitEnds:
    """The page ends at which prefix hits can end, by their units. CacheUnits is the owner."""

    def __init__(self, events: CacheEventLog) -> None:
        self._events = events
        self._ends: dict[Unit, HitEnd] = {}  # by the first unit of each end, which no other end has as its first unit
        self._of_unit: dict[Unit, list[Unit]] = {}  # for each unit: keys in `_ends` of the page ends that need the unit

    def kept(self, mark: bytes, units: Sequence[Unit]) -> None:
        """Records a page end at which a hit can end. The first unit belongs to the last page before the page end."""
        key = units[0]
        if key in self._ends:
            return
        self._ends[key] = HitEnd(mark, tuple(units))
        for unit in units:
            self._of_unit.setdefault(unit, []).append(key)
        self._events.end_kept(mark)

    def freed(self, index: int, unit: int) -> None:
        """Removes the page ends that need a unit of the group with this index."""
        for key in self._of_unit.pop((index, unit), ()):
            end = self._ends.pop(key)
            self._events.end_lost(end.mark)
            for other in end.units:
                if keys := self._of_unit.get(other):
                    keys.remove(key)
                    if not keys:
                        del self._of_unit[other]

    def ends(self) -> list[HitEnd]:
        """Returns all page ends, for checks."""
        return list(self._ends.values())
