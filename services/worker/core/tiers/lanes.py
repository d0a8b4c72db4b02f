"""Operations under way, in lanes: places that are read one operation after another. Which of them has its turn, since when, and
whether it is late. Single owner: Tiers; Imports begins and ends them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from services.worker.core.contracts.reservations import KvSource
from services.worker.core.contracts.transfers import Fact, PageOperation, Tier
from services.worker.core.kv.memory import KVMemory
from services.worker.core.kv.other_tiers import Wanted
from services.worker.core.kv.tree_node import TreeNode
from services.worker.core.tiers.rates import Rates


@dataclass(frozen=True, slots=True)
class Place:
    """Where pages are read from. source: of a peer."""

    tier: Tier
    source: KvSource | None = None

    @property
    def lane(self) -> str:
        return self.tier if self.source is None else self.source.address


HOST, STORAGE = Place(Tier.HOST), Place(Tier.STORAGE)


@dataclass(slots=True, eq=False)
class Running:
    """An operation under way. node: of the tree, pinned: its pages hang there or behind those of the operation before it. first:
    the page of its prompt that it begins with. began: when the steps that it has to wait for had ended; None: they have not.
    waits: for it. counts: whether what it brings is published. late: nobody waits for it any more. Written by Lanes alone."""

    operation: PageOperation
    place: Place
    wanted: Wanted
    node: TreeNode
    first: int
    memory: KVMemory
    began: float | None
    waits: list[Wanted] = field(default_factory=list)
    counts: bool = True
    late: bool = False


class Lanes:
    """coming: the operation that brings a page, by its key. num_landing: loads whose facts came early, and whose last bytes are
    still on their way."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._running: dict[int, Running] = {}
        self._free_at: dict[str, float] = {}  # when a lane had its last operation done, of those that have some under way
        self.coming: dict[bytes, Running] = {}
        self.num_landing = 0
        self.given_up_total = 0

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Running]:
        return iter(self._running.values())

    @property
    def num_pages(self) -> int:
        """That are written."""
        return sum(len(running.operation.pages) for running in self)

    def begin(self, running: Running) -> None:
        self._running[running.operation.op_id] = running
        self.coming |= dict.fromkeys(running.operation.keys, running)

    def step_ended(self, now: float) -> None:
        """All steps that were launched before the operations under way have ended."""
        for running in self:
            if running.began is None:
                running.began = now

    def ended(self, fact: Fact, now: float) -> Running | None:
        """Takes it out. None: the fact is of no operation of these."""
        running = self._running.pop(fact.op_id, None)
        if running is None:
            return None
        for key in running.operation.keys:
            del self.coming[key]
        lane = running.place.lane
        self.num_landing += fact.early
        self._free_at[lane] = now
        if not any(each.place.lane == lane for each in self):
            del self._free_at[lane]
        self._rates.moved(running.place.tier, fact.count, fact.seconds, lane)
        return running

    def landed(self, pages: int, seconds: float, now: float) -> None:
        """The oldest load whose fact came early is there. The next one has its turn from now on."""
        assert self.num_landing, "only what was told of early lands later"
        self.num_landing -= 1
        self._rates.moved(Tier.HOST, pages, seconds)
        if any(running.place is HOST for running in self):
            self._free_at[HOST.lane] = now

    def void(self, is_of: Callable[[Wanted], bool]) -> None:
        """Those that were begun for one of these bring nothing that counts, and nobody waits for them."""
        for running in self:
            if is_of(running.wanted):
                running.counts, running.waits = False, []

    def wait_for(self, running: Running, wanted: Wanted) -> None:
        assert running.operation.op_id in self._running, "nobody waits for what has ended"
        running.waits.append(wanted)

    def is_awaited(self, wanted: Wanted) -> bool:
        """Whether it waits for one of them."""
        return any(wanted in running.waits for running in self)

    def forget(self, wanted: Wanted) -> None:
        """It waits for none of them any more."""
        for running in self:
            running.waits = [other for other in running.waits if other is not wanted]

    def is_stuck(self, lane: str) -> bool:
        """One of its operations is late."""
        return any(running.late and running.place.lane == lane for running in self)

    def give_up_late(self, now: float, comes: Callable[[Wanted], bool]) -> list[Wanted]:
        """Those who waited for an operation that is late, and for those behind it in its lane, and do not any more; it goes on.
        Of each lane only the one that has its turn can be late. comes: whether somebody waits for what is before an operation,
        and comes to it then."""
        let_go: list[Wanted] = []
        lanes: dict[str, list[Running]] = {}
        for running in self:
            lanes.setdefault(running.place.lane, []).append(running)
        for lane, (first, *behind) in lanes.items():
            has_its_turn = lane != HOST.lane or not self.num_landing
            if has_its_turn and first.began is not None and not first.late:
                elapsed = now - max(first.began, self._free_at.get(lane, 0.0))
                let_go += self._over(first, elapsed, first.wanted not in let_go and comes(first.wanted))
            for running in behind if first.late else ():
                let_go += running.waits
                self.given_up_total += bool(running.waits)
                running.waits = []
        return let_go

    def _over(self, running: Running, elapsed: float, comes: bool) -> list[Wanted]:
        """Who does not wait for it any more. elapsed: since it had its turn. One that nobody waits for any more keeps others
        waiting too. One whose request has yet to come to it, as it waits for one before it, is judged with what is behind it, as
        when it has come."""
        tier, lane, count, wanted = running.place.tier, running.place.lane, len(running.operation.keys), running.wanted
        if not running.waits:
            rest = wanted.limit - running.first - count if comes else 0
            running.late = self._rates.is_over(tier, count, elapsed, rest, lane)
            return []
        over = [w for w in running.waits if self._rates.is_over(tier, count, elapsed, w.limit - running.first - count, lane)]
        running.waits = [wanted for wanted in running.waits if wanted not in over]
        if over and not running.waits:
            running.late = True
            self._rates.given_up(tier, count, elapsed, lane)
            self.given_up_total += 1
        return over
