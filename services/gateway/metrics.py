"""The gateway's Prometheus metrics. One writer: the event loop's thread, which also renders /metrics.

Labels are bounded: routes and phases are ours, models are names the server knows or "other".
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from services.shared.metrics import LATENCY_BUCKETS_S

PREFIX = "rootstock_gateway_"
OTHER = "other"


class UnlockedHistogram(Collector):
    """A histogram for one writing thread: an observation is a bisect and two additions, a tenth of the library's cost."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry, buckets: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        total = 0
        buckets = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), total))  # type: ignore[no-untyped-call]
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class GatewayMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        ProcessCollector(registry=registry)
        self.requests = self._counter("requests", "HTTP requests answered.", "route", "model", "code")
        self.aborts = self._counter("aborts", "Requests ended by their client, by how far they had come.", "phase")
        self.retries = self._counter("retries", "Calls or choices that were sent again, by service.", "service")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that were answered.")
        self.output_tokens = self._counter("output_tokens", "Tokens that were generated.")
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens that a prefix cache had.")
        self.in_flight = self._gauge("requests_in_flight", "Generation requests between arrival and last byte.")
        self.queue_length = self._gauge("queue_length", "Choices that wait for a worker to connect.")
        self.connected = self._gauge("connected", "Connected replicas, by service.", "service")
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "Arrival to a choice's first decoded token.")
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "Arrival to the last byte of a generation request.")
        self.inter_token_latency = UnlockedHistogram(
            f"{PREFIX}inter_token_latency_seconds", "Time between two decoded tokens of a choice.", registry, LATENCY_BUCKETS_S
        )

    def watch_connected(self, service: str, count: Callable[[], int]) -> None:
        self.connected.labels(service).set_function(lambda: float(count()))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(PREFIX + name, text, registry=self.registry, buckets=LATENCY_BUCKETS_S)
