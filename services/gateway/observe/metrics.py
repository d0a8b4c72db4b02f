"""The gateway's Prometheus metrics. Only the event loop's thread writes them; it also renders /metrics.

The number of label values is limited: routes and phases are fixed, models are known names or "other", and KeyLabels limits the
names of API keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rootstock_llm.services.shared.observe.histogram import LabelledHistogram
from rootstock_llm.services.shared.observe.metrics_server import LATENCY_BUCKETS_S
from rootstock_llm.services.shared.observe.readings import Reading, Readings, Value

PREFIX = "rootstock_gateway_"
# Label values whose series exist from the start, because a rate needs a sample of 0 before the first event.
RATE_LIMITS = ("requests", "tokens", "concurrency")
HANDOVERS = ("room", "none")  # whether the prefill worker has reserved pages for the decode worker
BATCH_ENDS = ("completed", "failed", "expired", "cancelled")
BATCH_OUTCOMES = ("completed", "failed")
BACKGROUND_ENDS = ("completed", "incomplete", "failed", "cancelled")
REFUSALS = ("queue_full", "queue_timeout", "no_worker", "paused", "weights_not_served")
MAX_KEYS = 500  # API keys with their own label in counters
MAX_LATENCY_KEYS = 50  # API keys with their own label in the three histograms, which have 61 series per label together
# A grace period may be longer than the last bound of LATENCY_BUCKETS_S. RootstockGraceTooShort compares it with request times.
E2E_BUCKETS_S = (*LATENCY_BUCKETS_S, 600.0, 1200.0, 1800.0, 3600.0)
LABELS = ("model", "key")
OTHER = "other"


def _by_model(waiting: Callable[[], Mapping[str, int]]) -> Value:
    return {(model or OTHER,): count for model, count in waiting().items()}


class QueueMetrics(Readings[Callable[[], Mapping[str, int]]]):
    """Metrics of the queues, by model."""

    rows = (
        Reading(
            GaugeMetricFamily,
            f"{PREFIX}queue_length",
            "Choices that wait for a worker with a free slot, and requests that wait for the first worker of their model.",
            _by_model,
            ("model",),
        ),
    )


@dataclass(frozen=True, slots=True)
class KeySigns:
    """The functions by which metrics read the state of the API keys."""

    file_is_valid: Callable[[], bool]
    shares_are_up: Callable[[], bool | None]  # whether gateways share the limits of API keys in Redis, or None without Redis


class KeyMetrics(Readings[KeySigns]):
    """Metrics of a gateway with API keys."""

    rows = (
        Reading(
            GaugeMetricFamily,
            f"{PREFIX}key_file_valid",
            "1 if the file of API keys is valid. 0 if it is invalid; the last valid keys then stay in use.",
            lambda signs: signs.file_is_valid(),
        ),
        Reading(
            GaugeMetricFamily,
            f"{PREFIX}key_shares_up",
            "1 if gateways share the limits of API keys in Redis. 0 if Redis is down; each gateway then applies a part of them.",
            lambda signs: signs.shares_are_up(),
        ),
    )


@dataclass(frozen=True, slots=True)
class StoreSigns:
    """The functions by which metrics read the state of the store."""

    is_up: Callable[[], bool]
    memory: Callable[[], tuple[int, int] | None]  # (bytes in use, limit in bytes or 0 for no limit), or None if unknown


class StoreMetrics(Readings[StoreSigns]):
    """Metrics of the store. Only a gateway that runs batches has them, because other gateways do not call the store regularly."""

    rows = (
        Reading(
            GaugeMetricFamily,
            f"{PREFIX}store_up",
            "1 if the store of files, batches and responses responds. 0 if it does not respond; batches then wait.",
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


class KeyLabels:
    """Names of API keys as label values. The first `most` keys have a label each; all other keys share OTHER."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._named: set[str] = set()

    def label(self, key: str) -> str:
        """Returns the label of an API key's name. The name "" has the label "", which Prometheus treats as no label."""
        if key and key not in self._named:
            if len(self._named) >= self._most:
                return OTHER
            self._named.add(key)
        return key


