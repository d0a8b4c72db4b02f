"""When requests run out of time: a heap of moments. Entries of requests that have ended stay until they are due or swept."""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Deadline:
    """at: absolute. waiting: of waiting for the first admission; else of the request as a whole."""

    at: float
    seq: int
    peer: int
    handle: int
    waiting: bool


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[Deadline] = []

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, at: float, seq: int, peer: int, handle: int, waiting: bool) -> None:
        heapq.heappush(self._heap, Deadline(at, seq, peer, handle, waiting))

    def due(self, now: float) -> list[Deadline]:
        """Takes out all that are over."""
        out = []
        while self._heap and self._heap[0].at <= now:
            out.append(heapq.heappop(self._heap))
        return out

    def keep(self, seqs: set[int]) -> None:
        self._heap = [entry for entry in self._heap if entry.seq in seqs]
        heapq.heapify(self._heap)
