"""Latencies and lengths of requests as histograms, under SGLang's names.

The server's threads call arrived(), the loop's thread calls sent(), and scrapes call collect().
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import HistogramMetricFamily

from services.shared.observe.histogram import Histogram
from services.worker.core.contracts.messages import Finish, FinishReason, PeerOutput, StepOutput

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
    stages: tuple[str, ...] = ()  # values of the label `stage`, with one histogram each; empty for a single histogram

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
    "Prompt tokens of each completed request that no prefix hit covered.",
    TOKENS_BUCKETS,
)
OUTPUT = Distribution("sglang:generation_tokens_histogram", "Output tokens of each completed request.", TOKENS_BUCKETS)
DISTRIBUTIONS = (TTFT, ITL, E2E, QUEUE, STAGE, PROMPT, UNCACHED, OUTPUT)


class RequestTimes:
    """The histograms of one worker, and the times of open requests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._arrivals: dict[tuple[int, int], float] = {}
        self._first: dict[tuple[int, int], float] = {}
        self._last: dict[tuple[int, int], float] = {}
        self._of = {each: [Histogram(each.buckets) for _ in each.stages or ("",)] for each in DISTRIBUTIONS}

    def arrived(self, peer: int, handle: int) -> None:
        """Records the arrival of a request. Called once per submit, from any thread."""
        self._arrivals[peer, handle] = self._clock()

    def sent(self, output: StepOutput) -> None:
        """Observes the tokens and finishes of one step's output."""
        now = self._clock()
        first: list[float] = []
        gaps: list[float] = []
        for peer in output.peers:
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
        answered = [finish for finish in peer.finishes if finish.reason is not FinishReason.ABORT]
        for finish in answered:
            for times, seconds in zip(stages, self._stages(peer.peer, finish, now), strict=True):
                times += seconds
        self._observe(STAGE, *stages)
        self._observe(E2E, [now - self._arrivals.get((peer.peer, finish.handle), now) for finish in answered])
        self._observe(PROMPT, [finish.prompt_tokens for finish in answered])
        self._observe(UNCACHED, [finish.prompt_tokens - finish.cached_tokens for finish in answered])
        self._observe(OUTPUT, [finish.completion_tokens for finish in answered])
        ran = [finish for finish in peer.finishes if finish.reason is not FinishReason.ABORT or finish.completion_tokens]
        self._observe(QUEUE, [finish.queue_s for finish in ran])
        for finish in peer.finishes:
            for kept in (self._arrivals, self._first, self._last):
                kept.pop((peer.peer, finish.handle), None)

    def _stages(self, peer: int, finish: Finish, now: float) -> tuple[list[float], ...]:
        """Returns the seconds of each stage, in the order of STAGES. A list is empty if the request did not reach the stage."""
        key = (peer, finish.handle)
        arrived, first = self._arrivals.get(key, now), self._first.get(key)
        prefilled = max((now if first is None else first) - arrived - finish.queue_s, 0.0)
        return [finish.queue_s], [prefilled], [] if first is None else [now - first]

    def _observe(self, distribution: Distribution, *values: Sequence[float]) -> None:
        """Adds values to the histograms of a distribution: one list for each stage, or a single list."""
        for histogram, each in zip(self._of[distribution], values, strict=True):
            histogram.observe_all(each)

    def collect(self, labels: tuple[str, ...], label_values: tuple[str, ...]) -> Iterator[HistogramMetricFamily]:
        for distribution, histograms in self._of.items():
            family = distribution.described(labels)
            for stage, histogram in zip(distribution.stages or (None,), histograms, strict=True):
                histogram.add_to(family, label_values if stage is None else (*label_values, stage))
            yield family
