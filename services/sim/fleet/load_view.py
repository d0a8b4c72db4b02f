"""What one gateway believes of the workers' load: its own requests exactly, the others' as workers last reported them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.gateway.routing.columns import WorkerColumns
from services.sim.fleet.worker import WorkerLoad


class LoadView:
    """Writes requests and tokens of the columns. peer: the gateway's number at the workers."""

    def __init__(self, columns: WorkerColumns, peer: int) -> None:
        self._columns, self._peer = columns, peer
        self._own_requests = np.zeros(columns.capacity, np.int64)
        self._own_tokens = np.zeros(columns.capacity, np.int64)

    def opened(self, row: int, tokens: int) -> None:
        self._own_requests[row] += 1
        self._columns.requests[row] += 1
        self.grew(row, tokens)

    def grew(self, row: int, tokens: int) -> None:
        self._own_tokens[row] += tokens
        self._columns.tokens[row] += tokens

    def ended(self, row: int, tokens: int) -> None:
        self._own_requests[row] -= 1
        self._columns.requests[row] -= 1
        self.grew(row, -tokens)

    def ahead(self, row: int, tokens: int) -> None:
        """One is to come, whose pages it reads by now."""
        self.opened(row, tokens)
        self._columns.ahead[row] += 1

    def not_ahead(self, row: int, tokens: int) -> None:
        """It has come, or will not. tokens: as it was when it was to come."""
        self.ended(row, tokens)
        self._columns.ahead[row] -= 1

    def reported(self, loads: Sequence[WorkerLoad]) -> None:
        """One load per row. Of a worker's tokens the others have as large a share as of its requests."""
        count = len(loads)
        opened = np.array([load.num_open for load in loads], np.int64)
        others = opened - np.array([load.open_by_peer[self._peer] for load in loads], np.int64)
        used = np.array([load.used_tokens for load in loads], np.int64)
        columns = self._columns
        columns.requests[:count] = self._own_requests[:count] + others
        columns.tokens[:count] = self._own_tokens[:count] + used * others // np.maximum(opened, 1)
