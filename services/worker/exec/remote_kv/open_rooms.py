"""The open KV reservations, and copies of their pages.

One lock orders three events: a reservation is closed, a copy of its pages begins, a finished copy is handed out. A copy begins
only while the reservation is open. It is handed out only if the reservation is still open after the copy has ended. So all its
bytes were read before the reservation was closed, when no step could write the pages. A copy that is running when the reservation
is closed is discarded. Pages are copied without the lock, so `shut` does not wait for copies.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from rootstock_llm.services.worker.core.contracts.reservations import KvReservation, OpenReservation, ReservationReleased
from rootstock_llm.services.worker.core.contracts.transfers import I32
from rootstock_llm.services.worker.exec.contracts.peer_pages import ReadPages
from rootstock_llm.services.worker.exec.remote_kv.frames import pack_room


@dataclass(slots=True, eq=False)
class StandingRoom:
    """An open reservation.

    OpenRooms alone uses the fields other than `room`. A closed reservation is never opened again under the same object: if its
    number is opened again, that is a new StandingRoom.
    """

    room: OpenReservation  # the reservation with its present pages
    key: bytes  # number, epoch and secret, packed; a reader must know all three
    reader: object | None = None  # last reader of the present version, None if there was no read
    left: bool = False  # a reader has released the present version


class OpenRooms:
    """The open reservations of a worker. Any thread may call it."""

    def __init__(self, read_pages: ReadPages) -> None:
        """Starts without reservations.

        Args:
            read_pages: copies pages out of the pool.
        """
        self._read_pages = read_pages
        self._standing: dict[int, StandingRoom] = {}
        self._copying = 0
        self._changed = threading.Condition()

    def open(self, room: OpenReservation) -> None:
        """Opens a reservation, or replaces an open one by its version with more pages.

        The new version has no reader and is not released, because earlier readers did not know its pages.
        """
        key = pack_room(room.room)
        with self._changed:
            standing = self._standing.setdefault(room.room.number, StandingRoom(room, key))
            assert standing.key == key, "a room's number is no other room's"
            assert len(room.pages) >= len(standing.room.pages), "a room that stands only grows"
            standing.room, standing.reader, standing.left = room, None, False

    def shut(self, rooms: Sequence[KvReservation]) -> None:
        """Closes reservations. Reservations that are not open are ignored."""
        with self._changed:
            for room in rooms:
                self._standing.pop(room.number, None)

    def shut_all(self) -> None:
        """Closes all reservations. Returns when no copy is running."""
        with self._changed:
            self._standing.clear()
            self._changed.wait_for(lambda: not self._copying)

    def find(self, room: KvReservation) -> StandingRoom | None:
        """Returns the open reservation with this number, epoch and secret, or None."""
        key = pack_room(room)
        with self._changed:
            standing = self._standing.get(room.number)
        if standing is None or not hmac.compare_digest(standing.key, key):
            return None
        return standing

    def copy(self, standing: StandingRoom, pages: I32, out: memoryview) -> bool:
        """Copies pages of a reservation into `out`. Raises the errors of read_pages.

        Returns:
            False if the reservation was closed before the copy ended. The bytes in `out` must then not be sent.
        """
        with self._changed:
            if not self._stands(standing):
                return False
            self._copying += 1  # under the same lock as the check, so that shut_all() does not return in between
        try:
            self._read_pages(pages, out)
        finally:
            with self._changed:
                self._copying -= 1
                stands = self._stands(standing)  # checked after the copy has ended: see above
                self._changed.notify_all()
        return stands

    def was_read(self, standing: StandingRoom, opened: OpenReservation, reader: object) -> None:
        """Records the last reader of a reservation.

        Args:
            standing: the reservation.
            opened: version that was read. A later version has not been read by this reader.
            reader: identifies the reader.
        """
        with self._changed:
            if standing.room is opened:
                standing.reader = reader

    def leave(self, room: KvReservation) -> list[ReservationReleased]:
        """Releases a reservation on behalf of a reader that names it. Empty if it is not open or is released already."""
        standing = self.find(room)
        return self._leave([] if standing is None else [standing])

    def reader_gone(self, reader: object) -> list[ReservationReleased]:
        """Releases the reservations whose present version this reader was the last to read. Released ones are left out."""
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
        """Returns whether this object is still open. Called with the lock."""
        return self._standing.get(standing.room.room.number) is standing
