from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.worker.exec.model_info import ModelInfo
from services.worker.load_metrics import LoadMetrics


def info(**values: object) -> ModelInfo:
    return ModelInfo("LlamaForCausalLM", 512, 257, (5,), 10, 16, "bfloat16", 1234, 96, **values)  # type: ignore[arg-type]


def figures(model: ModelInfo) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(LoadMetrics("m", model))
    return registry


def test_what_loading_took_and_what_is_held() -> None:
    registry = figures(info(load_seconds=(("weights", 3.5), ("total", 9.0))))
    for phase, seconds in (("weights", 3.5), ("total", 9.0), ("graphs", None)):
        labels = {"model_name": "m", "phase": phase}
        assert registry.get_sample_value("rootstock_worker_load_seconds", labels) == seconds
    assert registry.get_sample_value("rootstock_worker_weight_bytes", {"model_name": "m"}) == 1234
    assert registry.get_sample_value("rootstock_worker_kv_pool_bytes", {"model_name": "m"}) == 10 * 16 * 96


def test_a_model_that_tells_no_phases() -> None:
    family = next(each for each in figures(info()).collect() if each.name == "rootstock_worker_load_seconds")
    assert family.samples == []
