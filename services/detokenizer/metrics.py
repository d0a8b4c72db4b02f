"""The detokenizer's metrics, all named rootstock_detokenizer_*."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BUCKETS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)


class DetokenizerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "rootstock_detokenizer_"
        self.batches = Counter(prefix + "batches", "Decoded batches.", registry=registry)
        self.tokens = Counter(prefix + "tokens", "Decoded token ids, without replayed ones.", registry=registry)
        self.chars = Counter(prefix + "chars", "Characters of decoded text sent to gateways.", registry=registry)
        self.held_rows = Counter(prefix + "held_rows", "Rows with token ids whose text was held back.", registry=registry)
        self.replayed_tokens = Counter(
            prefix + "replayed_tokens", "Token ids decoded again to rebuild the state of requests.", registry=registry
        )
        self.unknown_rows = Counter(
            prefix + "unknown_rows", "Rows whose handle was not open or whose decoding failed.", registry=registry
        )
        self.failed_rows = Counter(prefix + "failed_rows", "Requests whose decoding failed with an exception.", registry=registry)
        self.streams = Gauge(prefix + "streams", "Open Decode streams.", registry=registry)
        self.open_requests = Gauge(prefix + "open_requests", "Open requests of all streams.", registry=registry)
        self.seconds = Histogram(prefix + "batch_seconds", "Seconds to decode one batch.", buckets=_BUCKETS_S, registry=registry)

    def count(self, tokens: int, chars: int, held_rows: int, unknown_rows: int) -> None:
        """Counts one decoded batch."""
        self.batches.inc()
        self.tokens.inc(tokens)
        self.chars.inc(chars)
        self.held_rows.inc(held_rows)
        self.unknown_rows.inc(unknown_rows)
