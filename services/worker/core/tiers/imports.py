"""Imports: prefixes that are read from another tier or a remote worker into device pages, for waiting requests.

- Imported pages are published in the radix tree, and pinned until their request is admitted or ends. The request computes the
  pages that were not imported.
- If several requests wait for a page, one operation reads it for all of them. Pages in the tree are not read.
- A request stops waiting when computing the missing pages would be faster, or when no device pages are available. Its running
  operations continue. Their pages stay quarantined until the facts arrive, and are then published for other requests.
- Pins are released when running requests need pages.
- With cache groups, a request has a page end as its target (unit_reads.py). It reads the missing pages up to the target, and then
  the missing units. If a read fails, the request takes a shorter target, or computes the rest.

Tiers is the owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from rootstock_llm.services.worker.core.contracts.transfers import NO_PAGES, Fact, PageOperation, Pull, Tier
from rootstock_llm.services.worker.core.kv.memory import KVMemory
from rootstock_llm.services.worker.core.kv.other_tiers import Wanted
from rootstock_llm.services.worker.core.kv.tree_node import TOKEN_BYTES, TreeNode
from rootstock_llm.services.worker.core.tiers.host_index import HostIndex
from rootstock_llm.services.worker.core.tiers.lanes import HOST, STORAGE, Lanes, Place, RunningImport, prover_of, source_of
from rootstock_llm.services.worker.core.tiers.page_keys import PageKeys, leading
from rootstock_llm.services.worker.core.tiers.rates import Rates
from rootstock_llm.services.worker.core.tiers.stored_units import StoredUnits
from rootstock_llm.services.worker.core.tiers.unit_reads import MOST_UNIT_READS, UnitReads

MOST_QUARANTINED_SHARE = 2  # divisor: operations may write at most 1/2 of the pool's pages at a time
MOST_AT_ONCE = 32  # largest number of operations that one plan() begins for one request


class Imports:
    """The requests and prefetches that wait for pages, and their pins in the tree."""

    def __init__(
        self,
        keys: PageKeys,
        host: HostIndex,
        stored: set[bytes] | None,
        rates: Rates,
        lanes: Lanes,
        at_once: int,
        load_at_once: int,
        ids: Iterator[int],
        units: StoredUnits,
    ) -> None:
        """Starts without waiting requests.

        Args:
            keys: maker of page keys.
            host: index of the host tier.
            stored: page keys in the storage, or None if the worker has no storage.
            rates: estimates of reading and computing.
            lanes: the running operations.
            at_once: largest number of pages of an operation.
            load_at_once: largest number of pages of a load from the host, which arrives layer by layer.
            ids: op_ids of new operations.
            units: maker of the keys of parts.
        """
        self._keys, self._host, self._ids, self._rates = keys, host, ids, rates
        self._at_once, self._load_at_once = at_once, load_at_once
        self._stored: Collection[bytes] = () if stored is None else stored
        self._waits: dict[int, Wanted] = {}  # waiting requests and prefetches, by seq
        self._due: dict[int, Wanted] = {}  # waiting requests for which the next plan() begins operations or ends the wait
        self._pinned: dict[int, tuple[TreeNode, KVMemory]] = {}  # pinned nodes, by seq
        self._freed = False  # whether pins were released since the last take_freed()
        self._lanes = lanes
        self._unit_reads = UnitReads(units, host, self._stored, lanes, at_once)
        self.imported_pages_total: Counter[Tier] = Counter()  # pages that arrived, by tier
        self.prefetched_pages_total = 0  # pages that arrived before their request
        # Pages that were computed although a tier had them; operations that did not read all of their pages; reads from remote
        # workers that returned no page.
        self.recomputed_pages_total = self.failed_total = self.refused_pulls_total = 0

    def __len__(self) -> int:
        return len(self._waits)

    def waiting(self) -> set[int]:
        """Returns the seqs of the waiting requests and prefetches."""
        return set(self._waits)

    def is_waiting(self, seq: int) -> bool:
        return seq in self._waits

    def consider(self, wanted: Wanted, memory: KVMemory) -> bool:
        """Makes a request wait for pages of its prompt that the tree lacks.

        The request waits if reading the pages is faster than computing them, and device pages are available for the first read.

        Returns:
            Whether the request waits.
        """
        assert wanted.seq not in self._waits, "a request waits once"
        hit = self._hit(wanted, memory)
        if not self._choose_end(wanted, memory, hit):
            return False
        place, count = self._next_read(wanted, memory)
        if place is not None and not (self._is_worth_reading(wanted, place, count) and self._has_room(wanted, memory)):
            return False
        self._waits[wanted.seq] = self._due[wanted.seq] = wanted
        return True

    def plan(self, memory: KVMemory, now: float, in_flight: bool) -> tuple[list[PageOperation], list[int]]:
        """Begins operations for the requests in `_due`.

        Args:
            memory: the owner of the device pages.
            now: present time.
            in_flight: whether a step is uncommitted.

        Returns:
            The new operations, and the seqs of the requests and prefetches that stop waiting.
        """
        for wanted in self._lanes.give_up_late(now, self._still_waits):
            self._give_up(wanted)
        operations: list[PageOperation] = []
        ready: list[int] = []
        due, self._due = self._due, {}
        for seq, wanted in due.items():
            begun = self._move_on(wanted, memory, None if in_flight else now)
            operations += begun
            if not begun and not self._lanes.is_awaited(wanted):
                self._stop_waiting(seq)
                ready.append(seq)
        return operations, ready

    def admitted(self, seq: int, keys: list[bytes], hit: int) -> None:
        """Ends the wait and the pin of a request that is admitted with a hit of `hit` pages. `keys` are its first page keys."""
        rest = keys[hit:]
        self.recomputed_pages_total += leading(rest, self._host) or leading(rest, self._stored)
        self._stop_waiting(seq)
        self._unpin(seq)

    def cancel(self, seq: int) -> None:
        """Ends the wait and the pin of a request that has ended, or of a prefetch whose request will not arrive."""
        self._stop_waiting(seq)
        self._freed |= self._unpin(seq)

    def take_freed(self) -> bool:
        """Returns whether pins have been released since the last call, so that pages may have become evictable."""
        freed, self._freed = self._freed, False
        return freed

    def take_over(self, seq: int, by: int) -> None:
        """Ends the wait of the prefetch `seq`, and passes its pin to the request with the seq `by`."""
        assert by not in self._pinned, "a request that has just arrived has no pin"
        self._stop_waiting(seq)
        if (pinned := self._pinned.pop(seq, None)) is not None:
            self._pinned[by] = pinned

    def ended(self, fact: Fact, now: float) -> bool:
        """Applies the fact of an import operation. Returns False if the fact belongs to no import operation."""
        running = self._lanes.ended(fact, now)
        if running is None:
            return False
        operation, memory, tier = running.operation, running.memory, running.place.tier
        if tier is Tier.HOST:
            self._host.unpin(operation.host_pages)
        self.failed_total += fact.count < len(operation.keys)
        self.refused_pulls_total += tier is Tier.PEER and not fact.count
        moved = fact.count if running.counts else 0
        if operation.group:
            pinned, _ = self._pinned.get(running.wanted.seq, (None, None)) if running.wanted.seq in self._waits else (None, None)
            count = self._unit_reads.publish(running, moved, pinned)
        else:
            count = self._publish_pages(running, moved)
        memory.unpin(running.node)
        for wanted in running.waits:
            if count == len(operation.keys) or _reservation_of(wanted) != _reservation_of(running.wanted):
                # All pages arrived, or other pages may still be read from the request's own source.
                self._due[wanted.seq] = wanted
            elif memory.units is not None and not wanted.is_prefetch:
                self._shorten(wanted, running, count)
                self._due[wanted.seq] = wanted
            else:
                self._give_up(wanted)
        return True

    def _publish_pages(self, running: RunningImport, moved: int) -> int:
        """Publishes the pages of an ended operation, and frees the others. Returns the number of published pages."""
        operation, memory, tier = running.operation, running.memory, running.place.tier
        count = self._published(running, moved)
        self.prefetched_pages_total += count if running.wanted.is_prefetch else 0
        if count < len(operation.keys):
            memory.free_quarantined(operation.pages[count:])
        self.imported_pages_total[tier] += count
        for wanted in self._waits.values():
            if shared := _shared(operation.keys[:count], wanted.keys, running.first):
                counted = wanted.arrived if memory.units is None or wanted.is_prefetch else wanted.unused
                counted[tier] += shared
        return count

    def _shorten(self, wanted: Wanted, running: RunningImport, count: int) -> None:
        """Lowers a request's limit, so that its next target does not need the keys of an operation that were not read.

        Args:
            wanted: a request that waits for the operation.
            running: the operation.
            count: number of its keys that were read.
        """
        wanted.limit = wanted.end - 1 if running.operation.group else running.first + count
        if running.place.tier is Tier.PEER:
            wanted.source = None  # the remote worker has closed the reservation or cannot be read

    def release_pins(self) -> bool:
        """Releases the pins of all waiting requests, because running requests need pages. Returns whether a request had a pin."""
        pinned = list(self._pinned)
        for seq in pinned:
            self._unpin(seq)
        return bool(pinned)

    def end_all(self) -> None:
        """Discards the results of all running operations, ends all waits and releases all pins."""
        self._lanes.void(lambda wanted: True)
        for wanted in self._waits.values():
            self._give_up(wanted)
        self._freed |= self.release_pins()

    def end_trees(self, names: Collection[str]) -> None:
        """Discards the results of operations for the named trees, and ends the waits and pins of their requests."""
        self._lanes.void(lambda wanted: wanted.tree in names)
        for wanted in self._waits.values():
            if wanted.tree in names:
                self._give_up(wanted)
                self._freed |= self._unpin(wanted.seq)

    def _hit(self, wanted: Wanted, memory: KVMemory) -> int:
        """Returns the number of the prompt's first pages that the tree has."""
        return memory.peek(wanted.tree, wanted.tokens, wanted.limit * memory.page_size)[1] // memory.page_size

    def _choose_end(self, wanted: Wanted, memory: KVMemory, hit: int) -> bool:
        """Sets the page end up to which a request reads. Returns whether there is more to read than the `hit` pages."""
        if memory.units is None:
            wanted.end = wanted.limit
            return hit < wanted.limit and self._is_readable(wanted, hit)
        if hit >= wanted.limit:
            return False
        self._keys.extend(wanted.keys, self._keys.root(wanted.tree), wanted.tokens, wanted.limit)
        cached = memory.cached(wanted.tree, wanted.tokens, wanted.limit * memory.page_size)[1] // memory.page_size
        return self._unit_reads.choose_end(wanted, memory, hit, cached, source_of(wanted))

    def _next_read(self, wanted: Wanted, memory: KVMemory) -> tuple[Place | None, int]:
        """Returns the place of a request's next read, and the number of pages and parts that the request reads in all its reads.

        Without cache groups, the number is only that of the next consecutive pages in this place. The place is None if the next
        page or unit is being read.
        """
        cached = memory.cached(wanted.tree, wanted.tokens, wanted.end * memory.page_size)[1] // memory.page_size
        if cached < wanted.end:
            place, count = self._next_run(wanted, cached)
            return place, wanted.num_rows or count
        for unit in self._unit_reads.missing(wanted, memory, wanted.end):
            if unit.keys[0] in self._lanes.coming:
                return None, 0
            return self._unit_reads.place_of(unit, wanted, wanted.end, source_of(wanted)), wanted.num_rows
        return None, 0

    def _is_readable(self, wanted: Wanted, at: int) -> bool:
        """Returns whether page `at` of the prompt is in a lower tier or a remote worker, or a running operation reads it.

        First adds the missing page keys to `wanted.keys`.
        """
        self._keys.extend(wanted.keys, self._keys.root(wanted.tree), wanted.tokens, wanted.limit)
        key, source = wanted.keys[at], wanted.source
        here = key in self._host or key in self._stored or key in self._lanes.coming
        return here or (source is not None and at < source.num_pages)

    def _is_worth_reading(self, wanted: Wanted, place: Place, count: int) -> bool:
        """Returns whether reading `count` pages and parts is faster than computing, and the lane has no late operation.

        For a prefetch, the result False does not raise the assumed rate of reading (see Rates.reading_pays), because this method
        is called once per chunk of the prompt.
        """
        computed = wanted.end - wanted.hit if wanted.num_rows else 0
        forgives = not wanted.is_prefetch
        pays = self._rates.reading_pays
        return not self._lanes.is_stuck(place.lane) and pays(place.tier, count, place.lane, forgives, computed)

    def _has_room(self, wanted: Wanted, memory: KVMemory) -> bool:
        """Returns whether device pages are available for a request's next read of pages while its prefix hit is pinned."""
        node = memory.match_cached(wanted.tree, wanted.tokens, wanted.end * memory.page_size)
        if node.depth >= wanted.end:
            return True  # the next read is of units
        memory.pin(node)
        room = self._max_quarantine(wanted, node.depth, memory)
        memory.unpin(node)
        return room > 0

    def _next_run(self, wanted: Wanted, first: int) -> tuple[Place | None, int]:
        """Returns the place of page `first`, and the number of consecutive pages in the same place that are not being read.

        Returns:
            (None, 0) if page `first` is being read or is in no place.
        """
        rest = wanted.keys[first : wanted.end]
        if not rest or rest[0] in self._lanes.coming:
            return None, 0
        for place, cached in ((HOST, self._host), (STORAGE, self._stored)):
            if count := leading(rest, cached):
                return place, self._before_coming(rest[:count])
        source = source_of(wanted)
        if source is not None and source.source is not None and source.source.num_pages > first:
            return source, self._before_coming(rest[: source.source.num_pages - first])
        return None, 0

    def _before_coming(self, keys: Sequence[bytes]) -> int:
        """Returns the number of first keys whose pages are not being read."""
        return next((at for at, key in enumerate(keys) if key in self._lanes.coming), len(keys))

    def _move_on(self, wanted: Wanted, memory: KVMemory, began: float | None) -> list[PageOperation]:
        """Pins the request's prefix hit, and begins the next operations for it.

        Returns:
            The new operations. Empty if the request waits for a running operation, or if no page is left to read.
        """
        if wanted.given_up:
            return []
        hit = self._hit(wanted, memory)
        if wanted.unused and hit >= wanted.end > 0:
            wanted.arrived.update(wanted.unused)
            wanted.unused.clear()
        before = wanted.end
        has_more = self._choose_end(wanted, memory, hit)
        if not has_more or wanted.end != before:
            self._unit_reads.unpin(wanted.seq)
        end = wanted.end if has_more else wanted.limit
        node = (memory.match_cached if has_more else memory.match)(wanted.tree, wanted.tokens, end * memory.page_size)
        self._pin(wanted.seq, node, memory)
        if not has_more:
            return []
        if node.depth < wanted.end:
            if self._is_coming(wanted, wanted.keys[node.depth]):
                return []
            return self._begin_more(wanted, node, node.depth, memory, began)
        return self._begin_units(wanted, node, memory, began)

    def _is_coming(self, wanted: Wanted, key: bytes) -> bool:
        """Returns whether an operation reads a page or part. The request then waits for it, unless it is late or discarded."""
        coming = self._lanes.coming.get(key)
        if coming is not None and coming.counts and not coming.late:
            self._lanes.wait_for(coming, wanted)
        return coming is not None

    def _begin_units(self, wanted: Wanted, node: TreeNode, memory: KVMemory, began: float | None) -> list[PageOperation]:
        """Begins the reads of all missing units of a request's target. The request waits for the first of them.

        Args:
            wanted: the request.
            node: node at the target.
            memory: the owner of the device units.
            began: time at which the operations can begin, or None if a step runs.
        """
        end, source = wanted.end, source_of(wanted)
        missing = self._unit_reads.missing(wanted, memory, end)
        if not missing or self._is_coming(wanted, missing[0].keys[0]):
            return []
        place = self._unit_reads.place_of(missing[0], wanted, end, source)
        if place is None or wanted.num_unit_reads >= MOST_UNIT_READS:
            return []
        if not self._is_worth_reading(wanted, place, wanted.num_rows):
            return []
        wanted.num_unit_reads += 1
        operations: list[PageOperation] = []
        for place, run in self._unit_reads.runs(wanted, missing, source):
            running = self._unit_reads.begin(next(self._ids), wanted, node, place, run, memory, began)
            if not operations:
                self._lanes.wait_for(running, wanted)
            operations.append(running.operation)
        return operations

    def _begin_more(
        self, wanted: Wanted, node: TreeNode, first: int, memory: KVMemory, began: float | None
    ) -> list[PageOperation]:
        """Begins consecutive operations while pages are available, if the first read pays. The request waits for the first."""
        operations: list[PageOperation] = []
        at, prover = first, prover_of(wanted)
        while len(operations) < MOST_AT_ONCE:
            place, count = self._next_run(wanted, at)
            at_once = self._load_at_once if place is HOST else self._at_once
            num_pages = min(count, at_once, self._max_quarantine(wanted, first, memory))
            to_read = wanted.num_rows or count
            if place is None or num_pages <= 0 or (not operations and not self._is_worth_reading(wanted, place, to_read)):
                break
            pull = None
            if place.source is not None and prover is not None:
                pull = Pull(place.source, at, prover.up_to((at + num_pages) * memory.page_size * TOKEN_BYTES))
            running = self._begin(wanted, node, place, at, num_pages, memory, began, pull)
            if not operations:
                self._lanes.wait_for(running, wanted)
            operations.append(running.operation)
            at += num_pages
        return operations

    def _begin(
        self,
        wanted: Wanted,
        node: TreeNode,
        place: Place,
        first: int,
        count: int,
        memory: KVMemory,
        began: float | None,
        pull: Pull | None,
    ) -> RunningImport:
        keys = tuple(wanted.keys[first : first + count])
        memory.pin(node)
        pages = memory.quarantine(count)
        host_pages = self._host.pin(keys) if place.tier is Tier.HOST else NO_PAGES
        self._host.touch(wanted.keys[: first + count])
        operation = PageOperation(next(self._ids), place.kind, keys, pages, host_pages, pull=pull)
        running = RunningImport(operation, place, wanted, node, first, memory, began)
        self._lanes.begin(running)
        return running

    def _max_quarantine(self, wanted: Wanted, first: int, memory: KVMemory) -> int:
        """Returns the largest number of device pages that an operation may quarantine; 0 or less if none.

        The remaining available pages must suffice to compute the request from page `first` on, even if all operations fail.
        """
        rest = -(-len(wanted.tokens) // (TOKEN_BYTES * memory.page_size)) - first + 1
        quarantined = memory.pages.num_pages // MOST_QUARANTINED_SHARE - len(memory.quarantined)
        return min(quarantined, memory.num_available - rest)

    def _published(self, running: RunningImport, count: int) -> int:
        """Publishes the first `count` pages of an operation.

        Returns:
            The number of published pages; 0 if a preceding page of the prompt is not in the tree.
        """
        wanted, operation, memory = running.wanted, running.operation, running.memory
        if not count:
            return 0
        size = memory.page_size * TOKEN_BYTES
        hit = memory.match_cached(wanted.tree, wanted.tokens, running.first * memory.page_size)
        if hit.depth < running.first:
            return 0
        tokens = wanted.tokens[running.first * size : (running.first + count) * size]
        pages, keys, kept = operation.pages[:count], operation.keys[:count], running.place.tier is not Tier.PEER
        memory.publish_quarantined(hit, tokens, pages, wanted.rank, keys, kept)
        return count

    def _still_waits(self, wanted: Wanted) -> bool:
        """Returns whether the request or prefetch waits and may need further operations after the running ones."""
        return self._waits.get(wanted.seq) is wanted and not wanted.given_up

    def _stop_waiting(self, seq: int) -> None:
        wanted = self._waits.pop(seq, None)
        if wanted is not None:
            self._due.pop(seq, None)
            self._lanes.forget(wanted)
            self._unit_reads.unpin(seq)

    def _give_up(self, wanted: Wanted) -> None:
        """Ends the wait of a request or prefetch, so that the next plan() returns its seq."""
        wanted.given_up = True
        self._due[wanted.seq] = wanted

    def _pin(self, seq: int, node: TreeNode, memory: KVMemory) -> None:
        """Pins a node for a request or prefetch, and releases the previous pin of this request or prefetch."""
        memory.pin(node)
        if (pinned := self._pinned.pop(seq, None)) is not None:
            pinned[1].unpin(pinned[0])
        self._pinned[seq] = node, memory

    def _unpin(self, seq: int) -> bool:
        """Releases the pins of the request's pages and units. Returns whether pages were pinned."""
        self._unit_reads.unpin(seq)
        if (pinned := self._pinned.pop(seq, None)) is not None:
            pinned[1].unpin(pinned[0])
        return pinned is not None


def _reservation_of(wanted: Wanted) -> object:
    return None if wanted.source is None else wanted.source.reservation


def _shared(keys: Sequence[bytes], others: Sequence[bytes], first: int) -> int:
    """Returns the number of first elements of `keys` that equal the elements of `others` from index `first` on."""
    count = min(len(keys), len(others) - first)
    return next((at for at in range(count) if keys[at] != others[first + at]), max(count, 0))
