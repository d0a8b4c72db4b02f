"""Metrics of grammar compilation. A metric that also exists in SGLang has SGLang's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from rootstock_llm.services.shared.observe.histogram import Histogram

LABELS = ("model_name",)
COMPILE_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120)
SOURCE_BUCKETS = (50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class GrammarMetrics(Collector):
    """Metrics of one grammar book. The label is the served model name. At most one thread at a time calls compiled()."""

    def __init__(self, model_name: str, timeouts: Callable[[], int]) -> None:
        """Creates empty histograms.

        Args:
            model_name: served model name.
            timeouts: returns the number of grammars that were refused because their compilation took too long.
        """
        self._label_values = (model_name,)
        self._timeouts = timeouts
        self._seconds, self._chars = Histogram(COMPILE_BUCKETS), Histogram(SOURCE_BUCKETS)

    def compiled(self, seconds: float, chars: int) -> None:
        """Records the compilation of a grammar.

        Args:
            seconds: time from the first request for the grammar until it was compiled.
            chars: characters of the grammar's source.
        """
        self._seconds.observe(seconds)
        self._chars.observe(chars)

    @classmethod
    def describe(cls) -> Iterator[Metric]:
        """Yields every metric without samples."""
        yield from cls._families()

    def collect(self) -> Iterator[Metric]:
        seconds, chars, timeouts = self._families()
        self._seconds.add_to(seconds, self._label_values)
        self._chars.add_to(chars, self._label_values)
        timeouts.add_metric(self._label_values, self._timeouts())
        yield from (seconds, chars, timeouts)

    @staticmethod
    def _families() -> tuple[HistogramMetricFamily, HistogramMetricFamily, CounterMetricFamily]:
        text = "Seconds from the first request for a grammar until it was compiled."
        return (
            HistogramMetricFamily("sglang:grammar_compilation_time_seconds", text, labels=LABELS),
            HistogramMetricFamily(
                "rootstock_worker_grammar_source_chars", "Characters of the source of each compiled grammar.", labels=LABELS
            ),
            CounterMetricFamily(
                "sglang:num_grammar_timeout", "Grammars refused because their compilation takes too long.", labels=LABELS
            ),
        )
