"""Simulates reads of other workers' KV: the time of each read, and whether its KV reservation still exists. No data is copied."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rootstock_llm.services.worker.core.contracts.reservations import (
    KvReservation,
    KvSource,
    OpenReservation,
    ReservationEvents,
    ReservationReleased,
    proof,
)
from rootstock_llm.services.worker.core.contracts.transfers import Fact, OperationKind, PageOperation, Pull
from rootstock_llm.services.worker.core.kv.tree_node import TOKEN_BYTES

READ_TIMEOUT_S = 10.0  # timeout of a read in production (services/worker/exec/remote_kv/peer_reader.py)


@dataclass(frozen=True, slots=True)
class Wire:
    """The connection between any two workers."""

    bytes_per_s: float  # bandwidth; 0: no read completes
    latency_s: float  # latency of each read

    def __post_init__(self) -> None:
        if not self.bytes_per_s >= 0 or not self.latency_s >= 0:
            raise ValueError("the bandwidth and the latency between workers must not be negative")

    def seconds(self, num_bytes: int) -> float:
        """Returns the seconds of a read. A read that would take longer than READ_TIMEOUT_S fails after READ_TIMEOUT_S."""
        if not self.bytes_per_s:
            return READ_TIMEOUT_S
        return min(self.latency_s + num_bytes / self.bytes_per_s, READ_TIMEOUT_S)

    def carries(self, num_bytes: int) -> bool:
        return self.seconds(num_bytes) < READ_TIMEOUT_S


class OpenReservations:
    """The KV reservations of all workers, by the worker's address.

    Each worker updates the reservations at its own address.
    """

    def __init__(self) -> None:
        self._opened_at: dict[str, dict[int, OpenReservation]] = {}

    def update(self, address: str, events: ReservationEvents) -> None:
        reservations = self._opened_at.setdefault(address, {})
        for closed in events.closed:
            reservations.pop(closed.number, None)
        reservations |= {opened.reservation.number: opened for opened in events.opened}

    def count(self, address: str) -> int:
        return len(self._opened_at.get(address, ()))

    def drop(self, address: str) -> None:
        """Removes the reservations of a dead worker."""
        self._opened_at.pop(address, None)

    def find(self, address: str, reservation: KvReservation) -> OpenReservation | None:
        """Returns the current state of a reservation, or None if it has ended."""
        opened = self._opened_at.get(address, {}).get(reservation.number)
        return opened if opened is not None and opened.reservation == reservation else None

    def allows(self, pull: Pull, count: int, page_size: int) -> bool:
        """Returns whether a pull may read `count` pages.

        The reservation must exist, and the pull must prove that it has the prompt's tokens.
        """
        opened = self.find(pull.source.address, pull.source.reservation)
        if opened is None:
            return False
        end = pull.first + count
        tokens = opened.tokens[: end * page_size * TOKEN_BYTES]
        return end <= len(opened.pages) and proof(opened.reservation.secret, opened.tree, tokens) == pull.proof


@dataclass(frozen=True, slots=True)
class _Read:
    operation: PageOperation
    pull: Pull
    end: float
    seconds: float


class RemoteReads:
    """One worker's reads of other workers' KV, and the KV reservations at its own address.

    Reads from one address run in sequence. Reads from different addresses do not slow each other down.
    """

    def __init__(
        self,
        address: str,
        reservations: OpenReservations,
        wire: Wire,
        page_bytes: int,
        page_size: int,
        send_release: Callable[[KvSource, float], None],
    ) -> None:
        """Creates a reader without reads.

        Args:
            address: address of this worker.
            reservations: the reservations of all workers.
            wire: connection to any other worker.
            page_bytes: bytes of KV per page.
            page_size: tokens per page.
            send_release: called with (source, time) when this worker no longer reads the source's reservation. The release
                leaves this worker at `time`.
        """
        self._address, self._reservations, self._wire = address, reservations, wire
        self.page_bytes, self._page_size, self._send_release = page_bytes, page_size, send_release
        self._lanes: dict[str, deque[_Read]] = {}  # reads in progress, by remote address
        self.read_bytes = 0  # bytes read since the start

    @property
    def num_reservations(self) -> int:
        """Number of KV reservations at this worker."""
        return self._reservations.count(self._address)

    def change_reservations(self, events: ReservationEvents, now: float) -> None:
        self._reservations.update(self._address, events)
        for source in events.released:
            lane = self._lanes.get(source.address)
            self._send_release(source, lane[-1].end if lane else now)

    def release_here(self, reservation: KvReservation) -> ReservationReleased | None:
        """Returns the message that releases a reservation at this worker, or None if the reservation has ended."""
        opened = self._reservations.find(self._address, reservation)
        return None if opened is None else ReservationReleased(reservation, opened.opening)

    def begin(self, operations: Sequence[PageOperation], at: float) -> None:
        """Queues reads at time `at`. All earlier steps have ended by then.

        A read begins at `at`, or when all earlier reads from the same address have ended, if that is later.
        """
        for operation in operations:
            assert operation.kind is OperationKind.PULL and operation.pull is not None, "the only tier is remote KV"
            lane = self._lanes.setdefault(operation.pull.source.address, deque())
            begin = max(at, lane[-1].end) if lane else at
            seconds = self._wire.seconds(len(operation.keys) * self.page_bytes)
            lane.append(_Read(operation, operation.pull, begin + seconds, seconds))

    def next_end(self) -> float | None:
        """Returns the end of the next read, or None if no read is in progress."""
        return min((lane[0].end for lane in self._lanes.values()), default=None)

    def ended(self, now: float) -> list[Fact]:
        """Returns the results of the reads that have ended. A read brings all of its pages or none."""
        facts: list[Fact] = []
        for address, lane in list(self._lanes.items()):
            while lane and lane[0].end <= now:
                facts.append(self._fact(lane.popleft()))
            if not lane:
                del self._lanes[address]
        return facts

    def _fact(self, read: _Read) -> Fact:
        pages = len(read.operation.keys)
        if not self._wire.carries(pages * self.page_bytes) or not self._reservations.allows(read.pull, pages, self._page_size):
            return Fact(read.operation.op_id)
        self.read_bytes += pages * self.page_bytes
        return Fact(read.operation.op_id, pages, read.seconds)
