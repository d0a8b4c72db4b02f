"""The worker's metrics under SGLang's names (docs/reference/metrics.md), from the sums over the loop's turns.

A scheduler metric is an annotated field of StepStats. A loop metric is a field of LoopCounts with a row here. RequestTimes has
the latencies of requests. Scrapes call collect().
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from services.shared.observe.readings import Reading, Value
from services.worker.core.contracts.counters import Told, told
from services.worker.metrics.loop_counts import LoopCounts
from services.worker.metrics.request_times import DISTRIBUTIONS, RequestTimes

LABELS = ("model_name", "engine_type", "tp_rank", "pp_rank")


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


def _seconds_by_mode(counts: LoopCounts) -> Value:
    return {(mode.name.lower(),): seconds for mode, seconds in counts.forward_s.items()}


def _paused(counts: LoopCounts) -> Value:
    return counts.stats.num_running if counts.stats is not None and counts.stats.paused else 0


KEY_BOUNDS = (1, 2, 3, 5, 7, 10, 20, 50, 100, 200)  # SGLang's buckets of requests per routing key


def _keys_by_requests(requests: Sequence[int]) -> Value:
    """Returns the number of routing keys by the number of their requests, for each bucket: above `gt` and up to `le`."""
    edges = [*map(str, KEY_BOUNDS), "+Inf"]
    keys = Tally(bisect_left(KEY_BOUNDS, each) for each in requests)
    return {(lower, upper): keys[at] for at, (lower, upper) in enumerate(pairwise(["0", *edges]))}


BLOCKS = "rootstock_worker_cache_blocks_"
ROWS: tuple[Reading[LoopCounts], ...] = (
    *(_of_stats(field, mark) for field, mark in told().items()),
    Reading(Gauge, "sglang:num_queue_reqs", "Requests that wait for admission.", _waiting),
    Reading(Gauge, "sglang:num_paused_reqs", "Running requests that keep their memory during a pause.", _paused),
    Reading(
        Gauge,
        "sglang:num_unique_running_routing_keys",
        "Routing keys with a running request.",
        lambda c: len(c.stats.running_by_key) if c.stats is not None else None,
    ),
    Reading(
        Gauge,
        "sglang:routing_keys_active",
        "Routing keys with a request on this worker.",
        lambda c: len(c.stats.requests_by_key) if c.stats is not None else None,
    ),
    Reading(
        Gauge,
        "sglang:routing_key_running_req_count",
        "Routing keys by the number of their running requests: more than `gt`, at most `le`.",
        lambda c: _keys_by_requests(c.stats.running_by_key) if c.stats is not None else None,
        ("gt", "le"),
    ),
    Reading(
        Gauge,
        "sglang:routing_key_all_req_count",
        "Routing keys by the number of their running and waiting requests: more than `gt`, at most `le`.",
        lambda c: _keys_by_requests(c.stats.requests_by_key) if c.stats is not None else None,
        ("gt", "le"),
    ),
    Reading(
        Gauge,
        "sglang:decode_sum_seq_lens",
        "Tokens of context of all decode rows in the latest step.",
        lambda c: c.decode_context_tokens,
    ),
    Reading(Gauge, "sglang:num_used_tokens", "Tokens of KV that running requests use.", lambda c: c.used_tokens),
    Reading(Gauge, "sglang:kv_used_tokens", "Tokens of KV that running requests use.", lambda c: c.used_tokens),
    Reading(
        Gauge,
        "sglang:token_usage",
        "Share of the KV pool that running requests use.",
        lambda c: c.used_tokens / (c.num_pages * c.page_size),
    ),
    Reading(Gauge, "sglang:max_total_num_tokens", "Size of the KV pool in tokens.", lambda c: c.num_pages * c.page_size),
    Reading(Gauge, "sglang:page_size", "Tokens of a page of KV.", lambda c: c.page_size),
    Reading(Gauge, "sglang:num_pages", "Size of the KV pool in pages.", lambda c: c.num_pages),
    Reading(Gauge, "sglang:gen_throughput", "Output tokens per second over the last 10 s.", lambda c: c.throughput),
    Reading(
        Gauge,
        "sglang:cache_hit_rate",
        "Share of admitted prompt tokens that were cached, over the last 10 s.",
        lambda c: c.hit_rate,
    ),
    Reading(
        Gauge,
        "sglang:spec_accept_length",
        "Tokens per decode row with draft tokens, over the last 10 s.",
        lambda c: c.accept_length,
    ),
    Reading(
        Gauge, "sglang:spec_accept_rate", "Share of draft tokens that were accepted, over the last 10 s.", lambda c: c.accept_rate
    ),
    Reading(
        Counter, BLOCKS + "stored", "Blocks that became cached on this worker, if cache events are on.", lambda c: c.stored_blocks
    ),
    Reading(Counter, BLOCKS + "removed", "Blocks that left every tier, if cache events are on.", lambda c: c.removed_blocks),
    Reading(
        Counter,
        "rootstock_worker_cache_cleared",
        "Resets of all cached blocks, if cache events are on.",
        lambda c: c.cleared,
    ),
    Reading(Counter, "rootstock_worker_forward_steps", "Launched steps.", lambda c: c.steps),
    Reading(
        Counter,
        "sglang:forward_execution_seconds",
        "Seconds of steps as the host sees them: from the launch, or from the end of the previous step, to the result.",
        _seconds_by_mode,
        ("category",),
    ),
    Reading(
        Counter,
        "rootstock_worker_bubble_seconds",
        "Seconds between steps in which no step was in flight although requests ran, as the host sees it.",
        lambda c: c.bubble_s,
    ),
    Reading(
        Counter, "sglang:scheduler_idle_seconds", "Seconds in which the scheduler loop waited for messages.", lambda c: c.idle_s
    ),
    Reading(Gauge, "sglang:fwd_occupancy", "Percentage of the last 10 s in which a step was computed.", lambda c: c.occupancy),
    Reading(
        Counter,
        "sglang:realtime_tokens",
        "Tokens by mode: computed prompt tokens, cached prompt tokens, and decode tokens.",
        _tokens_by_mode,
        ("mode",),
    ),
)


def _pool_shape() -> InfoMetricFamily:
    return InfoMetricFamily("sglang:cache_config", "Shape of the KV pool.", labels=LABELS)


class WorkerMetrics(Collector):
    """The metrics of one worker."""

    def __init__(
        self, model_name: str, counts: LoopCounts, clock: Callable[[], float] = time.monotonic, engine_type: str = "unified"
    ) -> None:
        """Starts without observations of requests.

        Args:
            model_name: served model name.
            counts: sums over the loop's turns.
            clock: time in seconds.
            engine_type: unified, prefill or decode.
        """
        self.counts = counts
        self.times = RequestTimes(clock)
        self._label_values = (model_name, engine_type, "0", "0")

    # Read by scrapes

    @classmethod
    def describe(cls) -> Iterator[Metric]:
        """Yields every metric without samples."""
        yield from (each.described(LABELS) for each in DISTRIBUTIONS)
        yield _pool_shape()
        yield from (row.described(LABELS) for row in ROWS)

    def collect(self) -> Iterator[Metric]:
        counts = self.counts
        yield from self.times.collect(LABELS, self._label_values)
        info = _pool_shape()
        info.add_metric(self._label_values, {"page_size": str(counts.page_size), "num_pages": str(counts.num_pages)})
        yield info
        if counts.stats is not None:
            for row in ROWS:
                yield from row.collect(counts, LABELS, self._label_values)
