"""Which device's settings an executor heeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.shared.settings import of_values
from services.worker.engine import build_engine
from services.worker.loop.inbox import Inbox
from services.worker.settings import WorkerSettings

DEMO = Path(__file__).resolve().parents[3] / "models/demo"


@pytest.mark.parametrize("attention", ["flashinfer", "triton", "torch"])
def test_what_is_set_for_a_gpu_stops_no_cpu(attention: str, caplog: pytest.LogCaptureFixture) -> None:
    values = {"model": str(DEMO), "executor": "cpu", "attention_backend": attention, "max_total_tokens": 4096, "num_threads": 1}
    caplog.set_level("INFO")
    engine = build_engine(of_values(WorkerSettings, values), Inbox(), lambda sentence: None)
    engine.close()
    assert "attention: our kernels" in caplog.text
