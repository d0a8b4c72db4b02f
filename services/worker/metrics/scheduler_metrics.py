"""The worker's metrics under SGLang's names (docs/reference/metrics.md): counts of the loop, and histograms of requests.

| kind | source |
| --- | --- |
| scheduler metrics | annotated fields of StepStats |
| loop metrics | fields of LoopCounts, with a row in ROWS |
| latencies and lengths of requests | histograms of RequestTimes |
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from rootstock_llm.services.shared.observe.histogram import Histogram
from rootstock_llm.services.shared.observe.readings import Reading, Value
from rootstock_llm.services.worker.core.contracts.counters import ExportedAs, StepStats, exported_fields
from rootstock_llm.services.worker.core.contracts.messages import Finish, FinishReason, PeerOutput
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, ForwardMode
from rootstock_llm.services.worker.core.kv.cache_events import CacheEvents

RATE_WINDOW_S = 10.0  # window in seconds of throughput, hit rate, acceptance and occupancy
SAMPLE_S = 1.0  # smallest time in seconds between two samples in the window

TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
ITL_BUCKETS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 8)
E2E_BUCKETS = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200, 1800, 2400)
QUEUE_BUCKETS = (0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
STAGE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
TOKENS_BUCKETS = (1, 10, 50, 100, 300, 500, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000, 256000, 512000, 1000000)
STAGES = ("prefill_waiting", "prefill_forward", "decode_forward")


@dataclass(frozen=True, slots=True)
class Distribution:
    """The name and the buckets of one histogram metric."""

    name: str
    text: str
    buckets: tuple[float, ...]
    stages: tuple[str, ...] = ()  # values of the label `stage`, one histogram per value; empty: one histogram without the label

    def described(self, labels: tuple[str, ...]) -> HistogramMetricFamily:
        """Returns the metric without samples."""
        return HistogramMetricFamily(self.name, self.text, labels=(*labels, *(("stage",) if self.stages else ())))


TTFT = Distribution(
    "sglang:time_to_first_token_seconds", "Seconds from the arrival of a request to its first token.", TTFT_BUCKETS
)
ITL = Distribution("sglang:inter_token_latency_seconds", "Seconds between two output tokens of a request.", ITL_BUCKETS)
E2E = Distribution("sglang:e2e_request_latency_seconds", "Seconds from the arrival of a request to its end.", E2E_BUCKETS)
QUEUE = Distribution("sglang:queue_time_seconds", "Seconds from the arrival of a request to its first admission.", QUEUE_BUCKETS)
STAGE = Distribution(
    "sglang:per_stage_req_latency_seconds",
    "Seconds of each stage of a completed request: until its admission, then until its first token, then until its end.",
    STAGE_BUCKETS,
    STAGES,
)
PROMPT = Distribution("sglang:prompt_tokens_histogram", "Prompt tokens of each completed request.", TOKENS_BUCKETS)
UNCACHED = Distribution(
    "sglang:uncached_prompt_tokens_histogram",
    "Prompt tokens that no prefix hit covered, of each completed request.",
    TOKENS_BUCKETS,
)
OUTPUT = Distribution("sglang:generation_tokens_histogram", "Output tokens of each completed request.", TOKENS_BUCKETS)
DISTRIBUTIONS = (TTFT, ITL, E2E, QUEUE, STAGE, PROMPT, UNCACHED, OUTPUT)


class RequestTimes:
    """The histograms of one worker, and the times of open requests.

    The gRPC server calls arrived(), the scheduler loop's thread calls sent(), and scrapes call collect().
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Times of open requests by (gateway stream, handle): arrival, first token, last token.
        self._arrivals: dict[tuple[int, int], float] = {}
        self._first: dict[tuple[int, int], float] = {}
        self._last: dict[tuple[int, int], float] = {}
        self._histograms = {each: [Histogram(each.buckets) for _ in each.stages or ("",)] for each in DISTRIBUTIONS}

    def arrived(self, peer: int, handle: int) -> None:
        """Records the arrival of a request. Called once per submit, on any thread."""
        self._arrivals[peer, handle] = self._clock()

    def sent(self, outputs: tuple[PeerOutput, ...]) -> None:
        """Records the tokens and finishes of one step's outputs in the histograms."""
        now = self._clock()
        first: list[float] = []
        gaps: list[float] = []
        for peer in outputs:
            for handle, count in zip(peer.handles, peer.counts, strict=True):
                key = (peer.peer, handle)
                before = self._last.get(key)
                if before is None:
                    first.append(now - self._arrivals.get(key, now))
                    self._first[key] = now
                else:
                    gaps += [(now - before) / count] * count
                self._last[key] = now
            if peer.finishes:
                self._ended(peer, now)
        self._observe(TTFT, first)
        self._observe(ITL, gaps)

    def _ended(self, peer: PeerOutput, now: float) -> None:
        stages: tuple[list[float], ...] = tuple([] for _ in STAGES)
        completed = [finish for finish in peer.finishes if finish.reason is not FinishReason.ABORT]
        for finish in completed:
            for all_seconds, seconds in zip(stages, self._stages(peer.peer, finish, now), strict=True):
                all_seconds += seconds
        self._observe(STAGE, *stages)
        self._observe(E2E, [now - self._arrivals.get((peer.peer, finish.handle), now) for finish in completed])
        self._observe(PROMPT, [finish.prompt_tokens for finish in completed])
        self._observe(UNCACHED, [finish.prompt_tokens - finish.cached_tokens for finish in completed])
        self._observe(OUTPUT, [finish.completion_tokens for finish in completed])
        ran = [finish for finish in peer.finishes if finish.reason is not FinishReason.ABORT or finish.completion_tokens]
        self._observe(QUEUE, [finish.queue_s for finish in ran])
        for finish in peer.finishes:
            for open_times in (self._arrivals, self._first, self._last):
                open_times.pop((peer.peer, finish.handle), None)

    def _stages(self, peer: int, finish: Finish, now: float) -> tuple[list[float], ...]:
        """Returns a list per stage of STAGES: the request's seconds in the stage, or no element if it did not reach the stage."""
        key = (peer, finish.handle)
        arrived, first = self._arrivals.get(key, now), self._first.get(key)
        prefilled = max((now if first is None else first) - arrived - finish.queue_s, 0.0)
        return [finish.queue_s], [prefilled], [] if first is None else [now - first]

    def _observe(self, distribution: Distribution, *values: Sequence[float]) -> None:
        """Adds values to the histograms of a distribution: one list per stage, or one list if the distribution has no stages."""
        for histogram, each in zip(self._histograms[distribution], values, strict=True):
            histogram.observe_all(each)

    def collect(self, labels: tuple[str, ...], label_values: tuple[str, ...]) -> Iterator[HistogramMetricFamily]:
        for distribution, histograms in self._histograms.items():
            family = distribution.described(labels)
            for stage, histogram in zip(distribution.stages or (None,), histograms, strict=True):
                histogram.add_to(family, label_values if stage is None else (*label_values, stage))
            yield family


