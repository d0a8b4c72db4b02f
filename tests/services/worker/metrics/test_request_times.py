"""Tests of the times and lengths of requests by stage."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.worker.core.contracts.messages import Finish, FinishReason, PeerOutput, StepOutput
from services.worker.metrics.loop_counts import LoopCounts
from services.worker.metrics.scheduler_metrics import WorkerMetrics

LABELS = {"model_name": "m", "engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
STAGE = "sglang:per_stage_req_latency_seconds"


def test_stages_and_lengths_of_requests_are_counted() -> None:
    now = 50.0
    metrics, registry = WorkerMetrics("m", LoopCounts(16, 10), lambda: now), CollectorRegistry()
    registry.register(metrics)

    def figure(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, LABELS | labels)

    def send(*finishes: Finish, tokens: int = 0) -> None:
        metrics.times.sent(StepOutput((PeerOutput(1, [7], [tokens], [0] * tokens, list(finishes)),) if tokens else
                                      (PeerOutput(1, finishes=list(finishes)),)))  # fmt: skip

    for handle in (7, 8, 9):
        metrics.times.arrived(1, handle)
    now = 54.0
    send(tokens=1)
    now = 60.0
    lengths = {"prompt_tokens": 120, "cached_tokens": 80, "completion_tokens": 3}
    send(Finish(7, "a", FinishReason.LENGTH, queue_s=1.0, **lengths), tokens=2)
    send(Finish(8, "b", FinishReason.EMBEDDED, queue_s=2.0, prompt_tokens=5), Finish(9, "c", FinishReason.ABORT, prompt_tokens=9))
    for stage, count, seconds in (
        ("prefill_waiting", 2, 1.0 + 2.0),
        ("prefill_forward", 2, 3.0 + 8.0),
        ("decode_forward", 1, 6.0),
    ):
        assert (figure(f"{STAGE}_count", stage=stage), figure(f"{STAGE}_sum", stage=stage)) == (count, seconds)
    for name, tokens in (("prompt", 125), ("uncached_prompt", 45), ("generation", 3)):
        name = f"sglang:{name}_tokens_histogram"
        assert (figure(f"{name}_count"), figure(f"{name}_sum")) == (2, tokens), "of what was answered"
    assert figure("sglang:e2e_request_latency_seconds_sum") == 20.0 and figure("sglang:time_to_first_token_seconds_sum") == 4.0
    assert figure("sglang:inter_token_latency_seconds_count") == 2 and figure("sglang:queue_time_seconds_count") == 2
