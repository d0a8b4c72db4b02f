from __future__ import annotations

from prometheus_client import CollectorRegistry

from rootstock_llm.services.worker.exec.contracts.model_info import LoadedInfo
from rootstock_llm.services.worker.exec.contracts.protocol import ExecutorStats
from rootstock_llm.services.worker.metrics.executor_metrics import ExecutorMetrics
from rootstock_llm.services.worker.metrics.loading_metrics import LoadMetrics


def info(**values: object) -> LoadedInfo:
    return LoadedInfo("LlamaForCausalLM", 512, 257, (5,), 10, 16, "bfloat16", 1234, 96, **values)  # type: ignore[arg-type]


def figures(model: LoadedInfo) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(LoadMetrics(model, "m"))
    return registry


def test_model_loading_metrics_have_the_seconds_of_each_phase_and_the_memory() -> None:
    registry = figures(info(load_seconds=(("weights", 3.5), ("total", 9.0)), pool_bytes=15_360))
    for phase, seconds in (("weights", 3.5), ("total", 9.0), ("graphs", None)):
        labels = {"model_name": "m", "phase": phase}
        assert registry.get_sample_value("rootstock_worker_load_seconds", labels) == seconds
    assert registry.get_sample_value("rootstock_worker_weight_bytes", {"model_name": "m"}) == 1234
    assert registry.get_sample_value("rootstock_worker_kv_pool_bytes", {"model_name": "m"}) == 15_360


def test_model_loading_metrics_have_no_phases_when_the_model_reports_none() -> None:
    family = next(each for each in figures(info()).collect() if each.name == "rootstock_worker_load_seconds")
    assert family.samples == []


def test_executor_metrics_count_steps_by_mode() -> None:
    registry, stats = CollectorRegistry(), ExecutorStats()
    registry.register(ExecutorMetrics(stats, "m"))
    stats.graph_steps, stats.eager_steps, stats.pieces, stats.given_up = 7, 3, 2, 1
    for name, labels, value in (
        ("rootstock_worker_steps_total", {"mode": "graph"}, 7),
        ("rootstock_worker_steps_total", {"mode": "eager"}, 3),
        ("rootstock_worker_step_pieces_total", {}, 2),
        ("rootstock_worker_out_of_memory_total", {}, 1),
    ):
        assert registry.get_sample_value(name, {"model_name": "m", **labels}) == value
