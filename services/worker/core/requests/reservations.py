"""The rooms of this worker, and those of others that its requests were to be read from.

A room is a pin on the pages of a prompt, and holds no slot. It opens with the first pages of a prompt that are computed, grows
with further ones, and is *whole* once the prompt is. It ends when its reader or its front end has left, when its time is over, or
when the device's pages are given up; what is pinned by nobody else may be evicted then. One that has ended while it grew opens
once more, whole. One that still grows is not ended by readers, but with its request; its time runs, and its pins are wishes, only
while that waits. A reader's word is of the room as that reader knew it: where it has been opened again, or has grown, meanwhile,
the word ends nothing. Single owner: RequestLifecycle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from services.worker.core.contracts.reservations import (
    KvReservation,
    KvSource,
    OpenReservation,
    ReservationEvents,
    ReservationReleased,
)
from services.worker.core.contracts.tree_name import is_retired
from services.worker.core.kv.memory import KVMemory
from services.worker.core.kv.tree_node import TreeNode


@dataclass(slots=True, eq=False)
class _Held:
    """opening: the last one. until: inf while its request computes. node: where its pages end in the tree."""

    room: KvReservation
    opening: int
    asker: tuple[int, int]
    node: TreeNode
    memory: KVMemory
    until: float
    whole: bool


class KvReservations:
    """hold_s: that a room stands if nobody ends it. next_look: when expire() has something to
    say. expired_total: rooms whose time was over. opened_total: all."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._held: dict[int, _Held] = {}  # by number
        self._opened: list[OpenReservation] = []
        self._closed: list[KvReservation] = []
        self._left: list[KvSource] = []
        self._freed = False
        self._openings = 0
        self.next_look = inf
        self.opened_total = self.expired_total = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def may_end(self) -> bool:
        """There is one whose time runs."""
        return any(held.until < inf for held in self._held.values())

    def stands(self, room: KvReservation) -> bool:
        return room.number in self._held

    def open(self, opened: OpenReservation, asker: tuple[int, int], node: TreeNode, memory: KVMemory) -> None:
        """With the first pages of a prompt that is being computed; or one that stands, with further ones. node: where its pages
        end in the tree. asker: peer and handle of the request whose room it is."""
        assert node.depth == len(opened.pages) > 0, "a room has the pages up to its node"
        memory.pin(node)
        self._openings += 1
        held = self._held.get(opened.room.number)
        if held is None:
            self._held[opened.room.number] = _Held(opened.room, self._openings, asker, node, memory, inf, False)
            self.opened_total += 1
        else:
            assert not held.whole and node.depth >= held.node.depth, "a room grows while its prompt is computed"
            held.memory.unpin(held.node)
            held.opening, held.node, held.until = self._openings, node, inf
        self._opened.append(replace(opened, opening=self._openings))

    def complete(self, room: KvReservation, now: float) -> None:
        """The room, which stands, gets no more pages: from here on its time runs, and its reader may end it."""
        held = self._held[room.number]
        held.whole = True
        self._run_out(held, now)

    def wait(self, room: KvReservation, now: float) -> None:
        """The request of a room that grows, if there is one, has been put back: it may not come to its further pages in time."""
        if (held := self._held.get(room.number)) is not None:
            self._run_out(held, now)

    def go_on(self, room: KvReservation) -> None:
        """It computes again."""
        if (held := self._held.get(room.number)) is not None:
            held.until = inf

    def let_go(self) -> bool:
        """Pages are wanted by who computes: rooms of prompts that wait are ended. Whether there were any."""
        waiting = [held for held in self._held.values() if not held.whole and held.until < inf]
        for held in waiting:
            self._end(held)
        return bool(waiting)

    def leave(self, left: ReservationReleased) -> None:
        """Its reader has left it as it was then. One that has ended is none any more; one that grows may have another reader yet,
        as may one that has been opened again since."""
        held = self._held.get(left.room.number)
        if held is not None and held.room == left.room and held.whole and held.opening == left.opening:
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
        for held in [each for each in self._held.values() if each.until <= now]:
            self._end(held)
            self.expired_total += 1
        self.next_look = min((held.until for held in self._held.values()), default=inf)
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

    def done_with(self, source: KvSource) -> None:
        """Nothing more is wanted of another worker's room."""
        self._left.append(source)

    def take(self) -> ReservationEvents | None:
        """What has happened since the last call, in the order of ReservationEvents."""
        if not (self._opened or self._closed or self._left):
            return None
        events = ReservationEvents(tuple(self._closed), tuple(self._opened), tuple(self._left))
        self._opened, self._closed, self._left = [], [], []
        return events

    def _run_out(self, held: _Held, now: float) -> None:
        held.until = now + self._hold_s
        self.next_look = min(self.next_look, held.until)

    def _end(self, held: _Held) -> None:
        """Its request may have ended before it, and offered the host nothing of what was in it."""
        self._freed = True
        self.next_look = -inf
        del self._held[held.room.number]
        held.memory.unpin(held.node, used=True)
        self._opened = [opened for opened in self._opened if opened.room.number != held.room.number]
        self._closed.append(held.room)


def _tree_of(node: TreeNode) -> str:
    """The name of the tree that it is in."""
    while node.parent is not None:
        node = node.parent
    return node.key.decode()
