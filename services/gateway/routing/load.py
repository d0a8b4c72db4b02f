"""How busy workers are, compared with each other: requests in units of what each can run at once, so that large and small
workers mix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.gateway.routing.columns import WorkerColumns
from services.gateway.routing.config import RoutingConfig


def running_slots(rows: NDArray[np.int64], workers: WorkerColumns) -> NDArray[np.int64]:
    return np.maximum(workers.running[rows], 1)


def relative_load(rows: NDArray[np.int64], workers: WorkerColumns) -> NDArray[np.float64]:
    """Open requests per request that it can run at once."""
    return workers.requests[rows] / running_slots(rows, workers)


def least(rows: NDArray[np.int64], cost: NDArray[np.float64], workers: WorkerColumns) -> int:
    """The row of least cost; of equal ones that with the fewest requests, then the one picked longest ago, then the first."""
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
    """bool[rows]: busier than the idlest of `ready` by more than the gate allows.

    Requests are counted as if on a worker of mean size: where all are equal, as they are.
    """
    slots = running_slots(ready, workers)
    size = slots.sum() / len(slots)  # numpy's mean() costs as much as all of this
    loads = workers.requests[ready] / slots
    idlest = loads.min() * size
    requests = (loads if rows is ready else relative_load(rows, workers)) * size
    return np.asarray((requests - idlest > config.gate_abs) & (requests > config.gate_rel * idlest))


def load_over_mean(
    rows: NDArray[np.int64], ready: NDArray[np.int64], workers: WorkerColumns, config: RoutingConfig
) -> NDArray[np.float64]:
    """float64[rows]: each one's relative load in units of the mean of `ready`, this request counted in.

    The mean is all requests over all slots, but at least what config.load_floor requests per worker would make.
    """
    mean = max(int(workers.requests[ready].sum()) + 1, config.load_floor * len(ready)) / running_slots(ready, workers).sum()
    return np.asarray((workers.requests[rows] + 1) / running_slots(rows, workers) / mean)


def near_idlest(rows: NDArray[np.int64], workers: WorkerColumns, config: RoutingConfig) -> NDArray[np.bool_]:
    """bool[rows]: those whose load is hardly more than the idlest one's; requests are counted as in over_gate."""
    slots = running_slots(rows, workers)
    requests = workers.requests[rows] / slots * (slots.sum() / len(slots))
    mean = requests.sum() / len(requests)
    return np.asarray(requests <= requests.min() + max(config.near_requests, config.near_rel * mean))
