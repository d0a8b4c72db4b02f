"""What front ends, signals, operators and the grammar compiler ask of the loop, in order. Written by any thread, read by the
loop's thread alone."""

from __future__ import annotations

import concurrent.futures
import queue
from dataclasses import dataclass

from services.worker.core.contracts.messages import PagesReady, Prefetch, Submit
from services.worker.core.contracts.reservations import KvSource, ReservationReleased
from services.worker.core.contracts.sampling import GrammarSpec
from services.worker.loop.barrier import Command


@dataclass(frozen=True, slots=True)
class Abort:
    peer: int
    handle: int


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """A request that the front end's stream was told the end of without the core. source: that it was to read."""

    peer: int
    handle: int
    source: KvSource | None


@dataclass(frozen=True, slots=True)
class PeerGone:
    """A front end's stream has ended: everything that came over it is aborted."""

    peer: int


@dataclass(frozen=True, slots=True)
class OpenSession:
    """capacity in tokens, ttl_s: 0 for the configured default. refusal: set to why not, "" if it is open."""

    session_id: str
    capacity: int
    ttl_s: float
    refusal: concurrent.futures.Future[str]


@dataclass(frozen=True, slots=True)
class CloseSession:
    """closed: set to whether there was one."""

    session_id: str
    closed: concurrent.futures.Future[bool]


@dataclass(frozen=True, slots=True)
class GrammarReady:
    spec: GrammarSpec


@dataclass(frozen=True, slots=True)
class GrammarFailed:
    """reason: for the clients that asked for it. busy: not the grammar's fault; it may be asked for again."""

    spec: GrammarSpec
    reason: str
    busy: bool = False


@dataclass(frozen=True, slots=True)
class FactsReady:
    """The executor has facts of operations on pages: a loop that rests wakes up."""


@dataclass(frozen=True, slots=True)
class PrefetchMore:
    """Of a prompt that a Prefetch of this peer has told of."""

    peer: int
    ready: PagesReady


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop; what still runs ends with UNAVAILABLE."""


Message = (
    Submit
    | Prefetch
    | PrefetchMore
    | Abort
    | TurnedAway
    | PeerGone
    | OpenSession
    | CloseSession
    | GrammarReady
    | GrammarFailed
    | FactsReady
    | ReservationReleased
    | Command
    | Stop
)


class Inbox:
    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def put(self, message: Message) -> None:
        self._queue.put(message)

    def drain(self, wait_s: float) -> list[Message]:
        """Everything that is there; if nothing is, waits up to wait_s seconds for one message."""
        messages: list[Message] = []
        try:
            messages.append(self._queue.get(timeout=wait_s) if wait_s > 0 else self._queue.get_nowait())
            while True:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            return messages
