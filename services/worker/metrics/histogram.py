"""A Prometheus histogram that takes a whole step's observations in one array operation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import HistogramMetricFamily


class BatchHistogram:
    """One writer thread; a scrape from another thread sees a step wholly or not, but for the sum, which may lag by one."""

    def __init__(self, buckets: Sequence[float]) -> None:
        self._bounds = np.array(buckets, dtype=np.float64)
        self._counts = np.zeros(len(buckets) + 1, dtype=np.int64)
        self._sum = 0.0

    def observe(self, values: Sequence[float] | NDArray[np.float64]) -> None:
        """In the metric's unit."""
        if len(values):
            column = np.asarray(values, dtype=np.float64)
            self._counts = self._counts + np.bincount(np.searchsorted(self._bounds, column), minlength=len(self._counts))
            self._sum += float(column.sum())

    def add_to(self, family: HistogramMetricFamily, label_values: Sequence[str]) -> None:
        bounds = [repr(float(bound)) for bound in self._bounds] + ["+Inf"]
        buckets = list(zip(bounds, np.cumsum(self._counts).tolist(), strict=True))
        family.add_metric(label_values, buckets, self._sum)
