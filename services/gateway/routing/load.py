"""Compares the loads of workers. A load is the number of requests per request that the worker can run at once.

So large and small workers are comparable.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.gateway.routing.columns import WorkerColumns
from services.gateway.routing.config import RoutingConfig


def running_slots(rows: NDArray[np.int64], workers: WorkerColumns) -> NDArray[np.int64]:
    return np.maximum(workers.running[rows], 1)


def relative_load(rows: NDArray[np.int64], workers: WorkerColumns) -> NDArray[np.float64]:
    """Returns float64[rows]: open requests per request that the worker can run at once."""
    return workers.requests[rows] / running_slots(rows, workers)


def least(rows: NDArray[np.int64], cost: NDArray[np.float64], workers: WorkerColumns) -> int:
    """Returns the row with the least cost. Ties are decided by fewest requests, then by the earliest pick, then by row."""
    rows = rows[cost == cost.min()]
    for column in (workers.requests, workers.last_pick):
        if len(rows) == 1:
            break
        values = column[rows]
        rows = rows[values == values.min()]
    return int(rows[0])


def over_gate(
    rows: NDArray[np.int64], ready: NDArray[np.int64], workers: WorkerColumns, config: RoutingConfig
) -> NDArray[np.bool_]:
    """Returns bool[rows]: whether a worker's load exceeds the least load of `ready` by more than the gate allows.

    Loads are scaled to requests on a worker of mean size. If all workers have the same size, they are the numbers of requests.
    """
    slots = running_slots(ready, workers)
    size = slots.sum() / len(slots)  # numpy's mean() would take as long as the rest of this function
    loads = workers.requests[ready] / slots
    idlest = loads.min() * size
    requests = (loads if rows is ready else relative_load(rows, workers)) * size
    return np.asarray((requests - idlest > config.gate_abs) & (requests > config.gate_rel * idlest))


def load_over_mean(
    rows: NDArray[np.int64], ready: NDArray[np.int64], workers: WorkerColumns, config: RoutingConfig
) -> NDArray[np.float64]:
    """Returns float64[rows]: the load of each worker with this request, in units of the mean load of `ready`.

    The mean load is the number of all requests per slot, with this request. It counts at least config.load_floor requests per
    worker.
    """
    mean = max(int(workers.requests[ready].sum()) + 1, config.load_floor * len(ready)) / running_slots(ready, workers).sum()
    return np.asarray((workers.requests[rows] + 1) / running_slots(rows, workers) / mean)


def near_idlest(rows: NDArray[np.int64], workers: WorkerColumns, config: RoutingConfig) -> NDArray[np.bool_]:
    """Returns bool[rows]: whether a worker's load is close to the least load. Loads are scaled as in over_gate()."""
    slots = running_slots(rows, workers)
    requests = workers.requests[rows] / slots * (slots.sum() / len(slots))
    mean = requests.sum() / len(requests)
    return np.asarray(requests <= requests.min() + max(config.near_requests, config.near_rel * mean))
