"""The worker's metrics under SGLang's names (DESIGN §6), computed from counts that the loop leaves behind.

Written on the loop's thread (`planned`, `turned`, `sent`), read by scrapes; what is written is replaced whole, never edited.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from services.worker.core.contracts.messages import FinishReason, StepOutput, StepStats
from services.worker.core.contracts.plan import BatchPlan
from services.worker.core.kv.cache_events import CacheEvents
from services.worker.metrics.histogram import BatchHistogram

LABELS = ("model_name", "engine_type", "tp_rank", "pp_rank")
TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
ITL_BUCKETS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 8)
E2E_BUCKETS = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200, 1800, 2400)
QUEUE_BUCKETS = (0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
RATE_WINDOW_S = 10.0  # over which throughput and hit rate are taken


class WorkerMetrics(Collector):
    """page_size in tokens. arrived() must be called for each submit, from any thread."""

    def __init__(
        self, model_name: str, page_size: int, num_pages: int, max_running: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._label_values = (model_name, "unified", "0", "0")
        self._page_size, self._num_pages, self._max_running = page_size, num_pages, max_running
        self._clock = clock
        self._stats: StepStats | None = None
        self._samples: deque[tuple[float, StepStats]] = deque()
        self._arrivals: dict[tuple[int, int], float] = {}
        self._last: dict[tuple[int, int], float] = {}
        self._steps = 0
        self._stored_blocks = self._removed_blocks = self._cleared = 0
        self._prefill_tokens = 0
        self._decode_tokens = 0
        self._ttft = BatchHistogram("sglang:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS)
        self._itl = BatchHistogram("sglang:inter_token_latency_seconds", "Time between a request's tokens.", ITL_BUCKETS)
        self._e2e = BatchHistogram("sglang:e2e_request_latency_seconds", "Arrival to end.", E2E_BUCKETS)
        self._queue = BatchHistogram("sglang:queue_time_seconds", "Arrival to first step.", QUEUE_BUCKETS)

    # Written by the loop

    def planned(self, plan: BatchPlan) -> None:
        self._steps += 1
        self._prefill_tokens += len(plan.input_ids)
        self._decode_tokens += plan.num_rows - plan.num_extend

    def turned(self, stats: StepStats, busy: bool) -> None:
        self._stats = stats
        now = self._clock()
        if not self._samples or now - self._samples[-1][0] >= 1.0:
            self._samples.append((now, stats))
            while now - self._samples[0][0] > RATE_WINDOW_S:
                self._samples.popleft()

    def cached(self, events: CacheEvents) -> None:
        self._stored_blocks += len(events.stored)
        self._removed_blocks += len(events.removed)
        self._cleared += events.cleared

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

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        for histogram in (self._ttft, self._itl, self._e2e, self._queue):
            yield histogram.collect(LABELS, self._label_values)
        info = InfoMetricFamily("sglang:cache_config", "Shape of the KV pool.", labels=LABELS)
        info.add_metric(self._label_values, {"page_size": str(self._page_size), "num_pages": str(self._num_pages)})
        yield info
        if stats is not None:
            yield from self._gauges(stats)
            yield from self._counters(stats)

    def _gauges(self, stats: StepStats) -> Iterator[Metric]:
        used = stats.pages_leased + stats.pages_cached - stats.pages_evictable
        throughput, hit_rate = self._rates(stats)
        for name, help_text, value in (
            ("sglang:num_running_reqs", "Requests that run.", stats.num_running),
            ("sglang:num_queue_reqs", "Requests that wait to run.", stats.num_waiting - stats.num_gated),
            ("sglang:num_retracted_reqs", "Requests that lost their memory and wait for it.", stats.num_retracted),
            ("sglang:num_grammar_queue_reqs", "Requests whose grammar is being compiled.", stats.num_gated),
            ("rootstock_worker_sessions", "Sessions that are open.", stats.num_sessions),
            ("rootstock_worker_session_tokens", "Tokens of context that sessions hold.", stats.session_tokens),
            ("sglang:num_used_tokens", "Tokens of KV that running requests use.", used * self._page_size),
            ("sglang:token_usage", "Share of the KV pool that running requests use.", used / self._num_pages),
            ("sglang:max_total_num_tokens", "Size of the KV pool in tokens.", self._num_pages * self._page_size),
            ("rootstock_worker_max_running_requests", "Requests that can run at once.", self._max_running),
            ("sglang:kv_used_tokens", "Tokens of KV that running requests use.", used * self._page_size),
            ("sglang:kv_available_tokens", "Tokens of KV that nothing holds.", stats.pages_free * self._page_size),
            ("sglang:kv_evictable_tokens", "Tokens of KV that are cached and unpinned.", stats.pages_evictable * self._page_size),
            ("sglang:gen_throughput", "Output tokens per second lately.", throughput),
            ("sglang:cache_hit_rate", "Share of admitted prompt tokens that were cached, lately.", hit_rate),
            ("sglang:new_token_ratio", "Share of remaining output that admission reserves.", stats.new_token_ratio),
        ):
            yield self._one(GaugeMetricFamily(name, help_text, labels=LABELS), value)

    def _counters(self, stats: StepStats) -> Iterator[Metric]:
        for name, help_text, value in (
            ("sglang:num_requests", "Requests that have come.", stats.requests_total),
            ("sglang:num_aborted_requests", "Requests that ended without a whole answer.", stats.aborts_total),
            ("sglang:prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens_total),
            ("sglang:generation_tokens", "Output tokens.", stats.generated_tokens_total),
            ("sglang:cached_tokens", "Prompt tokens that a prefix hit gave.", stats.cached_tokens_total),
            ("sglang:num_retracted_requests", "Retractions.", stats.retractions_total),
            ("rootstock_worker_resumed_requests", "Requests that came with output from elsewhere.", stats.resumed_total),
            ("rootstock_worker_preempted_requests", "Requests displaced by more urgent ones.", stats.preemptions_total),
            ("sglang:evicted_tokens", "Tokens of KV evicted from the radix tree.", stats.evicted_pages_total * self._page_size),
            ("rootstock_worker_cache_blocks_stored", "Blocks that became cached here, where events are on.", self._stored_blocks),
            ("rootstock_worker_cache_blocks_removed", "Blocks that were evicted, where events are on.", self._removed_blocks),
            ("rootstock_worker_cache_cleared", "Times that all blocks went at once, where events are on.", self._cleared),
            ("rootstock_worker_forward_steps", "Steps that were launched.", self._steps),
        ):
            yield self._one(CounterMetricFamily(name, help_text, labels=LABELS), value)
        tokens = CounterMetricFamily("sglang:realtime_tokens", "Tokens as they are computed.", labels=(*LABELS, "mode"))
        for mode, value in (
            ("prefill_compute", self._prefill_tokens),
            ("prefill_cache", stats.cached_tokens_total),
            ("decode", self._decode_tokens),
        ):
            tokens.add_metric((*self._label_values, mode), value)
        yield tokens

    def _one(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric(self._label_values, value)
        return family

    def _rates(self, stats: StepStats) -> tuple[float, float]:
        """Output tokens per second and hit rate since the oldest sample that is no older than the window."""
        now = self._clock()
        for at, then in list(self._samples):
            if now - at <= RATE_WINDOW_S and now > at:
                prompt = stats.prompt_tokens_total - then.prompt_tokens_total
                hits = (stats.cached_tokens_total - then.cached_tokens_total) / prompt if prompt else 0.0
                generated = stats.generated_tokens_total - then.generated_tokens_total
                return generated / (now - at), hits
        return 0.0, 0.0
