"""The worker's metrics under SGLang's names (docs/metrics.md), from what the loop's turns add up to.

A figure of the scheduler's is a field of StepStats that says so; one of the loop's a field of LoopCounts and a row here.
`sent` and `arrived` are called on the threads of the loop and of the server, `collect` by scrapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from services.shared.observe.readings import Reading, Value
from services.worker.core.contracts.messages import FinishReason, StepOutput
from services.worker.core.stats import Told, told
from services.worker.metrics.histogram import BatchHistogram
from services.worker.metrics.loop_counts import LoopCounts

LABELS = ("model_name", "engine_type", "tp_rank", "pp_rank")
TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
ITL_BUCKETS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 8)
E2E_BUCKETS = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200, 1800, 2400)
QUEUE_BUCKETS = (0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
TTFT = ("sglang:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS)
ITL = ("sglang:inter_token_latency_seconds", "Time between a request's tokens.", ITL_BUCKETS)
E2E = ("sglang:e2e_request_latency_seconds", "Arrival to end.", E2E_BUCKETS)
QUEUE = ("sglang:queue_time_seconds", "Arrival to first step.", QUEUE_BUCKETS)


def _figure(field: str, mark: Told, counts: LoopCounts) -> float:
    value = float(getattr(counts.stats, field))
    return value * counts.page_size if mark.in_pages else value


def _of_stats(field: str, mark: Told) -> Reading[LoopCounts]:
    family = Counter if field.endswith("_total") else Gauge
    return Reading(family, mark.metric, mark.text, partial(_figure, field, mark))


def _waiting(counts: LoopCounts) -> Value:
    return counts.stats.num_waiting - counts.stats.num_gated if counts.stats is not None else None


def _tokens_by_mode(counts: LoopCounts) -> Value:
    cached = counts.stats.cached_tokens_total if counts.stats is not None else 0
    return {("prefill_compute",): counts.prefill_tokens, ("prefill_cache",): cached, ("decode",): counts.decode_tokens}


BLOCKS = "rootstock_worker_cache_blocks_"
ROWS: tuple[Reading[LoopCounts], ...] = (
    *(_of_stats(field, mark) for field, mark in told().items()),
    Reading(Gauge, "sglang:num_queue_reqs", "Requests that wait to run.", _waiting),
    Reading(Gauge, "sglang:num_used_tokens", "Tokens of KV that running requests use.", lambda c: c.used_tokens),
    Reading(Gauge, "sglang:kv_used_tokens", "Tokens of KV that running requests use.", lambda c: c.used_tokens),
    Reading(
        Gauge,
        "sglang:token_usage",
        "Share of the KV pool that running requests use.",
        lambda c: c.used_tokens / (c.num_pages * c.page_size),
    ),
    Reading(Gauge, "sglang:max_total_num_tokens", "Size of the KV pool in tokens.", lambda c: c.num_pages * c.page_size),
    Reading(Gauge, "rootstock_worker_max_running_requests", "Requests that can run at once.", lambda c: c.max_running),
    Reading(Gauge, "sglang:gen_throughput", "Output tokens per second lately.", lambda c: c.throughput),
    Reading(Gauge, "sglang:cache_hit_rate", "Share of admitted prompt tokens that were cached, lately.", lambda c: c.hit_rate),
    Reading(Counter, BLOCKS + "stored", "Blocks that became cached here, where events are on.", lambda c: c.stored_blocks),
    Reading(Counter, BLOCKS + "removed", "Blocks that were evicted, where events are on.", lambda c: c.removed_blocks),
    Reading(
        Counter,
        "rootstock_worker_cache_cleared",
        "Times that all blocks went at once, where events are on.",
        lambda c: c.cleared,
    ),
    Reading(Counter, "rootstock_worker_forward_steps", "Steps that were launched.", lambda c: c.steps),
    Reading(Counter, "sglang:realtime_tokens", "Tokens as they are computed.", _tokens_by_mode, ("mode",)),
)


def _pool_shape() -> InfoMetricFamily:
    return InfoMetricFamily("sglang:cache_config", "Shape of the KV pool.", labels=LABELS)


class WorkerMetrics(Collector):
    """counts: what the loop's turns add up to. arrived() must be called for each submit, from any thread."""

    def __init__(self, model_name: str, counts: LoopCounts, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts = counts
        self._label_values = (model_name, "unified", "0", "0")
        self._clock = clock
        self._arrivals: dict[tuple[int, int], float] = {}
        self._last: dict[tuple[int, int], float] = {}
        self._ttft, self._itl, self._e2e, self._queue = (BatchHistogram(*each) for each in (TTFT, ITL, E2E, QUEUE))

    def arrived(self, peer: int, handle: int) -> None:
        self._arrivals[peer, handle] = self._clock()

    def sent(self, output: StepOutput) -> None:
        """Latencies of the tokens and ends in one step's output."""
        now = self._clock()
        first: list[float] = []
        gaps: list[float] = []
        for peer in output.peers:
            for handle, count in zip(peer.handles, peer.counts, strict=True):
                key = (peer.peer, handle)
                before = self._last.get(key)
                if before is None:
                    first.append(now - self._arrivals.get(key, now))
                else:
                    gaps += [(now - before) / count] * count
                self._last[key] = now
            self._ended(peer.peer, [f.handle for f in peer.finishes if f.reason is not FinishReason.ABORT], now)
            self._queue.observe(
                np.array([f.queue_s for f in peer.finishes if f.reason is not FinishReason.ABORT or f.completion_tokens])
            )
            for finish in peer.finishes:
                self._arrivals.pop((peer.peer, finish.handle), None)
                self._last.pop((peer.peer, finish.handle), None)
        self._ttft.observe(np.array(first))
        self._itl.observe(np.array(gaps))

    def _ended(self, peer: int, handles: list[int], now: float) -> None:
        self._e2e.observe(np.array([now - self._arrivals.get((peer, handle), now) for handle in handles]))

    # Read by scrapes

    @classmethod
    def describe(cls) -> Iterator[Metric]:
        """Every metric, without samples."""
        yield from (HistogramMetricFamily(name, text, labels=LABELS) for name, text, _ in (TTFT, ITL, E2E, QUEUE))
        yield _pool_shape()
        yield from (row.described(LABELS) for row in ROWS)

    def collect(self) -> Iterator[Metric]:
        counts = self.counts
        for histogram in (self._ttft, self._itl, self._e2e, self._queue):
            yield histogram.collect(LABELS, self._label_values)
        info = _pool_shape()
        info.add_metric(self._label_values, {"page_size": str(counts.page_size), "num_pages": str(counts.num_pages)})
        yield info
        if counts.stats is not None:
            for row in ROWS:
                yield from row.collect(counts, LABELS, self._label_values)
