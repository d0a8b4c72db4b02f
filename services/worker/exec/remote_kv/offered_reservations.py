"""The open KV reservations that a server offers to readers, and copies of their pages.

One lock orders three events: a reservation is closed, a copy of its pages begins, a copy is found complete. A copy begins only
while the reservation is open, and is sent only if the reservation is still open after the copy has ended. So all its bytes were
read before the reservation was closed, when no step could write the pages. A copy that is running when the reservation is closed
is discarded. Pages are copied without the lock, so shut() does not wait for copies.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from rootstock_llm.services.worker.core.contracts.reservations import KvReservation, OpenReservation, ReservationReleased
from rootstock_llm.services.worker.core.contracts.transfers import I32
from rootstock_llm.services.worker.exec.contracts.peer_pages import ReadPages
from rootstock_llm.services.worker.exec.remote_kv.frames import pack_reservation


@dataclass(slots=True, eq=False)
class OfferedReservation:
    """An open reservation. Only OfferedReservations uses the fields other than `version`.

    If a closed reservation's number is opened again, it gets a new object.
    """

    version: OpenReservation  # the reservation with its present pages
    credentials: bytes  # number, epoch and secret, packed; a reader must send all three
    reader: object | None = None  # last reader of the present version, None if there was no read
    released: bool = False  # a reader has released the present version


class OfferedReservations:
    """The open reservations of a worker. Any thread may call it."""

    def __init__(self, read_pages: ReadPages) -> None:
        """Starts without reservations.

        Args:
            read_pages: copies pages out of the pool.
        """
        self._read_pages = read_pages
        self._offered: dict[int, OfferedReservation] = {}  # by number
        self._copying = 0  # running copies
        self._changed = threading.Condition()

    def open(self, version: OpenReservation) -> None:
        """Opens a reservation, or replaces an open one by its version with more pages.

        The new version has no reader and is not released, because earlier readers did not know its pages.
        """
        credentials = pack_reservation(version.reservation)
        with self._changed:
            offered = self._offered.setdefault(version.reservation.number, OfferedReservation(version, credentials))
            assert offered.credentials == credentials, "the number of an open reservation is unique"
            assert len(version.pages) >= len(offered.version.pages), "an open reservation never loses pages"
            offered.version, offered.reader, offered.released = version, None, False

    def shut(self, reservations: Sequence[KvReservation]) -> None:
        """Closes reservations. Reservations that are not open are ignored."""
        with self._changed:
            for reservation in reservations:
                self._offered.pop(reservation.number, None)

    def shut_all(self) -> None:
        """Closes all reservations. Returns when no copy is running."""
        with self._changed:
            self._offered.clear()
            self._changed.wait_for(lambda: not self._copying)

    def find(self, reservation: KvReservation) -> OfferedReservation | None:
        """Returns the open reservation with this number, epoch and secret, or None."""
        credentials = pack_reservation(reservation)
        with self._changed:
            offered = self._offered.get(reservation.number)
        if offered is None or not hmac.compare_digest(offered.credentials, credentials):
            return None
        return offered

    def copy(self, offered: OfferedReservation, pages: I32, out: memoryview) -> bool:
        """Copies pages of a reservation into `out`. Raises the errors of read_pages.

        Returns:
            False if the reservation was closed before the copy ended. The bytes in `out` must then not be sent.
        """
        with self._changed:
            if not self._is_open(offered):
                return False
            self._copying += 1  # under the same lock as the check, so that shut_all() does not return in between
        try:
            self._read_pages(pages, out)
        finally:
            with self._changed:
                self._copying -= 1
                is_open = self._is_open(offered)  # checked after the copy has ended; see the module's docstring
                self._changed.notify_all()
        return is_open

    def was_read(self, offered: OfferedReservation, version: OpenReservation, reader: object) -> None:
        """Records the last reader of a reservation.

        Args:
            offered: the reservation.
            version: version that was read. If it is outdated, the call has no effect.
            reader: identifies the reader.
        """
        with self._changed:
            if offered.version is version:
                offered.reader = reader

    def release(self, reservation: KvReservation) -> list[ReservationReleased]:
        """Releases a reservation at the request of a reader. The result is empty if it is not open or is released already."""
        offered = self.find(reservation)
        return self._release([] if offered is None else [offered])

    def release_read_by(self, reader: object) -> list[ReservationReleased]:
        """Releases the reservations whose present version was last read by this reader.

        Returns:
            The releases, without reservations that were released before.
        """
        with self._changed:
            read = [offered for offered in self._offered.values() if offered.reader is reader]
        return self._release(read)

    def _release(self, reservations: Sequence[OfferedReservation]) -> list[ReservationReleased]:
        with self._changed:
            released = [offered for offered in reservations if self._is_open(offered) and not offered.released]
            for offered in released:
                offered.released = True
            return [ReservationReleased(offered.version.reservation, offered.version.opening) for offered in released]

    def _is_open(self, offered: OfferedReservation) -> bool:
        """Returns whether this object is still open. The caller holds the lock."""
        return self._offered.get(offered.version.reservation.number) is offered
