"""The tokenizer's metrics, all named rootstock_tokenizer_*."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.0002, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class TokenizerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "rootstock_tokenizer_"
        self.requests = Counter(prefix + "requests", "Ended requests by gRPC status.", ["rpc", "code"], registry=registry)
        self.seconds = Histogram(
            prefix + "request_seconds", "Seconds to serve one request.", ["rpc"], buckets=_SECONDS, registry=registry
        )
        self.in_flight = Gauge(prefix + "in_flight", "Requests in progress.", registry=registry)
        self.tokens = Counter(prefix + "tokens", "Token ids sent to gateways.", registry=registry)
        self.batch_texts = Histogram(prefix + "batch_texts", "Texts encoded in one batch.", buckets=_TEXTS, registry=registry)
        self.render_seconds = Histogram(
            prefix + "render_seconds", "Seconds to render one chat template.", buckets=_SECONDS, registry=registry
        )
        self.render_kills = Counter(
            prefix + "render_kills",
            "Rendering processes that died, or were killed after render_seconds, while they rendered a template.",
            registry=registry,
        )
        self._bytes = Gauge(
            prefix + "held_bytes",
            "Bytes of requests in progress, for the budgets of short and long requests.",
            ["share"],
            registry=registry,
        )

    def watch_bytes(self, share: str, used_bytes: Callable[[], float]) -> None:
        """Reads the gauge held_bytes from a function.

        Args:
            share: value of the label, "short" or "long".
            used_bytes: returns the bytes of the requests in progress in this budget.
        """
        self._bytes.labels(share).set_function(used_bytes)
