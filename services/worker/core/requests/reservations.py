"""The KV reservations of this worker's pages, and the reservations in other workers that this worker no longer reads.

A reservation pins the pages of a prompt, and the units of cache groups at the prompt's last page end. It has no slot.
RequestLifecycle is the owner. The states are:

  GROWING   the request computes its prompt, and each chunk adds pages; no time limit
  WAITING   the request was retracted before its prompt was computed; the time limit runs
  COMPLETE  the prompt is computed and the request has ended; the time limit runs
  ENDED     the pages are unpinned

  none ──► GROWING       the first pages of the prompt are computed
  GROWING ──► WAITING    the request is retracted
  WAITING ──► GROWING    the request is admitted again
  GROWING ──► COMPLETE   the request is handed over
  WAITING ──► COMPLETE   the request is handed over; it was retracted while its last token was in flight
  WAITING ──► ENDED      the time limit is reached, or running requests need pages
  COMPLETE ──► ENDED     the time limit is reached, or the reader releases the reservation
  ENDED ──► COMPLETE     the request is handed over after its reservation ended in the state WAITING or by a flush
  any ──► ENDED          the request ends without a handover or is aborted later, its gateway stream ends, its salt is deleted,
                         the cache is flushed, or the device pages are reset

Each addition of pages is an opening with a number. A reader's release names the opening that the reader has read. The
release has no effect if there was a later opening.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np

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
class _Live:
    """A reservation in any state but ENDED."""

    reservation: KvReservation
    opening: int  # number of the last opening
    request_key: tuple[int, int]  # (peer, handle) of the request whose prompt it has
    node: TreeNode  # pinned node of the tree at the end of its pages
    memory: KVMemory
    until: float  # time limit, absolute; inf in the state GROWING
    is_complete: bool  # True in the state COMPLETE
    units: list[list[int]]  # pinned units of each cache group, see OpenReservation; empty without units


class KvReservations:
    """The KV reservations of this worker that have not ended, and the events for the executor."""

    def __init__(self, hold_s: float) -> None:
        """Starts empty. `hold_s` is the time limit of reservations in seconds."""
        self._hold_s = hold_s
        self._live: dict[int, _Live] = {}  # by KvReservation.number
        self._opened: list[OpenReservation] = []
        self._closed: list[KvReservation] = []
        self._released_sources: list[KvSource] = []  # reservations in other workers that this worker no longer reads
        self._freed = False  # whether a reservation has ended since the last expire()
        self._openings = 0  # number of openings so far
        self.next_expiry = inf  # expire() has nothing to do before this time
        self.opened_total = 0
        self.expired_total = 0  # reservations that reached their time limit

    def __len__(self) -> int:
        return len(self._live)

    @property
    def may_end(self) -> bool:
        """Whether a reservation has a time limit, so that its pages may become evictable without a step."""
        return any(live.until < inf for live in self._live.values())

    def is_open(self, reservation: KvReservation) -> bool:
        return reservation.number in self._live

    def open(self, opened: OpenReservation, request_key: tuple[int, int], node: TreeNode, memory: KVMemory) -> None:
        """Opens a reservation with the first pages of a prompt, or adds pages to an open one.

        Args:
            opened: the reservation with all of its pages. `units_end` is the page end whose units a reader needs. The reservation
                gets these units if they are cached and may be lent (UnitPins).
            request_key: peer and handle of its request.
            node: end of the pages in the tree.
            memory: the owner of the pages.
        """
        assert node.depth == len(opened.pages) > 0, "a reservation has the pages up to its node"
        memory.pin(node)
        self._openings += 1
        live = self._live.get(opened.reservation.number)
        if live is None:
            live = _Live(opened.reservation, self._openings, request_key, node, memory, inf, False, [])
            self._live[opened.reservation.number] = live
            self.opened_total += 1
        else:
            assert not live.is_complete and node.depth >= live.node.depth, "a reservation grows only while its prompt is computed"
            _unpin_units(live)
            live.memory.unpin(live.node)
            live.opening, live.node, live.until = self._openings, node, inf
        if memory.unit_pins is not None and 0 < opened.units_end <= node.depth:
            live.units = memory.unit_pins.pin_end(node, opened.units_end)
        units = tuple(np.array(each, dtype=np.int32) for each in live.units)
        opened = replace(opened, opening=self._openings, units=units, units_end=opened.units_end if units else 0)
        self._opened.append(opened)

    def complete(self, reservation: KvReservation, now: float) -> None:
        """Moves an open reservation to the state COMPLETE, and starts its time limit. Its reader may now release it."""
        live = self._live[reservation.number]
        live.is_complete = True
        self._start_limit(live, now)

    def wait(self, reservation: KvReservation, now: float) -> None:
        """Moves a reservation to the state WAITING, if it is open, because its request was retracted."""
        if (live := self._live.get(reservation.number)) is not None:
            self._start_limit(live, now)

    def resume(self, reservation: KvReservation) -> None:
        """Moves a reservation to the state GROWING, if it is open, because its request is admitted again."""
        if (live := self._live.get(reservation.number)) is not None:
            live.until = inf

    def end_waiting(self) -> bool:
        """Ends all reservations in the state WAITING, because running requests need pages. Returns whether there were any."""
        waiting = [live for live in self._live.values() if not live.is_complete and live.until < inf]
        for live in waiting:
            self._end(live)
        return bool(waiting)

    def release(self, notice: ReservationReleased) -> None:
        """Ends a reservation that its reader has released, if it is COMPLETE and the reader has read its last opening.

        If the reservation is not COMPLETE or has a later opening, it stays, because another reader may follow.
        """
        live = self._live.get(notice.reservation.number)
        if live is not None and live.reservation == notice.reservation and live.is_complete and live.opening == notice.opening:
            self._end(live)

    def end_of_request(self, request_key: tuple[int, int]) -> None:
        """Ends the reservation of a request that is not handed over, because no worker will read it."""
        for live in [each for each in self._live.values() if each.request_key == request_key]:
            self._end(live)

    def end_of_gateway(self, peer: int) -> None:
        """Ends the reservations of a gateway whose stream has ended, because no worker will read them."""
        for live in [each for each in self._live.values() if each.request_key[0] == peer]:
            self._end(live)

    def expire(self, now: float) -> bool:
        """Ends the reservations that have reached their time limit.

        Returns:
            Whether pages may have become evictable since the last call.
        """
        for live in [each for each in self._live.values() if each.until <= now]:
            self._end(live)
            self.expired_total += 1
        self.next_expiry = min((live.until for live in self._live.values()), default=inf)
        freed, self._freed = self._freed, False
        return freed

    def end_all(self) -> None:
        """Ends all reservations, because the cache is flushed or the device pages are reset."""
        for live in list(self._live.values()):
            self._end(live)

    def end_retired(self) -> None:
        """Ends the reservations in retired trees. Otherwise readers would copy pages of a deleted salt to other workers."""
        for live in [each for each in self._live.values() if is_retired(_tree_of(each.node))]:
            self._end(live)

    def release_source(self, source: KvSource) -> None:
        """Records that this worker no longer reads a reservation in another worker."""
        self._released_sources.append(source)

    def take(self) -> ReservationEvents | None:
        """Returns the events since the last call, or None."""
        if not (self._opened or self._closed or self._released_sources):
            return None
        events = ReservationEvents(tuple(self._closed), tuple(self._opened), tuple(self._released_sources))
        self._opened, self._closed, self._released_sources = [], [], []
        return events

    def _start_limit(self, live: _Live, now: float) -> None:
        """Starts the time limit of a reservation."""
        live.until = now + self._hold_s
        self.next_expiry = min(self.next_expiry, live.until)

    def _end(self, live: _Live) -> None:
        """Ends a reservation and unpins its pages.

        Unpins them with used=True, so that the tree offers them for a backup. The pin may have prevented the backup when the
        request ended.
        """
        self._freed = True
        self.next_expiry = -inf
        del self._live[live.reservation.number]
        _unpin_units(live)
        live.memory.unpin(live.node, used=True)
        self._opened = [opened for opened in self._opened if opened.reservation.number != live.reservation.number]
        self._closed.append(live.reservation)


def _unpin_units(live: _Live) -> None:
    for index, units in enumerate(live.units):
        assert live.memory.unit_pins is not None, "only a model with cache groups has units"
        live.memory.unit_pins.unpin(index, units)
    live.units = []


def _tree_of(node: TreeNode) -> str:
    """Returns the name of the tree of a node."""
    while node.parent is not None:
        node = node.parent
    return node.key.decode()
