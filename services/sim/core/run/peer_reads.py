"""KV that simulated workers read from one another: a time for each read, and whether its room stood. No bytes move."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.worker.core.contracts.rooms import OpenRoom, Room, RoomEvents, RoomLeft, Source, proof
from services.worker.core.contracts.transfers import Fact, OperationKind, PageOperation, Pull
from services.worker.core.kv.tree_node import TOKEN_BYTES

READ_TIMEOUT_S = 10.0  # after which a reader gives a read up (services/worker/exec/peers/peer_reader.py)


@dataclass(frozen=True, slots=True)
class Wire:
    """From any worker to any other. bytes_per_s: 0: nothing arrives. latency_s: of every read."""

    bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if not self.bytes_per_s >= 0 or not self.latency_s >= 0:
            raise ValueError("a transfer's bandwidth and latency are not negative")

    def seconds(self, num_bytes: int) -> float:
        """READ_TIMEOUT_S for what takes longer: it does not arrive."""
        if not self.bytes_per_s:
            return READ_TIMEOUT_S
        return min(self.latency_s + num_bytes / self.bytes_per_s, READ_TIMEOUT_S)

    def carries(self, num_bytes: int) -> bool:
        return self.seconds(num_bytes) < READ_TIMEOUT_S


NO_WIRE = Wire(0.0, 0.0)


class StandingRooms:
    """Of all workers of a simulation, by the address at which they are read. Each worker writes those of its own address."""

    def __init__(self) -> None:
        self._rooms: dict[str, dict[int, OpenRoom]] = {}

    def tell(self, address: str, events: RoomEvents) -> None:
        rooms = self._rooms.setdefault(address, {})
        for room in events.closed:
            rooms.pop(room.number, None)
        rooms |= {opened.room.number: opened for opened in events.opened}

    def count(self, address: str) -> int:
        return len(self._rooms.get(address, ()))

    def drop(self, address: str) -> None:
        """That worker is gone, and its rooms with it."""
        self._rooms.pop(address, None)

    def find(self, address: str, room: Room) -> OpenRoom | None:
        """As it is at that worker by now."""
        opened = self._rooms.get(address, {}).get(room.number)
        return opened if opened is not None and opened.room == room else None

    def let(self, pull: Pull, count: int, page_size: int) -> bool:
        """Whether so many pages may be read: their room stands, and who asks knows what they are of."""
        opened = self.find(pull.source.address, pull.source.room)
        if opened is None:
            return False
        end = pull.first + count
        tokens = opened.tokens[: end * page_size * TOKEN_BYTES]
        return end <= len(opened.pages) and proof(opened.room.secret, opened.tree, tokens) == pull.proof


@dataclass(frozen=True, slots=True)
class _Read:
    operation: PageOperation
    pull: Pull
    end: float
    seconds: float


class PeerReads:
    """The reads of one worker, and the rooms that it keeps for others' at its `address`. What is read from one address is read
    one after another; reads from several do not slow each other down. left: told of rooms of others that nothing more is wanted
    of, and when the word leaves. read_bytes: that have come, since the start. page_bytes: of one page's KV."""

    def __init__(
        self,
        address: str,
        standing: StandingRooms,
        wire: Wire,
        page_bytes: int,
        page_size: int,
        left: Callable[[Source, float], None],
    ) -> None:
        self._address, self._standing, self._wire = address, standing, wire
        self.page_bytes, self._page_size, self._left = page_bytes, page_size, left
        self._lanes: dict[str, deque[_Read]] = {}  # by the address that is read
        self.read_bytes = 0

    @property
    def num_rooms(self) -> int:
        """That it keeps."""
        return self._standing.count(self._address)

    def rooms(self, events: RoomEvents, now: float) -> None:
        self._standing.tell(self._address, events)
        for source in events.left:
            lane = self._lanes.get(source.address)
            self._left(source, lane[-1].end if lane else now)

    def left_here(self, room: Room) -> RoomLeft | None:
        """The word of a reader of one of its own has come. None: it does not stand any more."""
        opened = self._standing.find(self._address, room)
        return None if opened is None else RoomLeft(room, opened.opening)

    def begin(self, operations: Sequence[PageOperation], at: float) -> None:
        """at: when every step has ended that was launched before."""
        for operation in operations:
            assert operation.kind is OperationKind.PULL and operation.pull is not None, "a simulation has one tier, and peers"
            lane = self._lanes.setdefault(operation.pull.source.address, deque())
            begin = max(at, lane[-1].end) if lane else at
            seconds = self._wire.seconds(len(operation.keys) * self.page_bytes)
            lane.append(_Read(operation, operation.pull, begin + seconds, seconds))

    def next_end(self) -> float | None:
        """When the next read will have ended. None: none is under way."""
        return min((lane[0].end for lane in self._lanes.values()), default=None)

    def ended(self, now: float) -> list[Fact]:
        """All pages of a read have come, or none."""
        facts: list[Fact] = []
        for address, lane in list(self._lanes.items()):
            while lane and lane[0].end <= now:
                facts.append(self._fact(lane.popleft()))
            if not lane:
                del self._lanes[address]
        return facts

    def _fact(self, read: _Read) -> Fact:
        pages = len(read.operation.keys)
        if not self._wire.carries(pages * self.page_bytes) or not self._standing.let(read.pull, pages, self._page_size):
            return Fact(read.operation.op_id)
        self.read_bytes += pages * self.page_bytes
        return Fact(read.operation.op_id, pages, read.seconds)
