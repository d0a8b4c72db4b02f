"""Prometheus histograms without the lock that prometheus_client takes for each observation.

Only one thread may write to a histogram. An observation costs a bisection and two additions, a tenth of prometheus_client's cost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Histogram:
    """The bucket counts and the sum of a histogram metric for one set of label values.

    A call of observe() or observe_all() adds its observations to the buckets in one step, so a scrape in another thread reads all
    of them or none. The scrape reads the sum separately. Compared with the buckets, the sum may therefore lack the observations
    of the last call, or include those of later calls.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Creates an empty histogram.

        Args:
            bounds: upper bounds of the buckets, inclusive and rising. A last bucket without a bound is added.
        """
        self._bounds = tuple(float(bound) for bound in bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Records a value, in the unit of the metric, as `times` observations."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def observe_all(self, values: Sequence[float] | NDArray[np.float64]) -> None:
        """Records several values in one array operation."""
        if len(values):
            column = np.asarray(values, dtype=np.float64)
            added = np.bincount(np.searchsorted(self._bounds, column), minlength=len(self._counts)).tolist()
            self._counts = [count + more for count, more in zip(self._counts, added, strict=True)]
            self._sum += float(column.sum())

    def add_to(self, family: HistogramMetricFamily, label_values: Sequence[str]) -> None:
        """Adds the histogram's samples to a metric family."""
        total = 0
        buckets = []
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(label_values, buckets, self._sum)


class LabelledHistogram(Collector):
    """A registered metric with one Histogram per set of label values."""

    def __init__(
        self, name: str, text: str, registry: CollectorRegistry, bounds: Sequence[float], labels: tuple[str, ...] = ()
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._bounds = tuple(bounds)
        self._histograms: dict[tuple[str, ...], Histogram] = {}
        registry.register(self)

    def labels(self, *values: str) -> Histogram:
        """Returns the histogram of these label values. A frequent caller should store the result."""
        assert len(values) == len(self._labels), "there is one value for each label"
        return self._histograms.setdefault(values, Histogram(self._bounds))

    def describe(self) -> Iterator[Metric]:
        """Yields the metric without samples."""
        yield HistogramMetricFamily(self._name, self._text, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, histogram in self._histograms.items():
            histogram.add_to(family, values)
        yield family
