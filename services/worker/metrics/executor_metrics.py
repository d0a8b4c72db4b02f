"""Metrics of the executor's steps: how they were launched, and how often they were cut into pieces or ran out of memory."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily as Counter

from rootstock_llm.services.shared.observe.readings import Reading, Readings
from rootstock_llm.services.worker.exec.contracts.protocol import ExecutorStats


def _steps(stats: ExecutorStats) -> dict[tuple[str, ...], float]:
    return {("graph",): stats.graph_steps, ("eager",): stats.eager_steps}


class ExecutorMetrics(Readings[ExecutorStats]):
    """Metrics of one executor. The label is the served model name."""

    labels = ("model_name",)
    rows = (
        Reading(
            Counter,
            "rootstock_worker_steps",
            "Steps by execution mode: replayed from a graph, or launched kernel by kernel (eager).",
            _steps,
            ("mode",),
        ),
        Reading(
            Counter,
            "rootstock_worker_step_pieces",
            "Forward passes of steps that were cut into pieces, because they exceeded the reserved memory or memory ran out.",
            lambda stats: stats.pieces,
        ),
        Reading(
            Counter,
            "rootstock_worker_out_of_memory",
            "Requests that ended because the device ran out of memory.",
            lambda stats: stats.given_up,
        ),
    )
