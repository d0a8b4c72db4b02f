"""Histograms for one writing thread: an observation is a bisect and two additions, a tenth of the library's cost."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Buckets:
    """Of one set of label values. bounds: upper ones, included, rising."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def add_to(self, family: HistogramMetricFamily, label_values: Sequence[str]) -> None:
        total = 0
        buckets = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), total))
        family.add_metric(label_values, buckets, self._sum)


class UnlockedHistogram(Collector):
    def __init__(
        self, name: str, text: str, registry: CollectorRegistry, buckets: Sequence[float], labels: tuple[str, ...] = ()
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._bounds = tuple(buckets)
        self._of: dict[tuple[str, ...], Buckets] = {}
        registry.register(self)

    def labels(self, *values: str) -> Buckets:
        """Those of these label values, to be kept by who observes often."""
        assert len(values) == len(self._labels), "a value for each label"
        return self._of.setdefault(values, Buckets(self._bounds))

    def describe(self) -> Iterator[Metric]:
        """Without samples."""
        yield HistogramMetricFamily(self._name, self._text, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, buckets in self._of.items():
            buckets.add_to(family, values)
        yield family
