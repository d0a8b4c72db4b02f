"""Progress reports of reading weights, and the times of a load's phases."""

from __future__ import annotations

from pathlib import Path

import pytest

from rootstock_llm.services.worker.exec.weights.load_progress import LoadMeter, LoadPhases
from tests.exec.host_executors import build_host_executor
from tests.exec.tiny_models import MODELS


def test_times_of_a_start_are_summed_by_load_phase() -> None:
    now = 100.0
    phases = LoadPhases(lambda: now)
    with phases.timed("kv_pool"):
        now += 1.0
    now += 10.0
    with pytest.raises(RuntimeError, match="no disk"), phases.timed("weights"):
        now += 2.0
        raise RuntimeError("no disk")
    with phases.timed("weights"):
        now += 3.0
    assert phases.seconds() == (("weights", 5.0), ("kv_pool", 1.0), ("total", 16.0))
    assert phases.describe() == "weights 5.0 s, kv_pool 1.0 s, total 16.0 s"
    phases.weight_bytes_read = 16_380_000_000
    assert phases.describe().startswith("weights 5.0 s (16.4 GB read), ")


def test_unknown_load_phase_is_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"unknown phase tokenizer of a start; the phases are config, "),
        LoadPhases().timed("tokenizer"),
    ):
        pass


def test_executor_reports_the_times_of_the_load_phases(tmp_path: Path) -> None:
    MODELS["qwen2"].build(tmp_path)
    lines: list[str] = []
    executor, info = build_host_executor(str(tmp_path), "auto", 4, 2, 8, 0.5, None, 1, lines.append)
    executor.close()
    seconds = dict(info.load_seconds)
    assert list(seconds) == ["config", "weights", "kv_pool", "profile", "graphs", "warm_up", "total"]
    assert min(seconds.values()) >= 0 and sum(seconds.values()) <= 2 * seconds["total"]
    assert lines[-1].startswith("loaded in: config ")
    assert any(line.startswith("weights: 100 %, 0.00 of 0.00 GB in ") for line in lines)


def test_load_meter_reports_every_few_seconds_and_at_the_end() -> None:
    now, lines = 10.0, list[str]()
    meter = LoadMeter(4_000_000_000, lambda: now, lines.append)
    meter.added(1_000_000_000)
    now = 12.0
    meter.added(1_000_000_000)
    assert lines == []
    now = 14.0
    meter.tick()
    meter.added(0)
    assert lines == ["weights: 50 %, 2.00 of 4.00 GB in 4.0 s, 0.50 GB/s, 4 s left"]
    meter.added(2_000_000_000)
    meter.end()
    assert lines[1:] == ["weights: 100 %, 4.00 of 4.00 GB in 4.0 s, 1.00 GB/s"]
