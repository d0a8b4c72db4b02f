"""The rooms that stand, and copies of their pages while they do.

One lock orders three things: that a room is shut, that a copy of its pages begins, and that a copy which has ended is given out.
A copy begins only while its room stands, and is given out only where the room still stands after it has ended: so it ended before
the room was shut, and all of it was read of pages that nobody could write. Whatever is still being copied when a room is shut,
or begins to be later, is given to nobody. The pages themselves are copied without the lock: `shut` waits for no copy.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from services.worker.core.contracts.reservations import KvReservation, OpenReservation, ReservationReleased
from services.worker.core.contracts.transfers import I32
from services.worker.exec.contracts.peer_pages import ReadPages
from services.worker.exec.peers.frames import pack_room


@dataclass(slots=True, eq=False)
class StandingRoom:
    """room: with the pages that it has by now. key: all that a reader has to know. reader: by what it was read last, as it is.
    left: who reads it wants nothing more, as it is. Of OpenRooms alone but for `room`; one that is shut never stands
    again: a room that is opened anew is another one."""

    room: OpenReservation
    key: bytes
    reader: object | None = None
    left: bool = False


class OpenRooms:
    """Called on any thread. read_pages: a ReadPages."""

    def __init__(self, read_pages: ReadPages) -> None:
        self._read_pages = read_pages
        self._standing: dict[int, StandingRoom] = {}
        self._copying = 0
        self._changed = threading.Condition()

    def open(self, room: OpenReservation) -> None:
        """One that stands gets further pages, and may be left once more: who left it, or has read it, knew of no more than it
        had."""
        key = pack_room(room.room)
        with self._changed:
            standing = self._standing.setdefault(room.room.number, StandingRoom(room, key))
            assert standing.key == key, "a room's number is no other room's"
            assert len(room.pages) >= len(standing.room.pages), "a room that stands only grows"
            standing.room, standing.reader, standing.left = room, None, False

    def shut(self, rooms: Sequence[KvReservation]) -> None:
        """Those that do not stand are passed over."""
        with self._changed:
            for room in rooms:
                self._standing.pop(room.number, None)

    def shut_all(self) -> None:
        """Returns when nothing is copied any more."""
        with self._changed:
            self._standing.clear()
            self._changed.wait_for(lambda: not self._copying)

    def find(self, room: KvReservation) -> StandingRoom | None:
        """None if there is none of this number, epoch and secret."""
        key = pack_room(room)
        with self._changed:
            standing = self._standing.get(room.number)
        if standing is None or not hmac.compare_digest(standing.key, key):
            return None
        return standing

    def copy(self, standing: StandingRoom, pages: I32, out: memoryview) -> bool:
        """Fills `out` with the pages of that room. False if it does not stand after they were copied: nobody is given what is in
        `out`, then. Raises what read_pages raises."""
        with self._changed:
            if not self._stands(standing):
                return False
            self._copying += 1  # in one step with the look at the room: shut_all does not return in between
        try:
            self._read_pages(pages, out)
        finally:
            with self._changed:
                self._copying -= 1
                stands = self._stands(standing)  # after the copy has ended: see above
                self._changed.notify_all()
        return stands

    def was_read(self, standing: StandingRoom, opened: OpenReservation, reader: object) -> None:
        """opened: as which it was read. reader: by which it was read last."""
        with self._changed:
            if standing.room is opened:
                standing.reader = reader

    def leave(self, room: KvReservation) -> list[ReservationReleased]:
        """The room, if it stands and is not left yet: who names it is taken to know it as it is."""
        standing = self.find(room)
        return self._leave([] if standing is None else [standing])

    def reader_gone(self, reader: object) -> list[ReservationReleased]:
        """Rooms that are left with it: which stand, were read by it last as they are, and are not left yet."""
        with self._changed:
            read = [standing for standing in self._standing.values() if standing.reader is reader]
        return self._leave(read)

    def _leave(self, rooms: Sequence[StandingRoom]) -> list[ReservationReleased]:
        with self._changed:
            news = [standing for standing in rooms if self._stands(standing) and not standing.left]
            for standing in news:
                standing.left = True
            return [ReservationReleased(standing.room.room, standing.room.opening) for standing in news]

    def _stands(self, standing: StandingRoom) -> bool:
        """With the lock. The very same one, not another of its number."""
        return self._standing.get(standing.room.room.number) is standing
