"""The units of cache groups below the device, where each unit takes the space of whole pages: its parts.

A hit ends at a page end at which every group has the units that the next token reads (core/kv/cache_units.py). Tiers therefore
copy pages together with the units of such page ends. The host tier, the storage and remote workers store parts like pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rootstock_llm.services.worker.core.kv.cache_units import CacheUnits
from rootstock_llm.services.worker.core.kv.tree_node import TreeNode
from rootstock_llm.services.worker.core.tiers.page_keys import PageKeys


@dataclass(frozen=True, slots=True)
class StoredUnit:
    """The unit of one page in one cache group, as it is stored outside of the device."""

    index: int  # index of the cache group
    page: int  # index of the page in the prompt
    keys: tuple[bytes, ...]  # keys of the parts


@dataclass(frozen=True, slots=True)
class StoredEnd:
    """A page end at which a hit can end while lower tiers have its units."""

    end: int  # number of pages
    # Page key of its last page, and the key of the last part of the first and the last unit of each group. The other parts are
    # copied together with these parts.
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PathCopy:
    """The pages and units of a path that are copied to lower tiers, at most the share of one prompt."""

    num_pages: int  # number of the path's first pages
    units: tuple[StoredUnit, ...]  # units of the page ends, beginning with the last page end
    keys: tuple[bytes, ...]  # keys of all pages and parts: the parts of a page's units follow the page
    ends: tuple[StoredEnd, ...] = ()  # page ends with these units, the last one first


class StoredUnits:
    """Makes the keys of parts, for one model."""

    def __init__(self, keys: PageKeys, num_parts: Sequence[int]) -> None:
        """Prepares the keys.

        Args:
            keys: maker of page keys.
            num_parts: number of parts of a unit, by group; empty without cache groups.
        """
        self._keys, self.num_parts = keys, tuple(num_parts)

    def of_page(self, index: int, page: int, page_key: bytes) -> StoredUnit:
        """Returns the unit of a page in the group with this index."""
        return StoredUnit(index, page, self._keys.parts(page_key, 1 + index, self.num_parts[index]))

    def first_part(self, index: int, page_key: bytes) -> bytes:
        """Returns the key of the first part of a page's unit."""
        return self._keys.parts(page_key, 1 + index, 1)[0]

    def num_rows(self, units: CacheUnits, end: int) -> int:
        """Returns the number of parts of all units that the token after the page end `end` reads."""
        return sum(count * len(units.read_at(index, end)) for index, count in enumerate(self.num_parts))

    def path_copy(self, units: CacheUnits, path: Sequence[TreeNode], page_keys: Sequence[bytes], most: int) -> PathCopy:
        """Chooses the pages and units of a path that are copied: the last page end that fits, and then earlier page ends.

        Pages after the last page end are left out, because no hit can reach them.

        Args:
            units: units of the tree.
            path: nodes from below the root to the end of the path.
            page_keys: page keys of the whole path.
            most: largest number of pages and parts together.
        """
        num_pages = used = 0
        chosen: dict[tuple[int, int], StoredUnit] = {}
        ends: list[StoredEnd] = []
        for end in reversed(units.kept_ends([(node, len(node.pages)) for node in path])):
            more = [
                (index, page)
                for index in range(len(self.num_parts))
                for page in units.read_at(index, end)
                if (index, page) not in chosen
            ]
            size = used + sum(self.num_parts[index] for index, _ in more) + (0 if num_pages else end)
            if size > most:
                if num_pages:
                    break
                continue
            num_pages, used = num_pages or end, size
            chosen |= {(index, page): self.of_page(index, page, page_keys[page]) for index, page in more}
            outer = [(index, page) for index in range(len(self.num_parts)) for page in _first_and_last(units.read_at(index, end))]
            ends.append(StoredEnd(end, (page_keys[end - 1], *(chosen[each].keys[-1] for each in outer))))
        of_pages: dict[int, list[bytes]] = {}
        for (_, page), unit in chosen.items():
            of_pages.setdefault(page, []).extend(unit.keys)
        keys = [key for page in range(num_pages) for key in (page_keys[page], *of_pages.get(page, ()))]
        return PathCopy(num_pages, tuple(chosen.values()), tuple(keys), tuple(ends))


def _first_and_last(pages: range) -> tuple[int, ...]:
    return tuple(dict.fromkeys((pages[0], pages[-1]))) if pages else ()
