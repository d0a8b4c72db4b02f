"""Tests of build_engine(): GPU settings that a CPU executor ignores, and the fields and settings that are logged."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from rootstock_llm.services.shared.observe.log import JsonFormatter
from rootstock_llm.services.shared.observe.log_fields import FIELDS
from rootstock_llm.services.shared.settings import of_values
from rootstock_llm.services.worker.engine import build_engine
from rootstock_llm.services.worker.loop.inbox import Inbox
from rootstock_llm.services.worker.settings import WorkerSettings

DEMO = Path(__file__).resolve().parents[3] / "models/demo"


@pytest.mark.by_day(one_in=3, seed=4)
@pytest.mark.parametrize("attention", ["flashinfer", "triton", "torch"])
def test_cpu_executor_ignores_gpu_settings(attention: str, caplog: pytest.LogCaptureFixture) -> None:
    values = {"model": str(DEMO), "executor": "cpu", "attention_backend": attention, "max_total_tokens": 4096, "num_threads": 1}
    caplog.set_level("INFO")
    engine = build_engine(of_values(WorkerSettings, values), Inbox(), lambda sentence: None)
    engine.close()
    assert "attention: our kernels" in caplog.text


def test_engine_logs_values_of_the_model_and_the_scheduler_as_fields(caplog: pytest.LogCaptureFixture) -> None:
    values = {"model": str(DEMO), "executor": "fake", "max_total_tokens": 4096}
    caplog.set_level("INFO")
    build_engine(of_values(WorkerSettings, values), Inbox(), lambda sentence: None).close()
    fields = {record.getMessage(): getattr(record, FIELDS, {}) for record in caplog.records}
    assert fields["model ready"]["eos_token_ids"] == (2, 0) and fields["scheduler configured"]["num_pages"] == 256
    for record in caplog.records:
        orjson.loads(JsonFormatter("worker").format(record))
        assert "Config(" not in record.getMessage() and "Info(" not in record.getMessage()


@pytest.mark.parametrize(
    ("values", "unused"),
    [({}, ""), ({"state_interval": 64, "max_mamba_cache_size": 9}, "max_mamba_cache_size, state_interval")],
    ids=["defaults", "changed"],
)
def test_engine_logs_settings_without_effect_when_the_model_lacks_their_caches(
    values: dict[str, int], unused: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    given = {"model": str(DEMO), "executor": "fake", "max_total_tokens": 4096, **values}
    build_engine(of_values(WorkerSettings, given), Inbox(), lambda sentence: None).close()
    found = [record.getMessage().partition(": ")[2] for record in caplog.records if "without effect" in record.getMessage()]
    assert found == ([unused] if unused else [])
