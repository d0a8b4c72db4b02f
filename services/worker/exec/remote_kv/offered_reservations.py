"""The open KV reservations of a worker, and copies of their pages for readers.

A copy begins only while the reservation is open. It is sent only if the reservation is still open after the copy has ended. So
all its bytes were read while no step could write the pages. A copy that is running when the reservation is closed is discarded.
One lock orders the three events: a reservation is closed, a copy begins, a copy ends. Pages are copied without the lock, so
close_reservations() does not wait for copies.
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

    If the number of a closed reservation is opened again, a new object is created.
    """

    version: OpenReservation  # the reservation with its present pages
    credentials: bytes  # number, epoch and secret, packed; a reader must send all three
    reader: object | None = None  # connection that has last read the present version, None before the first read
    released: bool = False  # whether the present version was released


class OfferedReservations:
    """The open reservations of a worker. Any thread may call it."""

    def __init__(self, read_pages: ReadPages) -> None:
        """Starts without reservations.

        Args:
            read_pages: copies pages out of the pool.
        """
        self._read_pages = read_pages
        self._offered: dict[int, OfferedReservation] = {}  # by number
        self._num_copying = 0  # number of running copies
        self._changed = threading.Condition()  # the lock of all fields; notified when a copy ends

    def open(self, version: OpenReservation) -> None:
        """Opens a reservation, or replaces an open one by its next version, which has more pages.

        The new version has no reader and is not released, because readers of the earlier version may not have its new pages.
        """
        credentials = pack_reservation(version.reservation)
        with self._changed:
            offered = self._offered.setdefault(version.reservation.number, OfferedReservation(version, credentials))
            assert offered.credentials == credentials, "two open reservations never have the same number"
            assert len(version.pages) >= len(offered.version.pages), "an open reservation never loses pages"
            offered.version, offered.reader, offered.released = version, None, False

    def close_reservations(self, reservations: Sequence[KvReservation]) -> None:
        """Closes reservations. Reservations that are not open are ignored."""
        with self._changed:
            for reservation in reservations:
                self._offered.pop(reservation.number, None)

    def close_all_reservations(self) -> None:
        """Closes all reservations, and waits until no copy is running."""
        with self._changed:
            self._offered.clear()
            self._changed.wait_for(lambda: not self._num_copying)

    def find(self, reservation: KvReservation) -> OfferedReservation | None:
        """Returns the open reservation with this number, epoch and secret, or None."""
        credentials = pack_reservation(reservation)
        with self._changed:
            offered = self._offered.get(reservation.number)
        if offered is None or not hmac.compare_digest(offered.credentials, credentials):
            return None
        return offered

    def copy(self, offered: OfferedReservation, pages: I32, out: memoryview, group: int = 0) -> bool:
        """Copies pages of an open reservation into `out`, or parts of its units, see ReadPages. Raises the errors of read_pages.

        Returns:
            False if the reservation was closed before the copy ended. The bytes in `out` must then not be sent.
        """
        with self._changed:
            if not self._is_open(offered):
                return False
            self._num_copying += (
                1  # under the same lock as the check, so that close_all_reservations() does not return in between
            )
        try:
            self._read_pages(pages, out, group)
        finally:
            with self._changed:
                self._num_copying -= 1
                is_open = self._is_open(offered)  # after the copy, see the module's docstring
                self._changed.notify_all()
        return is_open

    def was_read(self, offered: OfferedReservation, version: OpenReservation, reader: object) -> None:
        """Records the connection that has last read a reservation.

        Args:
            offered: the reservation.
            version: the version that is read. The call has no effect if there is a newer version.
            reader: the connection.
        """
        with self._changed:
            if offered.version is version:
                offered.reader = reader

    def release(self, reservation: KvReservation) -> list[ReservationReleased]:
        """Releases a reservation at the request of a reader.

        Returns:
            The release. Empty if the reservation is not open or is already released.
        """
        offered = self.find(reservation)
        return self._release([] if offered is None else [offered])

    def release_read_by(self, reader: object) -> list[ReservationReleased]:
        """Releases the reservations whose present version was last read over this connection.

        Returns:
            The releases. Reservations that were released before are not in the result.
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
        """Returns whether the reservation of this object is still open. The caller must have the lock."""
        return self._offered.get(offered.version.reservation.number) is offered
