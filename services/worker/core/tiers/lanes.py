"""The running import operations by lane. A lane is a tier or a remote worker; it performs its reads one after another.

Lanes records which operation of a lane is being performed, since when, and whether it is late. Imports begins and ends the
operations. Tiers is the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rootstock_llm.services.worker.core.contracts.reservations import KvSource, Prover
from rootstock_llm.services.worker.core.contracts.transfers import Fact, OperationKind, PageOperation, Tier
from rootstock_llm.services.worker.core.kv.memory import KVMemory
from rootstock_llm.services.worker.core.kv.other_tiers import Wanted
from rootstock_llm.services.worker.core.kv.tree_node import TreeNode
from rootstock_llm.services.worker.core.tiers.rates import Rates


@dataclass(frozen=True, slots=True)
class Place:
    """The tier or the remote worker from which an operation reads."""

    tier: Tier
    source: KvSource | None = None  # reservation in the remote worker; unset for tiers of this worker

    @property
    def lane(self) -> str:
        """Name of the lane: the tier, or the address of the remote worker."""
        return self.tier if self.source is None else self.source.address

    @property
    def kind(self) -> OperationKind:
        """Kind of the operations that read from it."""
        return _KINDS[self.tier]


_KINDS = {Tier.HOST: OperationKind.LOAD, Tier.STORAGE: OperationKind.FETCH, Tier.PEER: OperationKind.PULL}
HOST, STORAGE = Place(Tier.HOST), Place(Tier.STORAGE)


@dataclass(slots=True, eq=False)
class RunningImport:
    """An unfinished import operation. After its creation, only Lanes changes it."""

    operation: PageOperation
    place: Place
    wanted: Wanted  # the request or prefetch for which it began
    # Pinned node before the pages, or before the unpublished pages of preceding operations. For units: at the request's target.
    node: TreeNode
    first: int  # index in the prompt of its first page, or of the page of its first unit
    memory: KVMemory
    began: float | None  # time at which all steps launched before this operation had ended; unset until then
    waits: list[Wanted] = field(default_factory=list)  # requests and prefetches that wait for it
    counts: bool = True  # whether its pages are published when it ends
    late: bool = False  # whether computing its pages would now be faster than waiting; new requests do not wait for it

    def compared(self, wanted: Wanted) -> tuple[int, int]:
        """Returns (pages and parts that a waiting request reads after this operation, pages that it would compute instead).

        Without cache groups, the second number is 0: the request would compute the pages that it reads.
        """
        if not wanted.num_rows:
            return wanted.limit - self.first - len(self.operation.keys), 0
        return max(wanted.num_rows - len(self.operation.keys), 0), wanted.end - wanted.hit


class Lanes:
    """The running import operations, and for each page that is being read, the operation that reads it."""

    def __init__(self, rates: Rates) -> None:
        """Starts without operations. Measured times are recorded in `rates`."""
        self._rates = rates
        self._running: dict[int, RunningImport] = {}
        self._free_at: dict[str, float] = {}  # for lanes with running operations: time at which the lane last ended an operation
        self.coming: dict[bytes, RunningImport] = {}  # running operation that reads a page, by page key
        self.num_landing = 0  # loads with an early fact (Fact.early) whose last bytes have not arrived
        self.given_up_total = 0  # operations for which requests stopped waiting

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[RunningImport]:
        return iter(self._running.values())

    @property
    def num_pages(self) -> int:
        """Number of device pages that the operations write."""
        return sum(len(running.operation.pages) for running in self if not running.operation.group)

    def num_units(self, index: int) -> int:
        """Returns the number of units of a cache group that the operations write."""
        return sum(len(running.operation.pages) for running in self if running.operation.group == 1 + index)

    def begin(self, running: RunningImport) -> None:
        self._running[running.operation.op_id] = running
        self.coming |= dict.fromkeys(running.operation.keys, running)

    def step_ended(self, now: float) -> None:
        """Sets `began` of operations that had to wait for a step, because all steps launched before them have ended now."""
        for running in self:
            if running.began is None:
                running.began = now

    def ended(self, fact: Fact, now: float) -> RunningImport | None:
        """Removes the operation of a fact and returns it. Returns None if the fact belongs to no import operation."""
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
        """Records that the oldest load with an early fact is complete. The time of the next load starts now."""
        assert self.num_landing, "an early fact precedes the end of its load"
        self.num_landing -= 1
        self._rates.moved(Tier.HOST, pages, seconds)
        if any(running.place is HOST for running in self):
            self._free_at[HOST.lane] = now

    def void(self, is_of: Callable[[Wanted], bool]) -> None:
        """Discards the results of operations whose request or prefetch fulfils is_of(). Ends the waits for these operations."""
        for running in self:
            if is_of(running.wanted):
                running.counts, running.waits = False, []

    def wait_for(self, running: RunningImport, wanted: Wanted) -> None:
        assert running.operation.op_id in self._running, "requests wait for running operations"
        running.waits.append(wanted)

    def is_awaited(self, wanted: Wanted) -> bool:
        """Returns whether the request or prefetch waits for a running operation."""
        return any(wanted in running.waits for running in self)

    def forget(self, wanted: Wanted) -> None:
        """Ends all waits of the request or prefetch."""
        for running in self:
            running.waits = [other for other in running.waits if other is not wanted]

    def is_stuck(self, lane: str) -> bool:
        """Returns whether the lane has a late operation."""
        return any(running.late and running.place.lane == lane for running in self)

    def give_up_late(self, now: float, still_waits: Callable[[Wanted], bool]) -> list[Wanted]:
        """Ends the waits for late operations, and for the operations that follow them in their lanes.

        The operations continue. Only the first operation of a lane can be late, because the lane has not begun the others.

        Args:
            now: present time.
            still_waits: returns whether a request or prefetch still waits and may need further operations.

        Returns:
            The requests and prefetches whose wait has ended.
        """
        given_up: list[Wanted] = []
        lanes: dict[str, list[RunningImport]] = {}
        for running in self:
            lanes.setdefault(running.place.lane, []).append(running)
        for lane, (first, *behind) in lanes.items():
            can_be_late = lane != HOST.lane or not self.num_landing
            if can_be_late and first.began is not None and not first.late:
                elapsed = now - max(first.began, self._free_at.get(lane, 0.0))
                given_up += self._end_late_waits(first, elapsed, first.wanted not in given_up and still_waits(first.wanted))
            for running in behind if first.late else ():
                given_up += running.waits
                self.given_up_total += bool(running.waits)
                running.waits = []
        return given_up

    def _end_late_waits(self, running: RunningImport, elapsed: float, still_waits: bool) -> list[Wanted]:
        """Marks an operation as late if computing its pages would be faster than waiting for it, and ends these waits.

        An operation for which no request waits can be late as well, because it delays the following operations of its lane. If
        `still_waits` is True, the comparison includes the request's pages after the operation's pages.

        Args:
            running: the first operation of a lane.
            elapsed: seconds since the lane began it.
            still_waits: whether the operation's request still waits for another operation and will need this one later.

        Returns:
            The requests and prefetches whose wait has ended.
        """
        tier, lane, count, wanted = running.place.tier, running.place.lane, len(running.operation.keys), running.wanted
        if not running.waits:
            rest, computed = running.compared(wanted) if still_waits else (0, 0)
            running.late = self._rates.is_over(tier, count, elapsed, rest, lane, computed)
            return []
        over = [w for w in running.waits if self._is_over(running, w, elapsed)]
        running.waits = [wanted for wanted in running.waits if wanted not in over]
        if over and not running.waits:
            running.late = True
            self._rates.given_up(tier, count, elapsed, lane)
            self.given_up_total += 1
        return over

    def _is_over(self, running: RunningImport, wanted: Wanted, elapsed: float) -> bool:
        """Returns whether computing would be faster than waiting, for a request that waits for the operation."""
        rest, computed = running.compared(wanted)
        place, count = running.place, len(running.operation.keys)
        return self._rates.is_over(place.tier, count, elapsed, rest, place.lane, computed)


def source_of(wanted: Wanted) -> Place | None:
    """Returns the remote worker from which the prompt can be read, or None."""
    source = wanted.source
    if source is None:
        return None
    assert isinstance(source, KvSource), "the source of a prompt is a KvSource"
    return Place(Tier.PEER, source)


def prover_of(wanted: Wanted) -> Prover | None:
    """Returns the maker of the proofs with which the prompt is read from a remote worker, or None without a remote worker."""
    source = wanted.source
    return Prover(source.reservation.secret, wanted.tree, wanted.tokens) if isinstance(source, KvSource) else None
