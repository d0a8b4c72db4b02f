"""The KV reservations that this worker offers, and the remote reservations that it no longer reads.

A reservation pins the pages of a prompt and has no slot. RequestLifecycle is the owner. The states are:

  GROWING   the request computes its prompt, and each chunk adds pages; no time limit
  WAITING   the request was retracted before its prompt was computed; the time limit runs
  COMPLETE  the prompt is computed and the request has ended; the time limit runs
  ENDED     the pages are unpinned

  none ──► GROWING       the first pages of the prompt are computed
  GROWING ──► WAITING    the request is retracted
  WAITING ──► GROWING    the request is admitted again
  GROWING ──► COMPLETE   the request is handed over
  WAITING ──► COMPLETE   the same, after the retraction of a request whose last token was in flight
  WAITING ──► ENDED      the time limit is reached, or running requests need pages
  COMPLETE ──► ENDED     the time limit is reached, or the reader releases the reservation
  ENDED ──► COMPLETE     the request is handed over after its reservation ended in the state WAITING
  any ──► ENDED          the request ends without a handover or is aborted later, its gateway stream ends, its salt is deleted,
                         or the device pages are reset

Each addition of pages is an opening with a number. A reader's release names the opening that was read, and has no effect after a
later opening.
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
    """A reservation in any state but ENDED."""

    room: KvReservation
    opening: int  # number of the last opening
    asker: tuple[int, int]  # (peer, handle) of its request
    node: TreeNode  # end of its pages in the tree
    memory: KVMemory
    until: float  # time limit, absolute; inf in the state GROWING
    whole: bool  # True in the state COMPLETE


class KvReservations:
    """The reservations that have not ended, and the events for the executor."""

    def __init__(self, hold_s: float) -> None:
        """Starts empty. `hold_s` is the time limit of reservations in seconds."""
        self._hold_s = hold_s
        self._held: dict[int, _Held] = {}  # by number
        self._opened: list[OpenReservation] = []
        self._closed: list[KvReservation] = []
        self._left: list[KvSource] = []  # remote reservations that this worker no longer reads
        self._freed = False  # whether a reservation has ended since the last expire()
        self._openings = 0
        self.next_look = inf  # expire() has nothing to do before this time
        self.opened_total = 0
        self.expired_total = 0  # reservations that reached their time limit

    def __len__(self) -> int:
        return len(self._held)

    @property
    def may_end(self) -> bool:
        """Whether a reservation has a time limit, so that its pages may become evictable without a step."""
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
        assert node.depth == len(opened.pages) > 0, "a reservation has the pages up to its node"
        memory.pin(node)
        self._openings += 1
        held = self._held.get(opened.room.number)
        if held is None:
            self._held[opened.room.number] = _Held(opened.room, self._openings, asker, node, memory, inf, False)
            self.opened_total += 1
        else:
            assert not held.whole and node.depth >= held.node.depth, "a reservation grows only while its prompt is computed"
            held.memory.unpin(held.node)
            held.opening, held.node, held.until = self._openings, node, inf
        self._opened.append(replace(opened, opening=self._openings))

    def complete(self, room: KvReservation, now: float) -> None:
        """Moves an open reservation to the state COMPLETE, and starts its time limit. Its reader may now release it."""
        held = self._held[room.number]
        held.whole = True
        self._run_out(held, now)

    def wait(self, room: KvReservation, now: float) -> None:
        """Moves a reservation to the state WAITING, if it is open, because its request was retracted."""
        if (held := self._held.get(room.number)) is not None:
            self._run_out(held, now)

    def go_on(self, room: KvReservation) -> None:
        """Moves a reservation to the state GROWING, if it is open, because its request is admitted again."""
        if (held := self._held.get(room.number)) is not None:
            held.until = inf

    def let_go(self) -> bool:
        """Ends all reservations in the state WAITING, because running requests need pages. Returns whether there were any."""
        waiting = [held for held in self._held.values() if not held.whole and held.until < inf]
        for held in waiting:
            self._end(held)
        return bool(waiting)

    def leave(self, left: ReservationReleased) -> None:
        """Ends a reservation that its reader has released, if it is COMPLETE and the reader has read its last opening.

        Otherwise the reservation stays, because another reader may follow.
        """
        held = self._held.get(left.room.number)
        if held is not None and held.room == left.room and held.whole and held.opening == left.opening:
            self._end(held)

    def leave_asker(self, asker: tuple[int, int]) -> None:
        """Ends the reservations of an aborted request, because no worker will read them."""
        for held in [each for each in self._held.values() if each.asker == asker]:
            self._end(held)

    def leave_peer(self, peer: int) -> None:
        """Ends the reservations of a gateway whose stream has ended, because no worker will read them."""
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
        """Ends the reservations in retired trees. Otherwise readers would copy pages of a deleted salt to other workers."""
        for held in [each for each in self._held.values() if is_retired(_tree_of(each.node))]:
            self._end(held)

    def done_with(self, source: KvSource) -> None:
        """Records that this worker no longer reads a reservation in another worker."""
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

        Unpins them with used=True, so that the tree offers them for a backup. When their request ended, the reservation's pin may
        have prevented that.
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