class RequestMetrics:
    """Metrics of generation requests by model and API key. Makes each series once, so that counting a token needs no look-up."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(prefix + name, text, LABELS, registry=registry)

        def histogram(name: str, text: str, bounds: Sequence[float] = LATENCY_BUCKETS_S) -> LabelledHistogram:
            return LabelledHistogram(prefix + name, text, registry, bounds, LABELS)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of complete responses.")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens whose KV was read from a prefix cache.")
        self.output_tokens = counter("output_tokens", "Output tokens of complete responses.")
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "Seconds from arrival to the first token of a choice."
        )
        self.inter_token_latency = histogram("inter_token_latency_seconds", "Seconds between two tokens of a choice.")
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds",
            "Seconds from the arrival of a generation request to the last byte of its complete response.",
            E2E_BUCKETS_S,
        )
        self.keys, self._latency_keys = KeyLabels(MAX_KEYS), KeyLabels(MAX_LATENCY_KEYS)
        self._series: dict[tuple[str, str, str], RequestSeries] = {}

    def series(self, model: str, key: str) -> RequestSeries:
        """Returns the series of a known model name and an API key's name. `key` is "" if the gateway has no API keys."""
        labels = model, self.keys.label(key), self._latency_keys.label(key)
        found = self._series.get(labels)
        if found is None:
            found = self._series[labels] = RequestSeries(self, *labels)
        return found


class RequestSeries:
    """The series of one model and one API key."""

    __slots__ = ("_cached", "_e2e", "_first", "_further", "_output", "_prompt")

    def __init__(self, metrics: RequestMetrics, model: str, key: str, latency_key: str) -> None:
        self._prompt = metrics.prompt_tokens.labels(model, key)
        self._cached = metrics.cached_tokens.labels(model, key)
        self._output = metrics.output_tokens.labels(model, key)
        self._first = metrics.time_to_first_token.labels(model, latency_key)
        self._further = metrics.inter_token_latency.labels(model, latency_key)
        self._e2e = metrics.e2e_latency.labels(model, latency_key)

    def first_token(self, since_arrival: float) -> None:
        """Observes the seconds from arrival to the first token of a choice."""
        self._first.observe(since_arrival)

    def further_tokens(self, between_two: float, count: int) -> None:
        """Observes `count` tokens after the first one, with `between_two` seconds between two tokens."""
        self._further.observe(between_two, count)

    def answered(self, prompt: int, cached: int, output: int, since_arrival: float) -> None:
        """Counts a complete response.

        Args:
            prompt: Prompt tokens, including cached tokens.
            cached: Prompt tokens from a prefix cache.
            output: Output tokens.
            since_arrival: Seconds from arrival to the last byte.
        """
        self._prompt.inc(prompt)
        self._cached.inc(cached)
        self._output.inc(output)
        self._e2e.observe(since_arrival)


