"""Imports: prefixes on their way from another tier or worker into the device's pages, for requests that wait for them.

What has arrived is published in the tree and pinned until its request is admitted or ends; what has not is computed. A page is
imported once, however many wait for it; one that the tree has is not imported. Whoever waits is let go as soon as computing the
rest would be sooner, or where there is no room; the pages of an operation under way stay quarantined until its fact, and count
for whoever comes next. Pins are wishes: where running requests are short of pages, they are taken back. Single owner: Tiers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from services.worker.core.contracts.reservations import KvSource, Prover
from services.worker.core.contracts.transfers import NO_PAGES, Fact, OperationKind, PageOperation, Pull, Tier
from services.worker.core.kv.memory import KVMemory
from services.worker.core.kv.other_tiers import Wanted
from services.worker.core.kv.tree_node import TOKEN_BYTES, TreeNode
from services.worker.core.tiers.host_index import HostIndex
from services.worker.core.tiers.lanes import HOST, STORAGE, Lanes, Place, Running
from services.worker.core.tiers.page_keys import PageKeys, leading
from services.worker.core.tiers.rates import Rates

MOST_QUARANTINED_SHARE = 2  # one part in so many of the pool's pages may be written at once
MOST_AT_ONCE = 32  # operations of one request under way
_KINDS = {Tier.HOST: OperationKind.LOAD, Tier.STORAGE: OperationKind.FETCH, Tier.PEER: OperationKind.PULL}


class Imports:
    """stored: keys that the storage holds; None: there is none. at_once: pages of one operation, load_at_once: of one from the
    host, which comes layer by layer. imported_pages_total: that came, by where from. prefetched_pages_total: of these, those that
    were read before their request came. recomputed_pages_total: that were there when their request began, and computed all the
    same."""

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
    ) -> None:
        self._keys, self._host, self._ids, self._rates = keys, host, ids, rates
        self._at_once, self._load_at_once = at_once, load_at_once
        self._stored: Collection[bytes] = () if stored is None else stored
        self._waits: dict[int, Wanted] = {}
        self._due: dict[int, Wanted] = {}  # to be moved on; the others wait for an operation
        self._pinned: dict[int, tuple[TreeNode, KVMemory]] = {}
        self._freed = False
        self._lanes = lanes
        self.imported_pages_total: Counter[Tier] = Counter()
        self.prefetched_pages_total = 0
        self.recomputed_pages_total = self.failed_total = self.refused_pulls_total = 0

    def __len__(self) -> int:
        return len(self._waits)

    def waiting(self) -> set[int]:
        return set(self._waits)

    def is_waiting(self, seq: int) -> bool:
        return seq in self._waits

    def consider(self, wanted: Wanted, memory: KVMemory) -> bool:
        """Whether more of the prompt than the tree has is elsewhere, and sooner here than computed: the request waits, then."""
        assert wanted.seq not in self._waits, "a request waits once"
        hit = self._hit(wanted, memory)
        if hit >= wanted.limit or not self._is_elsewhere(wanted, hit):
            return False
        place, count = self._run(wanted, hit)
        if place is not None and not self._is_had(wanted, place, count):
            return False
        self._waits[wanted.seq] = self._due[wanted.seq] = wanted
        return True

    def plan(self, memory: KVMemory, now: float, in_flight: bool) -> tuple[list[PageOperation], list[int]]:
        """Operations that begin now, and who need not wait any more. in_flight: a step is."""
        for wanted in self._lanes.give_up_late(now, self._comes):
            self._let_go(wanted)
        operations: list[PageOperation] = []
        ready: list[int] = []
        due, self._due = self._due, {}
        for seq, wanted in due.items():
            begun = self._move_on(wanted, memory, None if in_flight else now)
            operations += begun
            if not begun and not self._lanes.is_awaited(wanted):
                del self._waits[seq]
                ready.append(seq)
        return operations, ready

    def admitted(self, seq: int, keys: list[bytes], hit: int) -> None:
        """The request begins, with so many pages of its prompt from the tree. keys: of its first pages."""
        rest = keys[hit:]
        self.recomputed_pages_total += leading(rest, self._host) or leading(rest, self._stored)
        self._stop_waiting(seq)
        self._unpin(seq)

    def leave(self, seq: int) -> None:
        """The request has ended, or will not come: what was kept for it is not any more."""
        self._stop_waiting(seq)
        self._freed |= self._unpin(seq)

    def take_freed(self) -> bool:
        """Whether pages may have become evictable since the last call, which were kept for somebody who has not begun."""
        freed, self._freed = self._freed, False
        return freed

    def take_over(self, seq: int, by: int) -> None:
        """Who waited ahead of a request gives what is kept for it to that, which begins to look for itself."""
        assert by not in self._pinned, "a request that has just come has nothing yet"
        self._stop_waiting(seq)
        if (pinned := self._pinned.pop(seq, None)) is not None:
            self._pinned[by] = pinned

    def ended(self, fact: Fact, now: float) -> bool:
        """Takes in a fact. False: it is of no operation of these."""
        running = self._lanes.ended(fact, now)
        if running is None:
            return False
        operation, memory, tier = running.operation, running.memory, running.place.tier
        if tier is Tier.HOST:
            self._host.unpin(operation.host_pages)
        self.failed_total += fact.count < len(operation.keys)
        self.refused_pulls_total += tier is Tier.PEER and not fact.count
        count = self._published(running, fact.count if running.counts else 0)
        self.prefetched_pages_total += count if running.wanted.ahead else 0
        if count < len(operation.keys):
            memory.free_quarantined(operation.pages[count:])
        memory.unpin(running.node)
        self.imported_pages_total[tier] += count
        for wanted in self._waits.values():
            if shared := _shared(operation.keys[:count], wanted.keys, running.first):
                wanted.arrived[tier] += shared
        for wanted in running.waits:
            if count == len(operation.keys) or _room_of(wanted) != _room_of(running.wanted):
                self._due[wanted.seq] = wanted  # of another room than the one that had less
            else:
                self._let_go(wanted)
        return True

    def let_go(self) -> bool:
        """Pages are wanted by who runs: what is pinned for who waits may go. Whether there was anything."""
        pinned = list(self._pinned)
        for seq in pinned:
            self._unpin(seq)
        return bool(pinned)

    def end_all(self) -> None:
        """Nothing that is under way counts any more, and nobody waits for it."""
        self._lanes.void(lambda wanted: True)
        for wanted in self._waits.values():
            self._let_go(wanted)
        self._freed |= self.let_go()

    def end_trees(self, names: Collection[str]) -> None:
        """The same of these trees, by name."""
        self._lanes.void(lambda wanted: wanted.tree in names)
        for wanted in self._waits.values():
            if wanted.tree in names:
                self._let_go(wanted)
                self._freed |= self._unpin(wanted.seq)

    def _hit(self, wanted: Wanted, memory: KVMemory) -> int:
        """Pages of it that the tree has."""
        return memory.peek(wanted.tree, wanted.tokens, wanted.limit * memory.page_size)[1] // memory.page_size

    def _is_elsewhere(self, wanted: Wanted, at: int) -> bool:
        self._keys.extend(wanted.keys, self._keys.root(wanted.tree), wanted.tokens, wanted.limit)
        key, source = wanted.keys[at], wanted.source
        here = key in self._host or key in self._stored or key in self._lanes.coming
        return here or (source is not None and at < source.num_pages)

    def _is_had(self, wanted: Wanted, place: Place, count: int) -> bool:
        """Reading so many pages pays; not behind an operation of that lane that is late itself. Looks ahead of a request, one for
        each chunk, forgive nothing: that is for the request's own."""
        pays = self._rates.reading_pays
        return not self._lanes.is_stuck(place.lane) and pays(place.tier, count, place.lane, forgives=not wanted.ahead)

    def _run(self, wanted: Wanted, first: int) -> tuple[Place | None, int]:
        """Where page `first` is, and how many from there on are in one place, and not on their way. None: it is on its way, or
        nowhere."""
        rest = wanted.keys[first : wanted.limit]
        if not rest or rest[0] in self._lanes.coming:
            return None, 0
        for place, held in ((HOST, self._host), (STORAGE, self._stored)):
            if count := leading(rest, held):
                return place, self._before_coming(rest[:count])
        source = wanted.source
        if source is not None and source.num_pages > first:
            assert isinstance(source, KvSource), "a source says where its pages are read"
            return Place(Tier.PEER, source), self._before_coming(rest[: source.num_pages - first])
        return None, 0

    def _before_coming(self, keys: Sequence[bytes]) -> int:
        """How many, from the first on, are not on their way."""
        return next((at for at, key in enumerate(keys) if key in self._lanes.coming), len(keys))

    def _move_on(self, wanted: Wanted, memory: KVMemory, began: float | None) -> list[PageOperation]:
        """The next operations for a request that waits. None: it waits for one that is under way, or there is none to come."""
        if wanted.let_go:
            return []
        match = memory.match(wanted.tree, wanted.tokens, wanted.limit * memory.page_size)
        first = len(match.pages)
        self._pin(wanted.seq, match.node, memory)
        if first >= wanted.limit or not self._is_elsewhere(wanted, first):
            return []
        coming = self._lanes.coming.get(wanted.keys[first])
        if coming is not None:
            if coming.counts and not coming.late:
                self._lanes.wait_for(coming, wanted)
            return []
        return self._begin_more(wanted, match.node, first, memory, began)

    def _begin_more(
        self, wanted: Wanted, node: TreeNode, first: int, memory: KVMemory, began: float | None
    ) -> list[PageOperation]:
        """One behind the other, as far as they pay and there is room. The request waits for the first."""
        operations: list[PageOperation] = []
        at, prover = first, _prover(wanted)
        while len(operations) < MOST_AT_ONCE:
            place, count = self._run(wanted, at)
            at_once = self._load_at_once if place is HOST else self._at_once
            room = min(count, at_once, self._room(wanted, first, memory))
            if place is None or room <= 0 or (not operations and not self._is_had(wanted, place, count)):
                break
            pull = None
            if place.source is not None and prover is not None:
                pull = Pull(place.source, at, prover.up_to((at + room) * memory.page_size * TOKEN_BYTES))
            running = self._begin(wanted, node, place, at, room, memory, began, pull)
            if not operations:
                self._lanes.wait_for(running, wanted)
            operations.append(running.operation)
            at += room
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
    ) -> Running:
        keys = tuple(wanted.keys[first : first + count])
        memory.pin(node)
        pages = memory.quarantine(count)
        host_pages = self._host.pin(keys) if place.tier is Tier.HOST else NO_PAGES
        self._host.touch(wanted.keys[: first + count])
        operation = PageOperation(next(self._ids), _KINDS[place.tier], keys, pages, host_pages, pull=pull)
        running = Running(operation, place, wanted, node, first, memory, began)
        self._lanes.begin(running)
        return running

    def _room(self, wanted: Wanted, first: int, memory: KVMemory) -> int:
        """Pages that an operation may take: what is left has room for one request, this one, from page `first` on, whatever comes
        of those under way."""
        rest = -(-len(wanted.tokens) // (TOKEN_BYTES * memory.page_size)) - first + 1
        quarantined = memory.pages.num_pages // MOST_QUARANTINED_SHARE - len(memory.quarantined)
        return min(quarantined, memory.num_available - rest)

    def _published(self, running: Running, count: int) -> int:
        """How many of its pages are in the tree now: none where what they are built on is not there."""
        wanted, operation, memory = running.wanted, running.operation, running.memory
        if not count:
            return 0
        size = memory.page_size * TOKEN_BYTES
        match = memory.match(wanted.tree, wanted.tokens, running.first * memory.page_size)
        if match.node.depth < running.first:
            return 0
        tokens = wanted.tokens[running.first * size : (running.first + count) * size]
        pages, keys, kept = operation.pages[:count], operation.keys[:count], running.place.tier is not Tier.PEER
        memory.publish_quarantined(match.node, tokens, pages, wanted.rank, keys, kept)
        return count

    def _comes(self, wanted: Wanted) -> bool:
        return self._waits.get(wanted.seq) is wanted and not wanted.let_go

    def _stop_waiting(self, seq: int) -> None:
        wanted = self._waits.pop(seq, None)
        if wanted is not None:
            self._due.pop(seq, None)
            self._lanes.forget(wanted)

    def _let_go(self, wanted: Wanted) -> None:
        """It does not wait any more: the next plan says so."""
        wanted.let_go = True
        self._due[wanted.seq] = wanted

    def _pin(self, seq: int, node: TreeNode, memory: KVMemory) -> None:
        """In place of what was pinned for it before."""
        memory.pin(node)
        self._unpin(seq)
        self._pinned[seq] = node, memory

    def _unpin(self, seq: int) -> bool:
        """Whether anything was pinned for it."""
        if (pinned := self._pinned.pop(seq, None)) is not None:
            pinned[1].unpin(pinned[0])
        return pinned is not None


def _prover(wanted: Wanted) -> Prover | None:
    source = wanted.source
    return Prover(source.room.secret, wanted.tree, wanted.tokens) if isinstance(source, KvSource) else None


def _room_of(wanted: Wanted) -> object:
    return None if wanted.source is None else wanted.source.room


def _shared(keys: Sequence[bytes], others: Sequence[bytes], first: int) -> int:
    """How many of the first ones are the same as the others' from `first` on."""
    count = min(len(keys), len(others) - first)
    return next((at for at in range(count) if keys[at] != others[first + at]), max(count, 0))
