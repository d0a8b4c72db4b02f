"""The page ends up to which imports read, and the reads of units, for models with cache groups.

A hit needs all pages up to its end and the units that the next token reads there. An import therefore has one page end as its
target: the last one whose pages and units are all in the tree, in another tier or in a remote worker. It reads the missing pages
first. When they are in the tree, it reads the missing units. Imports is the owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from rootstock_llm.services.worker.core.contracts.transfers import NO_PAGES, PageOperation, Pull
from rootstock_llm.services.worker.core.kv.memory import KVMemory
from rootstock_llm.services.worker.core.kv.other_tiers import Wanted
from rootstock_llm.services.worker.core.kv.tree_node import TOKEN_BYTES, TreeNode
from rootstock_llm.services.worker.core.kv.unit_pool import NO_UNIT
from rootstock_llm.services.worker.core.tiers.host_index import HostIndex
from rootstock_llm.services.worker.core.tiers.lanes import HOST, STORAGE, Lanes, Place, RunningImport, prover_of
from rootstock_llm.services.worker.core.tiers.stored_units import StoredUnit, StoredUnits

MOST_UNIT_READS = 16  # largest number of times that a request begins to read units


class UnitReads:
    """Chooses the targets of imports, and publishes the units that arrive."""

    def __init__(self, units: StoredUnits, host: HostIndex, stored: Collection[bytes], lanes: Lanes, at_once: int) -> None:
        """Starts without imports.

        Args:
            units: maker of the keys of parts.
            host: index of the host tier.
            stored: page keys in the storage.
            lanes: the running operations.
            at_once: largest number of parts of an operation, unless a single unit has more.
        """
        self._units, self._host, self._stored, self._lanes, self._at_once = units, host, stored, lanes, at_once
        self._pinned: dict[int, list[tuple[KVMemory, int, int]]] = {}  # (memory, group's index, unit) of arrived units, by seq

    def choose_end(self, wanted: Wanted, memory: KVMemory, hit: int, cached: int, source: Place | None) -> bool:
        """Sets `end`, `hit` and `num_rows` of a request, whose page keys must be complete.

        Args:
            wanted: the request or prefetch.
            memory: the owner of the device pages.
            hit: pages of the prefix hit.
            cached: number of the prompt's first pages that the tree has.
            source: the request's remote worker, or None.

        Returns:
            Whether there is a page end after the hit up to which the request can read now.
        """
        wanted.end, wanted.hit, wanted.num_rows = 0, hit, 0
        readable = cached
        while readable < wanted.limit and self._is_page_readable(wanted, readable, source):
            readable += 1
        if source is not None and wanted.is_prefetch and wanted.limit < wanted.source_end:
            # The units at the prompt's last page end do not exist yet. Only pages are read.
            wanted.end = readable if readable > cached else 0
            return wanted.end > 0
        path = memory.tree.path(wanted.tree, wanted.tokens, min(cached, wanted.limit) * memory.page_size * TOKEN_BYTES)
        for end in range(min(readable, wanted.limit), hit, -1):
            if self._is_end(wanted, memory, path, end, source):
                missing = self.missing(wanted, memory, end)
                if not self._fits(missing, memory):
                    return False
                if all(self.place_of(unit, wanted, end, source) or unit.keys[0] in self._lanes.coming for unit in missing):
                    wanted.end = end
                    wanted.num_rows = max(end - cached, 0) + sum(len(unit.keys) for unit in missing)
                    return True
        return False

    def missing(self, wanted: Wanted, memory: KVMemory, end: int) -> list[StoredUnit]:
        """Returns the units that the token after a page end reads and that the tree lacks, by group and page."""
        units = memory.units
        assert units is not None, "the model has cache groups"
        path = memory.tree.path(wanted.tree, wanted.tokens, end * memory.page_size * TOKEN_BYTES)
        return [
            self._units.of_page(index, page, wanted.keys[page])
            for index in range(len(units.pools))
            for page in units.read_at(index, end)
            if _unit_on(path, index, page) == NO_UNIT
        ]

    def place_of(self, unit: StoredUnit, wanted: Wanted, end: int, source: Place | None) -> Place | None:
        """Returns the place from which all parts of a unit can be read, or None. `end` is the target of the request."""
        for place, cached in ((HOST, self._host), (STORAGE, self._stored)):
            if all(key in cached for key in unit.keys):
                return place
        return source if end == wanted.source_end else None

    def runs(self, wanted: Wanted, missing: Sequence[StoredUnit], source: Place | None) -> list[tuple[Place, list[StoredUnit]]]:
        """Returns the reads of the missing units: units of one group and place on consecutive pages that are not being read."""
        runs: list[tuple[Place, list[StoredUnit]]] = []
        for unit in missing:
            place = self.place_of(unit, wanted, wanted.end, source)
            if place is None or unit.keys[0] in self._lanes.coming:
                continue
            last = runs[-1][1] if runs else []
            follows = bool(last) and last[-1].index == unit.index and last[-1].page + 1 == unit.page and runs[-1][0] == place
            if follows and (len(last) + 1) * len(unit.keys) <= self._at_once:
                last.append(unit)
            else:
                runs.append((place, [unit]))
        return runs

    def begin(
        self,
        op_id: int,
        wanted: Wanted,
        node: TreeNode,
        place: Place,
        run: Sequence[StoredUnit],
        memory: KVMemory,
        began: float | None,
    ) -> RunningImport:
        """Begins a read that runs() has returned. `node` is at the target; the other arguments are those of RunningImport."""
        assert memory.units is not None and memory.unit_pins is not None, "the model has cache groups"
        index, end = run[0].index, wanted.end
        keys = tuple(key for unit in run for key in unit.keys)
        memory.pin(node)
        units = memory.unit_pins.quarantine(index, len(run))
        host_pages = self._host.pin(keys) if place is HOST else NO_PAGES
        self._host.touch(keys)
        self._host.touch(wanted.keys[:end])
        pull, prover = None, prover_of(wanted)
        if place.source is not None and prover is not None:
            first_part = (run[0].page - memory.units.read_at(index, end).start) * len(run[0].keys)
            pull = Pull(place.source, first_part, prover.up_to(end * memory.page_size * TOKEN_BYTES))
        operation = PageOperation(op_id, place.kind, keys, units, host_pages, 1 + index, pull)
        running = RunningImport(operation, place, wanted, node, run[0].page, memory, began)
        self._lanes.begin(running)
        return running

    def publish(self, running: RunningImport, count: int, pinned_node: TreeNode | None) -> int:
        """Gives the units of an ended operation to their pages. Frees the units that were not read.

        Args:
            running: the operation.
            count: number of its first parts that were read.
            pinned_node: node that is pinned for the operation's request, if the request still waits; otherwise None. Units up to
                this node stay pinned until unpin().

        Returns:
            The number of parts of the published units.
        """
        operation, memory, wanted = running.operation, running.memory, running.wanted
        assert memory.units is not None and memory.unit_pins is not None, "the model has cache groups"
        index, num_whole = operation.group - 1, count // operation.num_parts
        if len(rest := operation.pages[num_whole:]):
            memory.unit_pins.free_quarantined(index, rest)
        if not num_whole:
            return 0
        stay = pinned_node is not None and pinned_node.depth >= running.first + num_whole
        for page, unit in enumerate(operation.pages[:num_whole].tolist(), running.first):
            memory.unit_pins.publish_quarantined(index, unit, running.node, page)
            if stay:
                owned = memory.units.unit_of(index, running.node, page)
                memory.unit_pins.pin(index, [owned])
                self._pinned.setdefault(wanted.seq, []).append((memory, index, owned))
        if running.node.depth >= wanted.end > 0:
            memory.units.note_end(running.node, wanted.end)
        return num_whole * operation.num_parts

    def unpin(self, seq: int) -> bool:
        """Unpins the units that were read for a request. Returns whether there were any."""
        pinned = self._pinned.pop(seq, [])
        for memory, index, unit in reversed(pinned):
            assert memory.unit_pins is not None, "the model has cache groups"
            memory.unit_pins.unpin(index, [unit])
        return bool(pinned)

    @staticmethod
    def _fits(missing: Iterable[StoredUnit], memory: KVMemory) -> bool:
        """Returns whether device units for all missing units may be taken now."""
        counts = Counter(unit.index for unit in missing)
        return all(count <= memory.num_lendable_units(index) for index, count in counts.items())

    def _is_page_readable(self, wanted: Wanted, page: int, source: Place | None) -> bool:
        key = wanted.keys[page]
        if key in self._host or key in self._stored or key in self._lanes.coming:
            return True
        return source is not None and source.source is not None and page < source.source.num_pages

    def _is_end(
        self, wanted: Wanted, memory: KVMemory, path: Sequence[tuple[TreeNode, int]], end: int, source: Place | None
    ) -> bool:
        """Returns whether the tree or another place has each unit that the token after a page end reads.

        Of the parts in lower tiers, only the first part of each unit is looked up.
        """
        units = memory.units
        assert units is not None, "the model has cache groups"
        if source is not None and end == wanted.source_end:
            return True
        for index in range(len(units.pools)):
            for page in reversed(units.read_at(index, end)):
                if _unit_on(path, index, page) != NO_UNIT:
                    continue
                key = self._units.first_part(index, wanted.keys[page])
                if key not in self._host and key not in self._stored and key not in self._lanes.coming:
                    return False
        return True


def _unit_on(path: Sequence[tuple[TreeNode, int]], index: int, page: int) -> int:
    """Returns the unit of a page of a path, or NO_UNIT if the page or its unit is missing."""
    for node, count in path:
        begin = node.depth - len(node.pages)
        if begin <= page < begin + count:
            return int(node.units[index][page - begin])
    return NO_UNIT