class GatewayMetrics:
    """All metrics of the gateway. Each process has one GatewayMetrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        ProcessCollector(registry=registry)
        self.requests = self._counter(
            "requests", "HTTP requests that have ended, by status code; 499 if the client disconnected.", "route", "model", "code"
        )
        self.aborts = self._counter("aborts", "Generation requests whose client disconnected, by phase.", "phase")
        self.retries = self._counter("retries", "Tokenizer calls and decodings that were sent again, by service.", "service")
        self.tls_failures = self._counter(
            "tls_failures", "Failed TLS handshakes with other services, counted at most once per minute and address.", "service"
        )
        self.truncated_prompts = self._counter(
            "truncated_prompts", "Prompts truncated to the context length or to `truncate_prompt_tokens`."
        )
        self.in_flight = self._gauge("requests_in_flight", "Generation requests between arrival and last byte.")
        self.decisions = self._counter("routing_decisions", "Choices submitted to a worker, by reason of the decision.", "reason")
        self.moves = self._counter("moves", "Choices that moved to another worker.", "cause", "state")
        self.moves.labels("drain", "begun")  # a rate needs a sample of 0 before the first event
        self.other_numerics = self._counter(
            "moves_to_other_numerics", "Choices that moved from a deterministic worker to a worker with other numerics."
        )
        self.handovers = self._counter("handovers", "Choices that moved from a prefill worker to a decode worker.", "source")
        self.prefetches = self._counter(
            "prefetches", "Prompts whose pages a decode worker read while a prefill worker computed the rest."
        )
        for source in HANDOVERS:
            self.handovers.labels(source)
        self.predicted_tokens = self._counter("predicted_cached_tokens", "Prompt tokens that routing expected to be cached.")
        self.queue_time = self._histogram("queue_time_seconds", "Seconds that a choice waited for a worker with a free slot.")
        self.refusals = self._counter("refusals", "Choices refused with 503 because no worker took them, by reason.", "reason")
        for reason in REFUSALS:
            self.refusals.labels(reason)  # a rate needs a sample of 0 before the first event
        self.bodies_refused = self._counter("bodies_refused", "Requests refused with 503 because the body budget was full.")
        self.body_bytes = self._gauge("body_bytes", "Bytes of the body budget that request bodies reserve, by pool.", "pool")
        self.bodies_waiting = self._gauge("bodies_waiting", "Request bodies that wait for the body budget, by pool.", "pool")
        self.rate_limited = self._counter("rate_limited", "Requests refused with 429, by the limit of their API key.", "limit")
        for kind in RATE_LIMITS:
            self.rate_limited.labels(kind)
        self.calls_dropped = self._counter(
            "tool_calls_dropped", "Tool calls in outputs that name an unknown tool or exceed the allowed number."
        )
        self.batches = self._counter("batches", "Batches that ended at this gateway, by final status.", "status")
        for status in BATCH_ENDS:
            self.batches.labels(status)
        self.batch_lines = self._counter("batch_lines", "Batch lines with a result from this gateway, by outcome.", "outcome")
        for outcome in BATCH_OUTCOMES:
            self.batch_lines.labels(outcome)
        self.batch_retries = self._counter(
            "batch_retries", "Failed attempts at batch lines that are repeated, for example after a full queue or a lost worker."
        )
        self.batches_running = self._gauge("batches_running", "Batches that this gateway runs.")
        self.batch_lines_in_flight = self._gauge("batch_lines_in_flight", "Batch lines that this gateway computes.")
        self.background_responses = self._counter(
            "background_responses",
            "Background responses that ended at this gateway, by final status.",
            "status",
        )
        for status in BACKGROUND_ENDS:
            self.background_responses.labels(status)
        self.background_takeovers = self._counter(
            "background_takeovers",
            "Background responses that this gateway continued after another gateway, or after its own restart.",
        )
        self.background_running = self._gauge("background_running", "Background responses that this gateway runs or queues.")
        self.key_requests = self._counter("key_requests", "Generation requests that began, by API key.", "key")
        self.grace_period = self._gauge("grace_period_seconds", "Seconds that requests in flight get when this gateway stops.")
        self.connected = self._gauge(
            "connected",
            "Connected replicas, by service. A worker counts only while this gateway may send it requests.",
            "service",
        )
        self.of_requests = RequestMetrics(registry, PREFIX)

    def watch_connected(self, service: str, count: Callable[[], int]) -> None:
        self.connected.labels(service).set_function(lambda: float(count()))

    def watch_bodies(self, pool: str, reserved: Callable[[], int], waiting: Callable[[], int]) -> None:
        self.body_bytes.labels(pool).set_function(lambda: float(reserved()))
        self.bodies_waiting.labels(pool).set_function(lambda: float(waiting()))

    def watch_batches(self, running: Callable[[], int], lines: Callable[[], int]) -> None:
        """Sets the functions that the gauges of batches and of their open lines read."""
        self.batches_running.set_function(lambda: float(running()))
        self.batch_lines_in_flight.set_function(lambda: float(lines()))

    def watch_background(self, running: Callable[[], int]) -> None:
        """Sets the function that the gauge of open background responses reads."""
        self.background_running.set_function(lambda: float(running()))

    def watch_store(self, signs: StoreSigns) -> None:
        """Adds the store's metrics. Called only at a gateway that calls its store regularly."""
        self.registry.register(StoreMetrics(signs))

    def watch_keys(self, signs: KeySigns) -> None:
        """Adds the metrics of API keys."""
        self.registry.register(KeyMetrics(signs))

    def watch_queue(self, waiting: Callable[[], Mapping[str, int]]) -> None:
        """Adds the metrics of the queues. `waiting` returns the waiting choices and requests by model."""
        self.registry.register(QueueMetrics(waiting))

    def series(self, model: str, key: str) -> RequestSeries:
        """Returns the series of a model and an API key, by their names; see RequestMetrics."""
        return self.of_requests.series(model, key)

    def key_request(self, key: str) -> None:
        """Counts a generation request of this API key. Has no effect if `key` is ""."""
        if key:
            self.key_requests.labels(self.of_requests.keys.label(key)).inc()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(PREFIX + name, text, registry=self.registry, buckets=LATENCY_BUCKETS_S)


class Scrapes(Collector):
    """Records the time of the last scrape on any port. Every scrape calls collect(), which returns no series."""

    def __init__(self) -> None:
        self._scraped_at: float | None = None

    def collect(self) -> Iterable[Metric]:
        self._scraped_at = time.monotonic()
        return ()

    def scraped_s_ago(self) -> float | None:
        """Returns the seconds since the last scrape, or None before the first one."""
        return None if self._scraped_at is None else time.monotonic() - self._scraped_at
