"""The gateway's Prometheus metrics. One writer: the event loop's thread, which also renders /metrics.

Labels are bounded: routes and phases are ours, models are names the server knows or "other", keys are counted (KeyLabels).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.metrics_core import GaugeMetricFamily

from services.gateway.observe.key_labels import OTHER
from services.gateway.observe.request_series import RequestMetrics, RequestSeries
from services.shared.observe.metrics_server import LATENCY_BUCKETS_S
from services.shared.observe.readings import Reading, Readings, Value

PREFIX = "rootstock_gateway_"
RATE_LIMITS = ("requests", "tokens", "concurrency")
HANDOVERS = ("room", "none")  # whether there is KV to be read
BATCH_ENDS = ("completed", "failed", "expired", "cancelled")
BATCH_OUTCOMES = ("completed", "failed")
BACKGROUND_ENDS = ("completed", "incomplete", "failed", "cancelled")
REFUSALS = ("queue_full", "queue_timeout", "no_worker", "paused", "weights_not_served")


def _by_model(waiting: Callable[[], Mapping[str, int]]) -> Value:
    return {(model or OTHER,): count for model, count in waiting().items()}


class QueueMetrics(Readings[Callable[[], Mapping[str, int]]]):
    """Of choices that wait for a worker, by model."""

    rows = (
        Reading(GaugeMetricFamily, f"{PREFIX}queue_length", "Choices that wait for a worker with room.", _by_model, ("model",)),
    )


@dataclass(frozen=True, slots=True)
class KeySigns:
    """shares_are_up: None where there is no Redis to share limits in."""

    file_is_valid: Callable[[], bool]
    shares_are_up: Callable[[], bool | None]


class KeyMetrics(Readings[KeySigns]):
    """Of a gateway with API keys; of others there is nothing to tell."""

    rows = (
        Reading(
            GaugeMetricFamily,
            f"{PREFIX}key_file_valid",
            "1: the API keys are what their file says; 0: it is wrong.",
            lambda signs: signs.file_is_valid(),
        ),
        Reading(
            GaugeMetricFamily,
            f"{PREFIX}key_shares_up",
            "1: keys' limits are shared in Redis; 0: it is away, and each gateway keeps its part.",
            lambda signs: signs.shares_are_up(),
        ),
    )


@dataclass(frozen=True, slots=True)
class StoreSigns:
    """The store's state, as metrics read it."""

    is_up: Callable[[], bool]
    memory: Callable[[], tuple[int, int] | None]  # bytes in use and their limit, 0 without one; None while unknown


class StoreMetrics(Readings[StoreSigns]):
    """Of a gateway that answers batches, and so asks its store all the time; of others there is nothing to tell."""

    rows = (
        Reading(
            GaugeMetricFamily,
            f"{PREFIX}store_up",
            "1: the store of files, batches and responses answers; 0: it does not, and batches stand still.",
            lambda signs: signs.is_up(),
        ),
        Reading(
            GaugeMetricFamily,
            f"{PREFIX}store_memory_used_bytes",
            "Memory that the store's Redis uses, in bytes.",
            lambda signs: None if (memory := signs.memory()) is None else memory[0],
        ),
        Reading(
            GaugeMetricFamily,
            f"{PREFIX}store_memory_max_bytes",
            "Memory limit of the store's Redis, in bytes; absent without a limit. At the limit new records are refused.",
            lambda signs: None if (memory := signs.memory()) is None or not memory[1] else memory[1],
        ),
    )


class GatewayMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        ProcessCollector(registry=registry)
        self.requests = self._counter("requests", "HTTP requests answered.", "route", "model", "code")
        self.aborts = self._counter("aborts", "Requests ended by their client, by how far they had come.", "phase")
        self.retries = self._counter("retries", "Calls or choices that were sent again, by service.", "service")
        self.tls_failures = self._counter(
            "tls_failures", "Looks, one a minute, at peers with which no TLS comes about.", "service"
        )
        self.truncated_prompts = self._counter("truncated_prompts", "Prompts cut to what the context holds.")
        self.in_flight = self._gauge("requests_in_flight", "Generation requests between arrival and last byte.")
        self.decisions = self._counter("routing_decisions", "Choices given to a worker, by why it was that one.", "reason")
        self.moves = self._counter("moves", "Choices that went to another worker.", "cause", "state")
        self.moves.labels("drain", "begun")  # a rate needs the zero before the first
        self.other_numerics = self._counter(
            "moves_to_other_numerics", "Choices of deterministic workers that one whose results have other bits went on with."
        )
        self.handovers = self._counter(
            "handovers", "Choices whose prompt a prefill worker had computed, and with which another worker went on.", "source"
        )
        self.prefetches = self._counter(
            "prefetches", "Prompts whose pages a decode worker was told to read while a prefill worker computed the rest."
        )
        for source in HANDOVERS:
            self.handovers.labels(source)
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
        self.calls_dropped = self._counter(
            "tool_calls_dropped", "Calls that a model wrote of a tool that its request has not, or beyond those it allows."
        )
        self.batches = self._counter("batches", "Batches that this gateway brought to an end, by what they ended as.", "status")
        for status in BATCH_ENDS:
            self.batches.labels(status)
        self.batch_lines = self._counter("batch_lines", "Lines of batches that got their result here, by outcome.", "outcome")
        for outcome in BATCH_OUTCOMES:
            self.batch_lines.labels(outcome)
        self.batch_retries = self._counter("batch_retries", "Tries of lines of batches that found no room, or no worker.")
        self.batches_running = self._gauge("batches_running", "Batches that this gateway has at work.")
        self.batch_lines_in_flight = self._gauge("batch_lines_in_flight", "Lines of batches that are being answered.")
        self.background_responses = self._counter(
            "background_responses",
            "Responses in the background that this gateway brought to an end, by what they ended as.",
            "status",
        )
        for status in BACKGROUND_ENDS:
            self.background_responses.labels(status)
        self.background_takeovers = self._counter(
            "background_takeovers",
            "Responses in the background that this gateway went on with behind another one, or its own end.",
        )
        self.background_running = self._gauge("background_running", "Responses in the background that this gateway has.")
        self.key_requests = self._counter("key_requests", "Generation requests that began, by API key.", "key")
        self.grace_period = self._gauge("grace_period_seconds", "What requests in flight get when this gateway stops.")
        self.connected = self._gauge("connected", "Connected replicas, by service.", "service")
        self.of_requests = RequestMetrics(registry, PREFIX)

    def watch_connected(self, service: str, count: Callable[[], int]) -> None:
        self.connected.labels(service).set_function(lambda: float(count()))

    def watch_bodies(self, pool: str, held: Callable[[], int], waiting: Callable[[], int]) -> None:
        self.body_bytes.labels(pool).set_function(lambda: float(held()))
        self.bodies_waiting.labels(pool).set_function(lambda: float(waiting()))

    def watch_batches(self, running: Callable[[], int], lines: Callable[[], int]) -> None:
        """Of this gateway, where there are any. running: batches. lines: that are being answered."""
        self.batches_running.set_function(lambda: float(running()))
        self.batch_lines_in_flight.set_function(lambda: float(lines()))

    def watch_background(self, running: Callable[[], int]) -> None:
        """Of this gateway, where there are any. running: responses that it has at work, or waiting."""
        self.background_running.set_function(lambda: float(running()))

    def watch_store(self, signs: StoreSigns) -> None:
        """Adds the store's metrics, at a gateway that calls its store all the time."""
        self.registry.register(StoreMetrics(signs))

    def watch_keys(self, signs: KeySigns) -> None:
        """Where there are keys."""
        self.registry.register(KeyMetrics(signs))

    def watch_queue(self, waiting: Callable[[], Mapping[str, int]]) -> None:
        """waiting: choices that wait for a worker, by model."""
        self.registry.register(QueueMetrics(waiting))

    def series(self, model: str, key: str) -> RequestSeries:
        """Of requests of this model that came with this key; see RequestMetrics."""
        return self.of_requests.series(model, key)

    def key_request(self, key: str) -> None:
        """One has begun. key: its name, "" where there are none: then nothing is counted."""
        if key:
            self.key_requests.labels(self.of_requests.keys.label(key)).inc()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(PREFIX + name, text, registry=self.registry, buckets=LATENCY_BUCKETS_S)
