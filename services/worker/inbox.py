"""What front ends and signals ask of the loop, in order. Written by any thread, read by the loop's thread alone."""

from __future__ import annotations

import queue
from dataclasses import dataclass

from services.worker.core.messages import Submit


@dataclass(frozen=True, slots=True)
class Abort:
    peer: int
    handle: int


@dataclass(frozen=True, slots=True)
class PeerGone:
    """A front end's stream has ended: everything that came over it is aborted."""

    peer: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop; what still runs ends with UNAVAILABLE."""


Message = Submit | Abort | PeerGone | Stop


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
