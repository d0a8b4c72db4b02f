"""Tests of LoopCounts (seconds of steps and of bubbles) and RequestTimes (lengths of requests, and times by stage)."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from rootstock_llm.services.worker.core.contracts.counters import StepStats
from rootstock_llm.services.worker.core.contracts.messages import Finish, FinishReason, PeerOutput
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, ForwardMode
from rootstock_llm.services.worker.metrics.scheduler_metrics import LoopCounts, WorkerMetrics

LABELS = {"model_name": "m", "engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
NONE = np.zeros(0, dtype=np.int32)
STAGE = "sglang:per_stage_req_latency_seconds"


def plan_of(step: int, mode: ForwardMode, starts: tuple[int, ...] = (), num_extend: int = 0) -> BatchPlan:
    columns = dict.fromkeys(BatchPlan.__dataclass_fields__, NONE) | {"slots": np.arange(len(starts))}
    fields = {"step_id": step, "mode": mode, "num_extend": num_extend, "starts": np.array(starts), "admitted": ()}
    return BatchPlan(**columns | fields)  # type: ignore[arg-type]


class SteppedWorker:
    """Metrics of a worker whose steps and iterations the test makes."""

    def __init__(self) -> None:
        self.now = 100.0
        self.counts = LoopCounts(16, 10, lambda: self.now)
        self._registry = CollectorRegistry()
        self._registry.register(WorkerMetrics("m", self.counts))

    def end_iteration(self, running: int, paused: bool = False) -> None:
        figures = dict.fromkeys(StepStats.__dataclass_fields__, 0) | {"num_running": running, "paused": paused}
        figures |= {"running_by_key": (), "requests_by_key": ()}
        self.counts.iteration_ended(StepStats(**figures))  # type: ignore[arg-type]

    def step(self, plan: BatchPlan, seconds: float) -> None:
        """Plans, launches and completes a step without overlap."""
        self.counts.planned(plan)
        self.now += seconds
        self.counts.ended(plan, seconds)

    def value(self, name: str, **labels: str) -> float:
        found = self._registry.get_sample_value(name, LABELS | labels)
        assert found is not None
        return found


def test_seconds_of_steps_and_bubbles_are_counted() -> None:
    at = SteppedWorker()
    at.step(plan_of(1, ForwardMode.EXTEND), 2.0)
    at.end_iteration(running=1)
    at.now += 0.5
    at.step(plan_of(2, ForwardMode.DECODE), 1.0)
    assert at.value("sglang:forward_execution_seconds_total", category="extend") == 2.0
    assert at.value("sglang:forward_execution_seconds_total", category="decode") == 1.0
    assert at.value("rootstock_worker_bubble_seconds_total") == 0.5
    at.now += 0.5
    assert at.value("sglang:fwd_occupancy") == pytest.approx(100 * 1.0 / 2.0), "1 of 2 seconds since the last iteration"


def test_overlap_and_idle_time_and_pauses_and_failed_steps_do_not_count_as_bubbles() -> None:
    at = SteppedWorker()
    first, second = plan_of(1, ForwardMode.DECODE), plan_of(2, ForwardMode.DECODE)
    at.end_iteration(running=1)
    at.counts.planned(first)
    at.counts.planned(second)  # launched before the first has ended
    at.now += 1.0
    at.counts.ended(first, 1.0)
    at.counts.ended(second, 0.0)
    at.end_iteration(running=0)
    at.counts.rests()
    at.now += 60.0
    at.counts.wakes()
    assert at.value("sglang:scheduler_idle_seconds_total") == 60.0
    at.step(plan_of(3, ForwardMode.EXTEND), 1.0)
    at.end_iteration(running=1, paused=True)
    assert at.value("sglang:num_paused_reqs") == 1
    at.now += 60.0
    at.counts.planned(plan_of(4, ForwardMode.DECODE))  # this step fails
    at.end_iteration(running=1)
    at.now += 60.0
    at.step(plan_of(6, ForwardMode.DECODE), 1.0)
    assert at.value("rootstock_worker_bubble_seconds_total") == 0.0


def test_context_tokens_of_decode_rows_are_counted() -> None:
    at = SteppedWorker()
    at.step(plan_of(1, ForwardMode.MIXED, (0, 30, 9), num_extend=1), 1.0)
    at.end_iteration(running=3)
    assert at.value("sglang:decode_sum_seq_lens") == 30 + 9 + 2
    at.end_iteration(running=0)
    assert at.value("sglang:decode_sum_seq_lens") == 0


def test_times_by_stage_and_lengths_of_requests_are_recorded() -> None:
    now = 50.0
    metrics, registry = WorkerMetrics("m", LoopCounts(16, 10), lambda: now), CollectorRegistry()
    registry.register(metrics)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, LABELS | labels)

    def send(*finishes: Finish, tokens: int = 0) -> None:
        rows = ([7], [tokens], [0] * tokens) if tokens else ()
        metrics.times.sent((PeerOutput(1, *rows, finishes=list(finishes)),))

    for handle in (7, 8, 9):
        metrics.times.arrived(1, handle)
    now = 54.0
    send(tokens=1)
    now = 60.0
    lengths = {"prompt_tokens": 120, "cached_tokens": 80, "completion_tokens": 3}
    send(Finish(FinishReason.LENGTH, 7, "a", queue_s=1.0, **lengths), tokens=2)
    send(Finish(FinishReason.EMBEDDED, 8, "b", queue_s=2.0, prompt_tokens=5), Finish(FinishReason.ABORT, 9, "c", prompt_tokens=9))
    for stage, count, seconds in (
        ("prefill_waiting", 2, 1.0 + 2.0),
        ("prefill_forward", 2, 3.0 + 8.0),
        ("decode_forward", 1, 6.0),
    ):
        assert (value(f"{STAGE}_count", stage=stage), value(f"{STAGE}_sum", stage=stage)) == (count, seconds)
    for name, tokens in (("prompt", 125), ("uncached_prompt", 45), ("generation", 3)):
        name = f"sglang:{name}_tokens_histogram"
        assert (value(f"{name}_count"), value(f"{name}_sum")) == (2, tokens), "only completed requests count"
    assert value("sglang:e2e_request_latency_seconds_sum") == 20.0 and value("sglang:time_to_first_token_seconds_sum") == 4.0
    assert value("sglang:inter_token_latency_seconds_count") == 2 and value("sglang:queue_time_seconds_count") == 2
