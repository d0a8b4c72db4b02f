"""The KV reservations of this worker, and the KV sources that its requests need no longer.

A reservation pins the pages of a prompt and has no slot. It opens with the first computed pages and grows with further pages. It
is whole when the prompt is computed.

A reservation ends when its reader or its gateway has left, when its time limit is reached, or when the device pages are reset. If
it ends while it grows, it opens once more when it is whole. While it grows, only its request can end it, and a reader cannot. Its
time runs, and its pins may be released, only while that request waits. A reader's release names an opening and has no effect
after a later opening. RequestLifecycle is the owner.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from rootstock_llm.services.worker.core.contracts.reservations import (
    KvReservation,
    KvSource,
    OpenReservation,
    ReservationEvents,
    ReservationReleased,
)
from rootstock_llm.services.worker.core.kv.memory import KVMemory
from rootstock_llm.services.worker.core.kv.radix_cache import is_retired
from rootstock_llm.services.worker.core.kv.tree_node import TreeNode


@dataclass(slots=True, eq=False)
class _Held:
    """An open reservation."""

    room: KvReservation
    opening: int  # number of the last opening
    asker: tuple[int, int]  # (peer, handle) of its request
    node: TreeNode  # end of its pages in the tree
    memory: KVMemory
    until: float  # time limit; inf while its request computes
    whole: bool  # whether the whole prompt is computed


class KvReservations:
    """The open reservations by number, and the events for the executor."""

    def __init__(self, hold_s: float) -> None:
        """Starts empty. A reservation ends after `hold_s` seconds if its reader does not end it."""
        self._hold_s = hold_s
        self._held: dict[int, _Held] = {}  # by number
        self._opened: list[OpenReservation] = []
        self._closed: list[KvReservation] = []
        self._left: list[KvSource] = []  # KV sources that this worker needs no longer
        self._freed = False  # whether a reservation has ended since the last expire()
        self._openings = 0
        self.next_look = inf  # time from which on expire() has something to do
        self.opened_total = 0
        self.expired_total = 0  # reservations that reached their time limit

    def __len__(self) -> int:
        return len(self._held)

    @property
    def may_end(self) -> bool:
        """Whether a reservation has a time limit, so that it may end without a step."""
        return any(held.until < inf for held in self._held.values())

    def stands(self, room: KvReservation) -> bool:
        return room.number in self._held

    def open(self, opened: OpenReservation, asker: tuple[int, int], node: TreeNode, memory: KVMemory) -> None:
        """Opens a reservation with the first pages of a prompt, or adds pages to an open one.

        Args:
            opened: the reservation with all of its pages.
            asker: peer and handle of its request.
            node: end of the pages in the tree.
            memory: the owner of the pages.
        """
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
        """Marks an open reservation as whole. From now on its time runs, and its reader may end it."""
        held = self._held[room.number]
        held.whole = True
        self._run_out(held, now)

    def wait(self, room: KvReservation, now: float) -> None:
        """Starts the time limit of a growing reservation, if it is open, because its request was retracted."""
        if (held := self._held.get(room.number)) is not None:
            self._run_out(held, now)

    def go_on(self, room: KvReservation) -> None:
        """Removes the time limit of a growing reservation, because its request computes again."""
        if (held := self._held.get(room.number)) is not None:
            held.until = inf

    def let_go(self) -> bool:
        """Ends the reservations of waiting prompts, because running requests need pages. Returns whether there were any."""
        waiting = [held for held in self._held.values() if not held.whole and held.until < inf]
        for held in waiting:
            self._end(held)
        return bool(waiting)

    def leave(self, left: ReservationReleased) -> None:
        """Ends a whole reservation that its reader has released, unless it was opened again since.

        A growing reservation stays, because another reader may follow.
        """
        held = self._held.get(left.room.number)
        if held is not None and held.room == left.room and held.whole and held.opening == left.opening:
            self._end(held)

    def leave_asker(self, asker: tuple[int, int]) -> None:
        """Ends the reservations of a request that was cancelled, because no reader will come."""
        for held in [each for each in self._held.values() if each.asker == asker]:
            self._end(held)

    def leave_peer(self, peer: int) -> None:
        """Ends the reservations of a gateway whose stream has ended, because no reader will come."""
        for held in [each for each in self._held.values() if each.asker[0] == peer]:
            self._end(held)

    def expire(self, now: float) -> bool:
        """Ends the reservations that have reached their time limit.

        Returns:
            Whether pages may have become evictable since the last call.
        """
        for held in [each for each in self._held.values() if each.until <= now]:
            self._end(held)
            self.expired_total += 1
        self.next_look = min((held.until for held in self._held.values()), default=inf)
        freed, self._freed = self._freed, False
        return freed

    def end_all(self) -> None:
        """Ends all reservations, because the device pages are reset or invalid."""
        for held in list(self._held.values()):
            self._end(held)

    def end_retired(self) -> None:
        """Ends the reservations in retired trees, because a reader would copy the deleted pages to another worker."""
        for held in [each for each in self._held.values() if is_retired(_tree_of(each.node))]:
            self._end(held)

    def done_with(self, source: KvSource) -> None:
        """Records that this worker needs a reservation in another worker no longer."""
        self._left.append(source)

    def take(self) -> ReservationEvents | None:
        """Returns the events since the last call, or None."""
        if not (self._opened or self._closed or self._left):
            return None
        events = ReservationEvents(tuple(self._closed), tuple(self._opened), tuple(self._left))
        self._opened, self._closed, self._left = [], [], []
        return events

    def _run_out(self, held: _Held, now: float) -> None:
        """Starts the time limit of a reservation."""
        held.until = now + self._hold_s
        self.next_look = min(self.next_look, held.until)

    def _end(self, held: _Held) -> None:
        """Ends a reservation and unpins its pages.

        They are unpinned as used pages, so that the tree offers them for a copy. The end of their request may not have offered
        them.
        """
        self._freed = True
        self.next_look = -inf
        del self._held[held.room.number]
        held.memory.unpin(held.node, used=True)
        self._opened = [opened for opened in self._opened if opened.room.number != held.room.number]
        self._closed.append(held.room)


def _tree_of(node: TreeNode) -> str:
    """Returns the name of the tree of a node."""
    while node.parent is not None:
        node = node.parent
    return node.key.decode()
