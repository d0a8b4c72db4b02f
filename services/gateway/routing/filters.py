"""Which workers may get a request at all: rows in, fewer rows out. All rows are int64, rising."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.gateway.routing.columns import Ask, WorkerColumns
from services.gateway.routing.config import RoutingConfig
from services.gateway.routing.load import over_gate

Rows = NDArray[np.int64]


def ready_rows(ask: Ask, workers: WorkerColumns) -> Rows:
    """Those that may get new requests, and that the request may go to."""
    ready = workers.used & workers.usable & ~workers.serves if ask.prefill else workers.takes
    if ask.allowed is not None:
        ready &= ask.allowed
    return np.flatnonzero(ready)


def with_room(rows: Rows, workers: WorkerColumns) -> Rows:
    return rows[workers.requests[rows] < workers.limit[rows]]


def rows_with_room(ask: Ask, workers: WorkerColumns) -> Rows:
    """None of them: the request has to wait."""
    return with_room(ready_rows(ask, workers), workers)


def has_room(ask: Ask, workers: WorkerColumns) -> bool:
    return len(rows_with_room(ask, workers)) > 0


def with_adapter(rows: Rows, ready: Rows, ask: Ask, workers: WorkerColumns, config: RoutingConfig) -> Rows:
    """Of `rows`, those that have the request's adapter loaded; all of them if it has none, or if nobody has it, or only
    workers that are busier than the gate allows: then one more worker has to load it."""
    if not ask.lora:
        return rows
    resident = rows[[ask.lora in workers.loras[row] for row in rows.tolist()]]
    if len(resident):
        resident = resident[~over_gate(resident, ready, workers, config)]
    return resident if len(resident) else rows
