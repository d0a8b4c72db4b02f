"""Which worker gets a request: a pure function over plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker that may be picked. `last_pick` counts up over all picks: the smaller, the longer ago."""

    open_requests: int
    last_pick: int


def least_requests(workers: Sequence[WorkerLoad]) -> int | None:
    """Index of the worker with the fewest open requests, of those the one picked longest ago; None if there are none."""
    if not workers:
        return None
    return min(range(len(workers)), key=lambda i: (workers[i].open_requests, workers[i].last_pick))
