"""The gateway's Prometheus metrics. One writer: the event loop's thread, which also renders /metrics.

Labels are bounded: routes and phases are ours, models are names the server knows or "other".
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Count
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from services.gateway.routing.breaker import BreakerState
from services.shared.observe.metrics_server import LATENCY_BUCKETS_S

if TYPE_CHECKING:
    from services.gateway.dispatch.fleet import Fleet
    from services.gateway.index.mirror import IndexMirror

PREFIX = "rootstock_gateway_"
OTHER = "other"
REFUSALS = ("queue_full", "queue_timeout", "no_worker", "paused", "weights_not_served")


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


class QueueCollector(Collector):
    def __init__(self, waiting: Callable[[], Mapping[str, int]]) -> None:
        self._waiting = waiting

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(f"{PREFIX}queue_length", "Choices that wait for a worker with room.", labels=["model"])
        for model, count in self._waiting().items():
            family.add_metric([model or OTHER], float(count))
        yield family


class FleetCollector(Collector):
    """Workers and the prefix index as the gateway sees them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        fleet = self._fleet
        workers = GaugeMetricFamily(f"{PREFIX}workers", "Workers by model and state.", labels=["model", "state"])
        for name, pool in fleet.pools.items():
            usable = len(pool.usable())
            workers.add_metric([name, "usable"], float(usable))
            workers.add_metric([name, "unusable"], float(len(pool.links) - usable))
        yield workers
        breakers = Count(link.breaker.state.value for link in fleet.links.values())
        family = GaugeMetricFamily(f"{PREFIX}breakers", "Workers by the state of their circuit breaker.", labels=["state"])
        for state in BreakerState:
            family.add_metric([state.value], float(breakers[state.value]))
        yield family
        if fleet.index is not None:
            yield self._gauge("index_blocks", "Blocks in this copy of the prefix index.", fleet.index.num_blocks)
            yield self._gauge(
                "index_speculative_blocks", "Blocks thought to be where they were sent.", fleet.index.num_speculative
            )
        if fleet.mirror is not None:
            yield from self._mirror(fleet.mirror)

    def _mirror(self, mirror: IndexMirror) -> Iterator[Metric]:
        yield self._gauge("index_up", "Whether Redis answers; without it routing goes by what is known.", mirror.available)
        yield self._gauge("index_lag_seconds", "Time since this copy had all that Redis had.", mirror.lag_s)
        for name, text, value in (
            ("index_events", "Batches of changes that were read.", mirror.counts.events),
            ("index_bad_events", "Entries that were no batch of changes.", mirror.counts.bad_events),
            ("index_loads", "Times that all blocks of a worker were read.", mirror.counts.loads),
            ("index_gaps", "Of those, because batches had been missed.", mirror.counts.gaps),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=float(value))

    @staticmethod
    def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
        return GaugeMetricFamily(PREFIX + name, text, value=float(value))


class GatewayMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        ProcessCollector(registry=registry)
        self.requests = self._counter("requests", "HTTP requests answered.", "route", "model", "code")
        self.aborts = self._counter("aborts", "Requests ended by their client, by how far they had come.", "phase")
        self.retries = self._counter("retries", "Calls or choices that were sent again, by service.", "service")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that were answered.")
        self.truncated_prompts = self._counter("truncated_prompts", "Prompts cut to what the context holds.")
        self.output_tokens = self._counter("output_tokens", "Tokens that were generated.")
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens that a prefix cache had.")
        self.in_flight = self._gauge("requests_in_flight", "Generation requests between arrival and last byte.")
        self.decisions = self._counter("routing_decisions", "Choices given to a worker, by why it was that one.", "reason")
        self.moves = self._counter("moves", "Choices that went to another worker.", "cause", "state")
        self.moves.labels("drain", "begun")  # a rate needs the zero before the first
        self.predicted_tokens = self._counter("predicted_cached_tokens", "Prompt tokens that routing took to be cached.")
        self.queue_time = self._histogram("queue_time_seconds", "Time that a choice waited for a worker with room.")
        self.refusals = self._counter("refusals", "Choices turned away with a 503 for want of a worker, by why.", "reason")
        for reason in REFUSALS:
            self.refusals.labels(reason)  # a rate needs the zero before the first
        self.grace_period = self._gauge("grace_period_seconds", "What requests in flight get when this gateway stops.")
        self.connected = self._gauge("connected", "Connected replicas, by service.", "service")
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "Arrival to a choice's first decoded token.")
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "Arrival to the last byte of a generation request.")
        self.inter_token_latency = UnlockedHistogram(
            f"{PREFIX}inter_token_latency_seconds", "Time between two decoded tokens of a choice.", registry, LATENCY_BUCKETS_S
        )

    def watch_connected(self, service: str, count: Callable[[], int]) -> None:
        self.connected.labels(service).set_function(lambda: float(count()))

    def watch_queue(self, waiting: Callable[[], Mapping[str, int]]) -> None:
        """waiting: choices that wait for a worker, by model."""
        self.registry.register(QueueCollector(waiting))

    def watch_fleet(self, fleet: Fleet) -> None:
        self.registry.register(FleetCollector(fleet))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(PREFIX + name, text, registry=self.registry, buckets=LATENCY_BUCKETS_S)
