"""What the scheduler is told of the executor that was built."""

from __future__ import annotations

from dataclasses import replace

from services.worker.core.contracts.graph_limits import GraphLimits
from services.worker.device_limits import resolved
from services.worker.engine import _scheduler_config
from services.worker.exec.contracts.model_info import ModelInfo
from services.worker.settings import WorkerSettings

SETTINGS = resolved(WorkerSettings(), None)
INFO = ModelInfo("fake", 4096, 1000, (2,), num_pages=64, page_size=16, dtype="none", weight_bytes=0, kv_bytes_per_token=0)


def test_graphs_of_an_executor_bound_what_known_tokens_join() -> None:
    with_graphs = replace(INFO, graph_rows=(1, 8, 128), graph_rereads=700, eager_step_cost=0.04)
    assert _scheduler_config(SETTINGS, with_graphs).graphs == GraphLimits(128, 700, 0.04)
    assert _scheduler_config(SETTINGS, INFO).graphs == GraphLimits()
