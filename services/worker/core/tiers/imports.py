"""Imports: prefixes on their way from another tier into the device's pages, for requests that wait for them.

What has arrived is published in the tree and pinned until its request is admitted or ends; what has not is computed. A page is
imported once, however many wait for it; one that the tree has is not imported. Whoever waits is let go as soon as computing the
rest would be sooner, or where there is no room; the pages of an operation under way stay quarantined until its fact, and count
for whoever comes next. Pins are wishes: where running requests are short of pages, they are taken back. Single owner: Tiers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from services.worker.core.contracts.transfers import NO_PAGES, Fact, OperationKind, PageOperation, Tier
from services.worker.core.kv.memory import KVMemory
from services.worker.core.kv.other_tiers import Wanted
from services.worker.core.kv.tree_node import TOKEN_BYTES, TreeNode
from services.worker.core.tiers.host_index import HostIndex
from services.worker.core.tiers.operation_ids import OperationIds
from services.worker.core.tiers.page_keys import PageKeys, leading
from services.worker.core.tiers.rates import Rates

MOST_QUARANTINED_SHARE = 2  # one part in so many of the pool's pages may be written at once
_KINDS = {Tier.HOST: OperationKind.LOAD, Tier.STORAGE: OperationKind.FETCH}


@dataclass(slots=True, eq=False)
class _Operation:
    """Under way. node: where its pages are to hang, pinned. first: the page of its prompt that it begins with. counts: whether
    what it brings is published."""

    operation: PageOperation
    source: Tier
    wanted: Wanted
    node: TreeNode
    first: int
    began: float
    memory: KVMemory
    waits: list[Wanted]
    counts: bool = True
    late: bool = False


class Imports:
    """stored: keys that the storage holds; None: there is none. at_once: pages of one operation. imported_pages_total: that came,
    by where from. recomputed_pages_total: that were there when their request began, and computed all the same."""

    def __init__(
        self, keys: PageKeys, host: HostIndex, stored: set[bytes] | None, rates: Rates, at_once: int, ids: OperationIds
    ) -> None:
        self._keys, self._host, self._at_once, self._ids, self.rates = keys, host, at_once, ids, rates
        self._stored: Collection[bytes] = () if stored is None else stored
        self._waits: dict[int, Wanted] = {}
        self._due: dict[int, Wanted] = {}  # to be moved on; the others wait for an operation
        self._pinned: dict[int, tuple[TreeNode, KVMemory]] = {}
        self._running: dict[int, _Operation] = {}
        self._coming: dict[bytes, _Operation] = {}
        self.imported_pages_total: Counter[Tier] = Counter()
        self.recomputed_pages_total = self.failed_total = self.given_up_total = 0

    def waiting(self) -> set[int]:
        return set(self._waits)

    def __len__(self) -> int:
        return len(self._waits)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_pages(self) -> int:
        """That operations under way write."""
        return sum(len(running.operation.pages) for running in self._running.values())

    def consider(self, wanted: Wanted, memory: KVMemory) -> bool:
        """Whether more of the prompt than the tree has is elsewhere, and sooner here than computed: the request waits, then."""
        assert wanted.seq not in self._waits, "a request waits once"
        hit = self._hit(wanted, memory)
        if hit >= wanted.limit or not self._is_elsewhere(wanted, hit):
            return False
        source, count = self._run(wanted, hit)
        if source is not None and not self.rates.reading_pays(source, count):
            return False
        self._waits[wanted.seq] = self._due[wanted.seq] = wanted
        return True

    def plan(self, memory: KVMemory, now: float) -> tuple[list[PageOperation], list[int]]:
        """Operations that begin now, and who need not wait any more."""
        operations: list[PageOperation] = []
        for running in list(self._running.values()):
            self._give_up_late(running, now)
        ready: list[int] = []
        due, self._due = self._due, {}
        for seq, wanted in due.items():
            operation = self._move_on(wanted, memory, now)
            if operation is not None:
                operations.append(operation)
            elif not any(wanted in running.waits for running in self._running.values()):
                del self._waits[seq]
                ready.append(seq)
        return operations, ready

    def admitted(self, seq: int, keys: list[bytes], hit: int) -> None:
        """The request begins, with so many pages of its prompt from the tree. keys: of its first pages."""
        rest = keys[hit:]
        self.recomputed_pages_total += leading(rest, self._host) or leading(rest, self._stored)
        self.leave(seq)

    def leave(self, seq: int) -> None:
        """The request has ended, or begins: what was kept for it is not any more."""
        wanted = self._waits.pop(seq, None)
        if wanted is not None:
            self._due.pop(seq, None)
            for running in self._running.values():
                running.waits = [other for other in running.waits if other is not wanted]
        self._unpin(seq)

    def ended(self, fact: Fact) -> bool:
        """Takes in a fact. False: it is of no operation of these."""
        running = self._running.pop(fact.op_id, None)
        if running is None:
            return False
        operation, memory, count = running.operation, running.memory, fact.count
        for key in operation.keys:
            del self._coming[key]
        if running.source is Tier.HOST:
            self._host.unpin(operation.host_pages)
        if count < len(operation.keys):
            self.failed_total += 1
        if count and running.counts:
            self._publish(running, count)
        else:
            count = 0
        if count < len(operation.keys):
            memory.free_quarantined(operation.pages[count:])
        memory.unpin(running.node)
        self.rates.moved(running.source, fact.count, fact.seconds)
        self.imported_pages_total[running.source] += count
        for wanted in running.waits:
            wanted.arrived[running.source] += count
            if count == len(operation.keys):
                self._due[wanted.seq] = wanted
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
        for running in self._running.values():
            running.counts, running.waits = False, []
        for wanted in list(self._waits.values()):
            self._let_go(wanted)
        self.let_go()

    def _hit(self, wanted: Wanted, memory: KVMemory) -> int:
        """Pages of it that the tree has."""
        return memory.peek(wanted.tree, wanted.tokens, wanted.limit * memory.page_size)[1] // memory.page_size

    def _is_elsewhere(self, wanted: Wanted, at: int) -> bool:
        self._keys.extend(wanted.keys, self._keys.root(wanted.tree), wanted.tokens, wanted.limit)
        key = wanted.keys[at]
        return key in self._host or key in self._stored or key in self._coming

    def _run(self, wanted: Wanted, first: int) -> tuple[Tier | None, int]:
        """Where page `first` is, and how many from there on are in one place. None: it is on its way."""
        rest = wanted.keys[first : wanted.limit]
        if rest[0] in self._coming:
            return None, 0
        for tier, held in ((Tier.HOST, self._host), (Tier.STORAGE, self._stored)):
            if count := leading(rest, held):
                return tier, count
        return None, 0

    def _move_on(self, wanted: Wanted, memory: KVMemory, now: float) -> PageOperation | None:
        """The next operation for a request that waits. None: it waits for one that is under way, or there is none to come."""
        if wanted.let_go:
            return None
        match = memory.match(wanted.tree, wanted.tokens, wanted.limit * memory.page_size)
        first = len(match.pages)
        self._pin(wanted.seq, match.node, memory)
        if first >= wanted.limit or not self._is_elsewhere(wanted, first):
            return None
        coming = self._coming.get(wanted.keys[first])
        if coming is not None:
            if coming.counts and not coming.late:
                coming.waits.append(wanted)
            return None
        source, count = self._run(wanted, first)
        assert source is not None, "a page that is elsewhere is in a tier"
        room = min(count, self._at_once, self._room(wanted, first, memory))
        if room <= 0 or not self.rates.reading_pays(source, count):
            return None
        return self._begin(wanted, match.node, source, first, room, memory, now)

    def _begin(
        self, wanted: Wanted, node: TreeNode, source: Tier, first: int, count: int, memory: KVMemory, now: float
    ) -> PageOperation:
        keys = tuple(wanted.keys[first : first + count])
        while any(key in self._coming for key in keys):
            keys = keys[: next(i for i, key in enumerate(keys) if key in self._coming)]
        memory.pin(node)
        pages = memory.quarantine(len(keys))
        host_pages = self._host.pin(keys) if source is Tier.HOST else NO_PAGES
        self._host.touch(wanted.keys)
        operation = PageOperation(self._ids.next(), _KINDS[source], keys, pages, host_pages)
        running = _Operation(operation, source, wanted, node, first, now, memory, [wanted])
        self._running[operation.op_id] = running
        self._coming |= dict.fromkeys(keys, running)
        return operation

    def _room(self, wanted: Wanted, first: int, memory: KVMemory) -> int:
        """Pages that an operation may take: what is left has room for one request, this one."""
        rest = -(-len(wanted.tokens) // (TOKEN_BYTES * memory.page_size)) - first + 1
        quarantined = memory.pages.num_pages // MOST_QUARANTINED_SHARE - len(memory.quarantined)
        return min(quarantined, memory.num_available - rest)

    def _publish(self, running: _Operation, count: int) -> None:
        wanted, operation, memory = running.wanted, running.operation, running.memory
        size = memory.page_size * TOKEN_BYTES
        tokens = wanted.tokens[running.first * size : (running.first + count) * size]
        assert running.node.depth == running.first, "an operation's pages hang where its prompt's hit ended"
        memory.publish_quarantined(running.node, tokens, operation.pages[:count], wanted.rank, operation.keys[:count])

    def _give_up_late(self, running: _Operation, now: float) -> None:
        """Those that wait for it compute the rest; it goes on."""
        elapsed, count = now - running.began, len(running.operation.keys)
        if running.late or not self.rates.is_over(running.source, count, elapsed):
            return
        running.late = True
        self.rates.given_up(running.source, count, elapsed)
        self.given_up_total += 1
        for wanted in running.waits:
            self._let_go(wanted)
        running.waits = []

    def _let_go(self, wanted: Wanted) -> None:
        """It does not wait any more: the next plan says so."""
        wanted.let_go = True
        self._due[wanted.seq] = wanted

    def _pin(self, seq: int, node: TreeNode, memory: KVMemory) -> None:
        """In place of what was pinned for it before."""
        memory.pin(node)
        self._unpin(seq)
        self._pinned[seq] = node, memory

    def _unpin(self, seq: int) -> None:
        if (pinned := self._pinned.pop(seq, None)) is not None:
            node, memory = pinned
            memory.unpin(node)
