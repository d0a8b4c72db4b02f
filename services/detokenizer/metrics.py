"""The detokenizer's metrics, all named rootstock_detokenizer_*."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BUCKETS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)


class DetokenizerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "rootstock_detokenizer_"
        self.batches = Counter(prefix + "batches", "Batches answered.", registry=registry)
        self.tokens = Counter(prefix + "tokens", "Token ids decoded, without those of replays.", registry=registry)
        self.chars = Counter(prefix + "chars", "Characters given out.", registry=registry)
        self.held_rows = Counter(prefix + "held_rows", "Rows with ids and no text (yet).", registry=registry)
        self.replayed_tokens = Counter(prefix + "replayed_tokens", "Token ids replayed to rebuild requests.", registry=registry)
        self.unknown_rows = Counter(prefix + "unknown_rows", "Rows for handles that were not open.", registry=registry)
        self.failed_rows = Counter(prefix + "failed_rows", "Rows that an exception ended.", registry=registry)
        self.streams = Gauge(prefix + "streams", "Decode streams connected.", registry=registry)
        self.open_requests = Gauge(prefix + "open_requests", "Requests open on all streams.", registry=registry)
        self.seconds = Histogram(prefix + "batch_seconds", "Time to answer one batch.", buckets=_BUCKETS_S, registry=registry)

    def count(self, tokens: int, chars: int, held_rows: int, unknown_rows: int) -> None:
        """One answered batch."""
        self.batches.inc()
        self.tokens.inc(tokens)
        self.chars.inc(chars)
        self.held_rows.inc(held_rows)
        self.unknown_rows.inc(unknown_rows)
