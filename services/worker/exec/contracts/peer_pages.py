"""Declares how a worker reads KV pages of remote workers, and how it serves its own pages. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rootstock_llm.services.worker.core.contracts.reservations import KvReservation, KvSource, OpenReservation
from rootstock_llm.services.worker.core.contracts.transfers import I32, Pull


class ReadPages(Protocol):
    """Copies pages, or parts of the units of a cache group, to host memory. Several threads may call it at the same time."""

    def __call__(self, pages: I32, out: memoryview, group: int = 0) -> None:
        """Fills `out` with the bytes of the pages, page after page.

        Args:
            pages: page ids, int32[n]. For a cache group: part p of unit u has the id u * (parts of a unit) + p.
            out: writable, n * page_bytes bytes.
            group: PageOperation.group.
        """


@dataclass(frozen=True, slots=True)
class PeerCounts:
    """The counts of a reservation server. Bytes and refusals count from its start."""

    served_bytes: int  # bytes of pages that were sent to remote workers
    refused: dict[str, int]  # refused requests of remote workers, by reason
    num_connections: int  # connections that are open now


@dataclass(frozen=True, slots=True)
class PeerRate:
    """The rate of the last read from one remote worker that was large enough to be measured."""

    address: str  # host:port
    transport: str  # `tcp`, `tls`, `nixl`, or `shm` for shared memory
    bytes_s: float  # bytes per second


class PeerReader(Protocol):
    """Reads KV pages of remote workers.

    Calls for one address come from one thread at a time. Several threads may read from different addresses at the same time.
    """

    def read(self, pull: Pull, count: int, out: memoryview, group: int = 0) -> int:
        """Reads `count` pages into `out`, one after another.

        Args:
            pull: KV source and first page.
            count: pages to read; for a cache group, parts of units.
            out: writable, count * page_bytes bytes; its content is undefined if 0 is returned.
            group: PageOperation.group.

        Returns:
            `count`, or 0 if the read failed: the reservation was closed before the last page was read, the remote worker refused
            the read, or it did not respond within the time limit.
        """

    def leave(self, source: KvSource) -> None:
        """Tells the remote worker that the reservation of `source` can be freed. No effect if the worker cannot be reached."""

    def rates(self) -> Sequence[PeerRate]:
        """Returns the rates of the known remote workers. May be called on any thread."""

    def read_bytes(self) -> Mapping[str, int]:
        """Returns the bytes of pages read since the start, by transport. May be called on any thread."""

    def close(self) -> None:
        """Aborts running reads, which then return 0. No other call may follow."""


class KvServer(Protocol):
    """Serves the pages of this worker's KV reservations to remote workers, on separate threads."""

    @property
    def port(self) -> int:
        """Port on which the server listens."""

    def open(self, reservation: OpenReservation) -> None:
        """Opens a reservation, or extends an open one. Called on the loop's thread; does not block."""

    def close_reservations(self, reservations: Sequence[KvReservation]) -> None:
        """Closes reservations. Pages that a thread has already copied from the pool may still be sent; no other page is sent."""

    def close_all_reservations(self) -> None:
        """Closes all reservations and waits until no thread reads the pool."""

    def counts(self) -> PeerCounts: ...

    def close(self) -> None: ...
