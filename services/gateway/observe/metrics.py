"""The gateway's Prometheus metrics. One writer: the event loop's thread, which also renders /metrics.

Labels are bounded: routes and phases are ours, models are names the server knows or "other".
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from services.shared.observe.metrics_server import LATENCY_BUCKETS_S
from services.shared.observe.readings import Reading, Readings, Value

PREFIX = "rootstock_gateway_"
OTHER = "other"
RATE_LIMITS = ("requests", "tokens", "concurrency")
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

    def describe(self) -> Iterator[Metric]:
        """Without samples."""
        yield HistogramMetricFamily(self._name, self._text)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        total = 0
        buckets = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), total))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


def _by_model(waiting: Callable[[], Mapping[str, int]]) -> Value:
    return {(model or OTHER,): count for model, count in waiting().items()}


class QueueMetrics(Readings[Callable[[], Mapping[str, int]]]):
    """Of choices that wait for a worker, by model."""

    rows = (
        Reading(GaugeMetricFamily, f"{PREFIX}queue_length", "Choices that wait for a worker with room.", _by_model, ("model",)),
    )


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
        self.bodies_refused = self._counter("bodies_refused", "Requests turned away with a 503 for want of room for a body.")
        self.body_bytes = self._gauge("body_bytes", "Bytes that bodies hold until they are prepared, by pool.", "pool")
        self.bodies_waiting = self._gauge("bodies_waiting", "Bodies that wait for room, by pool.", "pool")
        self.rate_limited = self._counter(
            "rate_limited", "Requests turned away with a 429, by the limit of their API key.", "limit"
        )
        for kind in RATE_LIMITS:
            self.rate_limited.labels(kind)
        self.key_requests = self._counter("key_requests", "Generation requests that began, by API key.", "key")
        self.key_prompt_tokens = self._counter("key_prompt_tokens", "Tokens of prompts that were answered, by API key.", "key")
        self.key_cached_tokens = self._counter("key_cached_tokens", "Prompt tokens that a cache had, by API key.", "key")
        self.key_output_tokens = self._counter("key_output_tokens", "Tokens that were generated, by API key.", "key")
        self.key_file_valid = self._gauge("key_file_valid", "1: the API keys are what their file says; 0: it is wrong.")
        self.key_shares_up = self._gauge("key_shares_up", "1: keys' limits are shared in Redis; 0: each gateway keeps its part.")
        self.grace_period = self._gauge("grace_period_seconds", "What requests in flight get when this gateway stops.")
        self.connected = self._gauge("connected", "Connected replicas, by service.", "service")
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "Arrival to a choice's first token.")
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "Arrival to the last byte of a generation request.")
        self.inter_token_latency = UnlockedHistogram(
            f"{PREFIX}inter_token_latency_seconds", "Time between two decoded tokens of a choice.", registry, LATENCY_BUCKETS_S
        )

    def watch_connected(self, service: str, count: Callable[[], int]) -> None:
        self.connected.labels(service).set_function(lambda: float(count()))

    def watch_bodies(self, pool: str, held: Callable[[], int], waiting: Callable[[], int]) -> None:
        self.body_bytes.labels(pool).set_function(lambda: float(held()))
        self.bodies_waiting.labels(pool).set_function(lambda: float(waiting()))

    def watch_keys(self, file_is_valid: Callable[[], bool], shares_are_up: Callable[[], bool]) -> None:
        self.key_file_valid.set_function(lambda: float(file_is_valid()))
        self.key_shares_up.set_function(lambda: float(shares_are_up()))

    def watch_queue(self, waiting: Callable[[], Mapping[str, int]]) -> None:
        """waiting: choices that wait for a worker, by model."""
        self.registry.register(QueueMetrics(waiting))

    def first_token(self, since_arrival: float) -> None:
        """Seconds."""
        self.time_to_first_token.observe(since_arrival)

    def further_tokens(self, between_two: float, count: int) -> None:
        """Seconds between each of so many."""
        self.inter_token_latency.observe(between_two, count)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(PREFIX + name, text, registry=self.registry, buckets=LATENCY_BUCKETS_S)
