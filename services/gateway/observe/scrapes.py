"""When the metrics were asked for last, on whichever port."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class Scrapes(Collector):
    """Has no series of its own: it is registered to be asked when the others are. One writer: who renders."""

    def __init__(self) -> None:
        self._asked_at: float | None = None

    def collect(self) -> Iterable[Metric]:
        self._asked_at = time.monotonic()
        return ()

    def asked_s_ago(self) -> float | None:
        """In seconds; None: nobody has."""
        return None if self._asked_at is None else time.monotonic() - self._asked_at
