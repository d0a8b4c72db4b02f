"""What keys have used, counted under their names. Names are bounded: those that come first have a label each, all others one."""

from __future__ import annotations

from services.gateway.observe.metrics import OTHER, GatewayMetrics

MAX_LABELS = 500


class KeyUsage:
    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._named: set[str] = set()

    def request(self, key: str) -> None:
        """One has begun. key: its name, "" where there are none: then nothing is counted."""
        if key:
            self._metrics.key_requests.labels(self._label(key)).inc()

    def tokens(self, key: str, prompt: int, cached: int, output: int) -> None:
        """Of a request that was answered. cached: of those of the prompt."""
        if key:
            label = self._label(key)
            self._metrics.key_prompt_tokens.labels(label).inc(prompt)
            self._metrics.key_cached_tokens.labels(label).inc(cached)
            self._metrics.key_output_tokens.labels(label).inc(output)

    def _label(self, key: str) -> str:
        if key not in self._named:
            if len(self._named) >= MAX_LABELS:
                return OTHER
            self._named.add(key)
        return key
