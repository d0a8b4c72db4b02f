"""What is counted of the requests of one model and one API key: its series are looked up once, not with each token."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from services.gateway.observe.key_labels import KeyLabels
from services.shared.observe.histogram import LabelledHistogram
from services.shared.observe.metrics_server import LATENCY_BUCKETS_S

MAX_KEYS = 500  # that have labels of their own, of counters
MAX_LATENCY_KEYS = 50  # of histograms: each has 57 series
LABELS = ("model", "key")


class RequestMetrics:
    """Makes the series. prefix: of the names."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(prefix + name, text, LABELS, registry=registry)

        def histogram(name: str, text: str) -> LabelledHistogram:
            return LabelledHistogram(prefix + name, text, registry, LATENCY_BUCKETS_S, LABELS)

        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts that were answered.")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens that a prefix cache had.")
        self.output_tokens = counter("output_tokens", "Tokens that were generated.")
        self.time_to_first_token = histogram("time_to_first_token_seconds", "Arrival to a choice's first token.")
        self.inter_token_latency = histogram("inter_token_latency_seconds", "Time between two decoded tokens of a choice.")
        self.e2e_latency = histogram("e2e_request_latency_seconds", "Arrival to the last byte of a generation request.")
        self.keys, self._latency_keys = KeyLabels(MAX_KEYS), KeyLabels(MAX_LATENCY_KEYS)
        self._series: dict[tuple[str, str, str], RequestSeries] = {}

    def series(self, model: str, key: str) -> RequestSeries:
        """model: a name that the server knows. key: its name, "" where there are none."""
        labels = model, self.keys.label(key), self._latency_keys.label(key)
        found = self._series.get(labels)
        if found is None:
            found = self._series[labels] = RequestSeries(self, *labels)
        return found


class RequestSeries:
    """key, latency_key: labels."""

    __slots__ = ("_cached", "_e2e", "_first", "_further", "_output", "_prompt")

    def __init__(self, metrics: RequestMetrics, model: str, key: str, latency_key: str) -> None:
        self._prompt = metrics.prompt_tokens.labels(model, key)
        self._cached = metrics.cached_tokens.labels(model, key)
        self._output = metrics.output_tokens.labels(model, key)
        self._first = metrics.time_to_first_token.labels(model, latency_key)
        self._further = metrics.inter_token_latency.labels(model, latency_key)
        self._e2e = metrics.e2e_latency.labels(model, latency_key)

    def first_token(self, since_arrival: float) -> None:
        """Seconds."""
        self._first.observe(since_arrival)

    def further_tokens(self, between_two: float, count: int) -> None:
        """Seconds between each of so many."""
        self._further.observe(between_two, count)

    def answered(self, prompt: int, cached: int, output: int, since_arrival: float) -> None:
        """Tokens; cached: of those of the prompt. Seconds."""
        self._prompt.inc(prompt)
        self._cached.inc(cached)
        self._output.inc(output)
        self._e2e.observe(since_arrival)
