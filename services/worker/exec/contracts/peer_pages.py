"""How pages of KV are read from other workers, and how this one lets others read its own. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.worker.core.contracts.reservations import KvReservation, KvSource, OpenReservation
from services.worker.core.contracts.transfers import I32, Pull

ReadPages = Callable[[I32, memoryview], None]
"""(pages int32[n], out) fills `out` with their n * page_bytes bytes, page after page. Called on any thread, by several
at once."""


@dataclass(frozen=True, slots=True)
class PeerCounts:
    """Since the start. served_bytes: of pages that others have read here. refused: by why, what others asked of this worker and
    did not get. num_connections: that are open here now."""

    served_bytes: int
    refused: dict[str, int]
    num_connections: int


@dataclass(frozen=True, slots=True)
class PeerRate:
    """transport: `tcp`, `tls`, `nixl`, or `shm` for shared memory. bytes_s: of the last read that was large enough to tell."""

    address: str
    transport: str
    bytes_s: float


class PeerReader(Protocol):
    """Reads from other workers. Calls for one address come from one thread at a time, those for several at once."""

    def read(self, pull: Pull, count: int, out: memoryview) -> int:
        """Fills `out`, page after page, with so many pages; returns count, or 0 where the room did not stand any more after they
        were read, or nobody answered in time. out: writable, count * page_bytes bytes; undefined where 0 is returned."""

    def leave(self, source: KvSource) -> None:
        """Says that nothing more will be read from the room; as far as somebody listens."""

    def rates(self) -> Sequence[PeerRate]:
        """Of the other workers that are known. Called on any thread."""

    def read_bytes(self) -> Mapping[str, int]:
        """Of pages that were read since the start, by transport. Called on any thread."""

    def close(self) -> None:
        """Breaks off what is being read, which then fails. No other call follows."""


class RoomServer(Protocol):
    """Lets others read what is in this worker's rooms. Threads of its own."""

    @property
    def port(self) -> int:
        """That it listens on."""

    def open(self, room: OpenReservation) -> None:
        """Or, of one that stands, has more of its pages read. Called on the loop's thread; returns at once."""

    def shut(self, rooms: Sequence[KvReservation]) -> None:
        """Nobody gets anything that is copied from these rooms later; what was copied before may still be on its way."""

    def shut_all(self) -> None:
        """The same of all of them; when it returns, nobody reads the pool any more."""

    def counts(self) -> PeerCounts: ...

    def close(self) -> None: ...
