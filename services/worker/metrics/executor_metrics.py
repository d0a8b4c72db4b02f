"""How the steps run on a device: replayed from graphs, launched kernel by kernel, or in pieces for want of memory."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from services.worker.exec.contracts.executor_stats import ExecutorStats


class ExecutorMetrics(Collector):
    """model: the name that clients use."""

    def __init__(self, model: str, stats: ExecutorStats) -> None:
        self._model, self._stats = model, stats

    def collect(self) -> Iterator[Metric]:
        steps = CounterMetricFamily("rootstock_worker_steps", "Steps by how they were run.", labels=("model_name", "mode"))
        steps.add_metric((self._model, "graph"), self._stats.graph_steps)
        steps.add_metric((self._model, "eager"), self._stats.eager_steps)
        yield steps
        for name, text, value in (
            ("rootstock_worker_step_pieces", "Passes of steps that were cut in pieces for want of memory.", self._stats.pieces),
            ("rootstock_worker_out_of_memory", "Requests that ended because the device had no room.", self._stats.given_up),
        ):
            family = CounterMetricFamily(name, text, labels=("model_name",))
            family.add_metric((self._model,), value)
            yield family
