from __future__ import annotations

from prometheus_client import CollectorRegistry

from rootstock_llm.services.worker.metrics.phase import LifeMetrics, WorkerLife


def test_worker_metrics_have_the_phase_and_the_cold_start_and_hangs() -> None:
    now = 100.0
    life = WorkerLife(lambda: now)
    registry = CollectorRegistry()
    registry.register(LifeMetrics(life, "m"))

    def figure(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "m", **labels})

    def phase() -> list[str]:
        return [each for each in ("loading", "ready", "draining") if figure("rootstock_worker_phase", phase=each)]

    assert phase() == ["loading"]
    assert figure("rootstock_worker_cold_start_seconds") is None
    now = 142.0
    life.ready()
    assert (phase(), figure("rootstock_worker_cold_start_seconds")) == (["ready"], 42.0)
    assert (figure("rootstock_worker_hung"), figure("rootstock_worker_hangs_total")) == (0.0, 0.0)
    life.hung()
    assert (figure("rootstock_worker_hung"), figure("rootstock_worker_hangs_total")) == (1.0, 1.0)
    life.recovered()
    assert (figure("rootstock_worker_hung"), figure("rootstock_worker_hangs_total")) == (0.0, 1.0)
    life.draining()
    assert phase() == ["draining"]


def test_worker_stays_hung_when_a_step_ends_after_the_loss_of_the_device() -> None:
    life = WorkerLife()
    life.hung()
    life.lost_device()
    life.recovered()
    assert life.is_hung
    assert life.hangs == 2
