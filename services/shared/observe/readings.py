"""Metrics that are read off an object at a scrape, a row each: what a row says of itself is known without the object."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Source = TypeVar("Source")
Value = float | Mapping[tuple[str, ...], float] | None
"""One figure; figures by the values of the row's own labels; None: there is nothing to tell."""


@dataclass(frozen=True, slots=True)
class Reading(Generic[Source]):
    """name: without the _total that a counter's samples end in. labels: the row's own, beside those of its collector."""

    family: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    text: str
    read: Callable[[Source], Value]
    labels: tuple[str, ...] = ()

    def described(self, labels: tuple[str, ...]) -> GaugeMetricFamily | CounterMetricFamily:
        """Without samples."""
        return self.family(self.name, self.text, labels=(*labels, *self.labels))

    def collect(self, source: Source, labels: tuple[str, ...], label_values: tuple[str, ...]) -> Iterator[Metric]:
        value = self.read(source)
        if value is None:
            return
        family = self.described(labels)
        for own, figure in value.items() if isinstance(value, Mapping) else [((), value)]:
            family.add_metric((*label_values, *own), float(figure))
        yield family


class Readings(Collector, ABC, Generic[Source]):
    """A collector whose metrics are rows. labels: what all of them have in common, with one value for each here."""

    rows: ClassVar[tuple[Reading[Any], ...]]
    labels: ClassVar[tuple[str, ...]] = ()

    def __init__(self, source: Source, *label_values: str) -> None:
        assert len(label_values) == len(self.labels), "a value for each label"
        self._source = source
        self._label_values = label_values

    @classmethod
    def describe(cls) -> Iterator[Metric]:
        """Every metric, without samples."""
        for row in cls.rows:
            yield row.described(cls.labels)

    def collect(self) -> Iterator[Metric]:
        for row in self.rows:
            yield from row.collect(self._source, self.labels, self._label_values)
