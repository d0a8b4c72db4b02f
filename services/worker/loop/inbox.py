"""Messages from gateways, signals, operators and the grammar compiler to the loop, in order.

Any thread may write them; only the loop's thread reads them.
"""

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
    """A request that was refused on its gateway stream and has not reached the core."""

    peer: int
    handle: int
    source: KvSource | None  # reservation that the request was to read


@dataclass(frozen=True, slots=True)
class PeerGone:
    """A gateway stream has ended. All of its requests are aborted."""

    peer: int


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Opens a session."""

    session_id: str
    capacity: int  # tokens; 0 for the configured capacity
    ttl_s: float  # seconds; 0 for the configured lifetime
    refusal: concurrent.futures.Future[str]  # gets the reason if the session was not opened, or an empty text


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Closes a session."""

    session_id: str
    closed: concurrent.futures.Future[bool]  # gets whether the session was open


@dataclass(frozen=True, slots=True)
class GrammarReady:
    spec: GrammarSpec


@dataclass(frozen=True, slots=True)
class GrammarFailed:
    """A grammar was not compiled."""

    spec: GrammarSpec
    reason: str  # message to the clients that wait for the grammar
    busy: bool = False  # the compiler was full; the grammar may be submitted again


@dataclass(frozen=True, slots=True)
class FactsReady:
    """The executor has facts of page operations. The message wakes a waiting loop."""


@dataclass(frozen=True, slots=True)
class PrefetchMore:
    """Further readable pages of a prompt that an earlier Prefetch of this gateway stream has named."""

    peer: int
    ready: PagesReady


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the loop. Requests that have not ended get UNAVAILABLE."""


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
        """Returns all present messages. Without any, waits up to `wait_s` seconds for one message."""
        messages: list[Message] = []
        try:
            messages.append(self._queue.get(timeout=wait_s) if wait_s > 0 else self._queue.get_nowait())
            while True:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            return messages
