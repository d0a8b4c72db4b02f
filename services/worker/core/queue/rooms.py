"""The rooms of this worker, and those of others that its requests were to be read from.

A room is a pin on the pages of a prompt, and holds no slot. It ends when its reader or its front end has left, when its time is
over, or when the device's pages are given up; what is pinned by nobody else may be evicted then. Single owner: RequestTable.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from services.worker.core.contracts.rooms import OpenRoom, Room, RoomEvents, Source
from services.worker.core.contracts.tree_name import is_retired
from services.worker.core.kv.memory import KVMemory
from services.worker.core.kv.tree_node import TreeNode


@dataclass(frozen=True, slots=True)
class _Held:
    room: Room
    asker: tuple[int, int]
    node: TreeNode
    memory: KVMemory
    until: float


class Rooms:
    """hold_s: that a room stands if nobody ends it. next_look: when expire() has something to
    say. expired_total: rooms whose time was over. opened_total: all."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._held: dict[int, _Held] = {}  # by number, in the order in which they expire
        self._opened: list[OpenRoom] = []
        self._closed: list[Room] = []
        self._left: list[Source] = []
        self._freed = False
        self.next_look = inf
        self.opened_total = self.expired_total = 0

    def __len__(self) -> int:
        return len(self._held)

    def open(self, opened: OpenRoom, asker: tuple[int, int], node: TreeNode, memory: KVMemory, now: float) -> None:
        """node: where its pages end in the tree. asker: peer and handle of the request whose room it is."""
        room = opened.room
        assert room.number not in self._held, "a room's number is used once"
        assert node.depth == len(opened.pages) > 0, "a room has the pages up to its node"
        memory.pin(node)
        self._held[room.number] = _Held(room, asker, node, memory, until := now + self._hold_s)
        self.next_look = min(self.next_look, until)
        self._opened.append(opened)
        self.opened_total += 1

    def leave(self, room: Room) -> None:
        """Its reader has left. One that has ended is none any more."""
        held = self._held.get(room.number)
        if held is not None and held.room == room:
            self._end(held)

    def leave_asker(self, asker: tuple[int, int]) -> None:
        """The request has gone, and nobody will read."""
        for held in [each for each in self._held.values() if each.asker == asker]:
            self._end(held)

    def leave_peer(self, peer: int) -> None:
        """A front end is gone, and with it who would have read."""
        for held in [each for each in self._held.values() if each.asker[0] == peer]:
            self._end(held)

    def expire(self, now: float) -> bool:
        """Ends those whose time is over. Whether pages may have become evictable since the last call."""
        while self._held and (first := next(iter(self._held.values()))).until <= now:
            self._end(first)
            self.expired_total += 1
        self.next_look = next((held.until for held in self._held.values()), inf)
        freed, self._freed = self._freed, False
        return freed

    def end_all(self) -> None:
        """The device's pages are given up, or hold what counts no more."""
        for held in list(self._held.values()):
            self._end(held)

    def end_retired(self) -> None:
        """What is in trees that are retired counts no more: others would find it again with whoever came to read it."""
        for held in [each for each in self._held.values() if is_retired(_tree_of(each.node))]:
            self._end(held)

    def done_with(self, source: Source) -> None:
        """Nothing more is wanted of another worker's room."""
        self._left.append(source)

    def take(self) -> RoomEvents | None:
        """What has happened since the last call."""
        if not (self._opened or self._closed or self._left):
            return None
        events = RoomEvents(tuple(self._opened), tuple(self._closed), tuple(self._left))
        self._opened, self._closed, self._left = [], [], []
        return events

    def _end(self, held: _Held) -> None:
        self._freed = True
        self.next_look = -inf
        del self._held[held.room.number]
        held.memory.unpin(held.node)
        self._closed.append(held.room)


def _tree_of(node: TreeNode) -> str:
    """The name of the tree that it is in."""
    while node.parent is not None:
        node = node.parent
    return node.key.decode()