class LoopCounts:
    """Counts over the iterations of one loop. The loop's thread writes them without a lock; each write replaces a whole value."""

    def __init__(self, page_size: int, num_pages: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.page_size, self.num_pages = page_size, num_pages
        self.stats: StepStats | None = None  # stats of the last iteration; None before the first iteration
        self.steps = 0
        self.prefill_tokens = self.decode_tokens = 0
        self.stored_blocks = self.removed_blocks = self.cleared = 0
        # Seconds of steps by mode.
        self.forward_s: dict[ForwardMode, float] = {mode: 0.0 for mode in ForwardMode if mode is not ForwardMode.IDLE}
        # Seconds in which no step was in flight although requests ran. The device's idle time between overlapped steps does not
        # count, because the host cannot measure it.
        self.bubble_s = 0.0
        self.idle_s = 0.0  # seconds in which the loop waited for messages
        self._clock = clock
        self._plan: BatchPlan | None = None  # plan of the last launched step
        self._ended_step, self._ended_at = -1, 0.0  # step id and time of the last result
        self._waiting_since = 0.0
        self._samples: deque[tuple[float, StepStats, float]] = deque()  # (time, stats, sum of forward_s over all modes)

    def rests(self) -> None:
        self._waiting_since = self._clock()

    def wakes(self) -> None:
        self.idle_s += self._clock() - self._waiting_since

    def planned(self, plan: BatchPlan) -> None:
        """Counts a step. Called before its launch."""
        if self._plan is not None and self._plan.step_id == self._ended_step and self._had_work:
            self.bubble_s += self._clock() - self._ended_at
        self._plan = plan
        self.steps += 1
        self.prefill_tokens += len(plan.input_ids)
        self.decode_tokens += plan.num_rows - plan.num_extend

    def ended(self, plan: BatchPlan, seconds: float) -> None:
        """Adds the time of a step."""
        self.forward_s[plan.mode] += seconds
        self._ended_step, self._ended_at = plan.step_id, self._clock()

    @property
    def _had_work(self) -> bool:
        """Whether requests were running and the scheduler was not paused after the last iteration."""
        return self.stats is not None and self.stats.num_running > 0 and not self.stats.paused

    def iteration_ended(self, stats: StepStats) -> None:
        self.stats = stats
        now = self._clock()
        if not self._samples or now - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((now, stats, sum(self.forward_s.values())))
            while now - self._samples[0][0] > RATE_WINDOW_S:
                self._samples.popleft()

    def cached(self, events: CacheEvents) -> None:
        self.stored_blocks += len(events.stored)
        self.removed_blocks += len(events.removed)
        self.cleared += events.cleared

    # Read by scrapes

    @property
    def used_tokens(self) -> int:
        """Tokens of KV that running requests use."""
        return self.stats.pages_used * self.page_size if self.stats is not None else 0

    @property
    def full_usage(self) -> float:
        """Share of the pages that running requests use."""
        return self.used_tokens / (self.num_pages * self.page_size)

    @property
    def used_windows(self) -> int:
        """Number of window units that running requests use."""
        return 0 if self.stats is None else self.stats.window_units_used

    @property
    def used_states(self) -> int:
        """Number of states of recurrent layers that running requests use."""
        return 0 if self.stats is None else self.stats.states_used

    def share(self, used: int, field: str) -> float:
        """Returns `used` divided by the number of units in the field `field` of the stats; 0 if there are no such units."""
        total = getattr(self.stats, field) if self.stats is not None else 0
        return used / total if total else 0.0

    @property
    def decode_context_tokens(self) -> int:
        """Context tokens of the decode rows in the last launched step, plus one token per row for the step itself."""
        plan = self._plan
        if plan is None or self.stats is None or not self.stats.num_running:
            return 0
        return int(plan.starts[plan.num_extend :].sum()) + plan.num_rows - plan.num_extend

    @property
    def throughput(self) -> float:
        """Output tokens per second in the last RATE_WINDOW_S seconds."""
        seconds, then, now, _ = self._window()
        return (now.generated_tokens_total - then.generated_tokens_total) / seconds if then and now else 0.0

    @property
    def hit_rate(self) -> float:
        """Cached share of the prompt tokens that were admitted in the last RATE_WINDOW_S seconds."""
        _, then, now, _ = self._window()
        prompt = now.prompt_tokens_total - then.prompt_tokens_total if then and now else 0
        return (now.cached_tokens_total - then.cached_tokens_total) / prompt if then and now and prompt else 0.0

    @property
    def accept_length(self) -> float:
        """Mean output tokens of a decode row with draft tokens in the last RATE_WINDOW_S seconds; 0 if there was no such row."""
        _, then, now, _ = self._window()
        rows = now.verified_rows_total - then.verified_rows_total if then and now else 0
        return 1 + (now.accepted_tokens_total - then.accepted_tokens_total) / rows if then and now and rows else 0.0

    @property
    def accept_rate(self) -> float:
        """Accepted share of the draft tokens in the last RATE_WINDOW_S seconds."""
        _, then, now, _ = self._window()
        drafted = now.drafted_tokens_total - then.drafted_tokens_total if then and now else 0
        return (now.accepted_tokens_total - then.accepted_tokens_total) / drafted if then and now and drafted else 0.0

    @property
    def occupancy(self) -> float:
        """Percentage of the last RATE_WINDOW_S seconds in which a step was computed."""
        seconds, _, _, forward_s = self._window()
        return min(100.0 * forward_s / seconds, 100.0) if seconds else 0.0

    def _window(self) -> tuple[float, StepStats | None, StepStats | None, float]:
        """Returns (length of the window in seconds, stats at its start, present stats, seconds of steps in the window)."""
        now = self._clock()
        for at, then, forward_s in list(self._samples):
            if now - at <= RATE_WINDOW_S and now > at:
                return now - at, then, self.stats, sum(self.forward_s.values()) - forward_s
        return 0.0, None, None, 0.0


LABELS = ("model_name", "engine_type", "tp_rank", "pp_rank")


def _figure(field: str, mark: ExportedAs, counts: LoopCounts) -> float:
    value = float(getattr(counts.stats, field))
    return value * counts.page_size if mark.in_pages else value


def _of_stats(field: str, mark: ExportedAs) -> Reading[LoopCounts]:
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
    """Returns the number of routing keys per bucket (gt, le): keys with more than `gt` and at most `le` requests."""
    edges = [*map(str, KEY_BOUNDS), "+Inf"]
    keys = Tally(bisect_left(KEY_BOUNDS, each) for each in requests)
    return {(lower, upper): keys[at] for at, (lower, upper) in enumerate(pairwise(["0", *edges]))}


BLOCKS = "rootstock_worker_cache_blocks_"
ROWS: tuple[Reading[LoopCounts], ...] = (
    *(_of_stats(field, mark) for field, mark in exported_fields().items()),
    Reading(
        Gauge,
        "sglang:num_queue_reqs",
        "Requests that wait for admission, without requests that wait for their grammar.",
        _waiting,
    ),
    Reading(Gauge, "sglang:num_paused_reqs", "Running requests while the scheduler is paused, otherwise 0.", _paused),
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
        "Context tokens of all decode rows in the last step.",
        lambda c: c.decode_context_tokens,
    ),
    Reading(Gauge, "sglang:num_used_tokens", "Tokens of KV that running requests use.", lambda c: c.used_tokens),
    Reading(Gauge, "sglang:kv_used_tokens", "Tokens of KV that running requests use.", lambda c: c.used_tokens),
    Reading(
        Gauge,
        "sglang:token_usage",
        "Largest of three shares: of the pages, of the windows and of the states that running requests use.",
        lambda c: max(c.full_usage, c.share(c.used_windows, "window_units"), c.share(c.used_states, "states")),
    ),
    Reading(Gauge, "sglang:full_token_usage", "Share of the pages that running requests use.", lambda c: c.full_usage),
    Reading(
        Gauge,
        "sglang:swa_used_tokens",
        "Tokens of KV of windowed layers that running requests use.",
        lambda c: c.used_windows * c.page_size,
    ),
    Reading(
        Gauge,
        "sglang:swa_token_usage",
        "Share of the caches of windowed layers that running requests use.",
        lambda c: c.share(c.used_windows, "window_units"),
    ),
    Reading(Gauge, "sglang:mamba_used_tokens", "States of recurrent layers that running requests use.", lambda c: c.used_states),
    Reading(
        Gauge,
        "sglang:mamba_usage",
        "Share of the states of recurrent layers that running requests use.",
        lambda c: c.share(c.used_states, "states"),
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
        "Mean output tokens of a decode row with draft tokens, over the last 10 s: its accepted draft tokens plus one.",
        lambda c: c.accept_length,
    ),
    Reading(
        Gauge, "sglang:spec_accept_rate", "Share of draft tokens that were accepted, over the last 10 s.", lambda c: c.accept_rate
    ),
    Reading(
        Counter,
        BLOCKS + "stored",
        "Blocks that were added to the device's cache. 0 if the prefix index is disabled.",
        lambda c: c.stored_blocks,
    ),
    Reading(
        Counter, BLOCKS + "removed", "Blocks that left every tier. 0 if the prefix index is disabled.", lambda c: c.removed_blocks
    ),
    Reading(
        Counter,
        "rootstock_worker_cache_cleared",
        "Resets of the list of cached blocks, after all or most blocks were dropped. 0 if the prefix index is disabled.",
        lambda c: c.cleared,
    ),
    Reading(Counter, "rootstock_worker_forward_steps", "Steps that were launched.", lambda c: c.steps),
    Reading(
        Counter,
        "sglang:forward_execution_seconds",
        "Seconds of steps, measured on the host from the launch, or from the end of the previous step if later, to the result.",
        _seconds_by_mode,
        ("category",),
    ),
    Reading(
        Counter,
        "rootstock_worker_bubble_seconds",
        "Seconds in which no step was in flight although requests ran, measured on the host.",
        lambda c: c.bubble_s,
    ),
    Reading(
        Counter, "sglang:scheduler_idle_seconds", "Seconds in which the scheduler loop waited for messages.", lambda c: c.idle_s
    ),
    Reading(Gauge, "sglang:fwd_occupancy", "Percentage of the last 10 s in which a step was computed.", lambda c: c.occupancy),
    Reading(
        Counter,
        "sglang:realtime_tokens",
        "Tokens by mode: tokens computed by prefills, cached prompt tokens, and one token per decode row.",
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
        """Creates the metrics with empty histograms.

        Args:
            model_name: served model name.
            counts: counts of the loop.
            clock: returns the time in seconds.
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
