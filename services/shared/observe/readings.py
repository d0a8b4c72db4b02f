"""Metrics whose values are read from an object at each scrape.

Each metric is one row (Reading). Its name, help text and labels are known without the object, so the reference can be generated
without a running worker.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Source = TypeVar("Source")
# A number, or numbers by label values. None: the metric has no samples in this scrape.
Value = float | Mapping[tuple[str, ...], float] | None


@dataclass(frozen=True, slots=True)
class Reading(Generic[Source]):
    """A metric, and the function that reads its value from the source object."""

    family: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str  # without the suffix _total of counters
    text: str  # help text
    read: Callable[[Source], Value]  # called at each scrape
    labels: tuple[str, ...] = ()  # labels of this metric, in addition to the collector's

    def described(self, labels: tuple[str, ...]) -> GaugeMetricFamily | CounterMetricFamily:
        """Returns the metric without samples."""
        return self.family(self.name, self.text, labels=(*labels, *self.labels))

    def collect(self, source: Source, labels: tuple[str, ...], label_values: tuple[str, ...]) -> Iterator[Metric]:
        value = self.read(source)
        if value is None:
            return
        family = self.described(labels)
        for own_labels, number in value.items() if isinstance(value, Mapping) else [((), value)]:
            family.add_metric((*label_values, *own_labels), float(number))
        yield family


class Readings(Collector, ABC, Generic[Source]):
    """A collector of the metrics in `rows`."""

    rows: ClassVar[tuple[Reading[Any], ...]]
    labels: ClassVar[tuple[str, ...]] = ()  # labels of all rows; the constructor takes their values

    def __init__(self, source: Source, *label_values: str) -> None:
        assert len(label_values) == len(self.labels), "there is one value for each label"
        self._source = source
        self._label_values = label_values

    @classmethod
    def describe(cls) -> Iterator[Metric]:
        """Yields every metric without samples."""
        for row in cls.rows:
            yield row.described(cls.labels)

    def collect(self) -> Iterator[Metric]:
        for row in self.rows:
            yield from row.collect(self._source, self.labels, self._label_values)
