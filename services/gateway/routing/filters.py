"""Filters the workers that can get a request. Each function takes rows and returns fewer rows, as rising int64 arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.gateway.routing.columns import Ask, WorkerColumns
from services.gateway.routing.config import RoutingConfig
from services.gateway.routing.load import over_gate

Rows = NDArray[np.int64]


def ready_rows(ask: Ask, workers: WorkerColumns) -> Rows:
    """Returns the rows of workers that take new requests and are allowed for this one."""
    ready = workers.used & workers.usable & ~workers.serves if ask.prefill else workers.takes
    if ask.allowed is not None:
        ready &= ask.allowed
    return np.flatnonzero(ready)


def with_room(rows: Rows, workers: WorkerColumns) -> Rows:
    """Returns the rows of workers with free slots."""
    return rows[workers.requests[rows] < workers.limit[rows]]


def rows_with_room(ask: Ask, workers: WorkerColumns) -> Rows:
    """Returns the rows of allowed workers with free slots. Empty if all are full; the request then queues."""
    return with_room(ready_rows(ask, workers), workers)


def has_room(ask: Ask, workers: WorkerColumns) -> bool:
    return len(rows_with_room(ask, workers)) > 0


def with_adapter(rows: Rows, ready: Rows, ask: Ask, workers: WorkerColumns, config: RoutingConfig) -> Rows:
    """Returns the rows of workers that have loaded the request's adapter.

    Returns all rows if the request has no adapter. Also returns all rows if no worker has loaded the adapter, or only workers
    whose load is above the gate: then one more worker has to load it.
    """
    if not ask.lora:
        return rows
    resident = rows[[ask.lora in workers.loras[row] for row in rows.tolist()]]
    if len(resident):
        resident = resident[~over_gate(resident, ready, workers, config)]
    return resident if len(resident) else rows
