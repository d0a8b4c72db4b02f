"""Tests of the scheduler's configuration from the settings and the loaded model."""

from __future__ import annotations

import enum
from dataclasses import fields, replace

import pytest

from rootstock_llm.services.shared.settings import of_values
from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.experts import ExpertShape
from rootstock_llm.services.worker.core.contracts.graph_limits import GraphLimits
from rootstock_llm.services.worker.device_limits import resolved
from rootstock_llm.services.worker.exec.contracts.model_info import LoadedInfo
from rootstock_llm.services.worker.scheduler_config import scheduler_config
from rootstock_llm.services.worker.settings import WorkerSettings
from tests.contracts.test_worker_defaults import COMPUTED

SETTINGS = resolved(of_values(WorkerSettings, {}), None)
INFO = LoadedInfo("fake", 4096, 1000, (2,), num_pages=64, page_size=16, dtype="none", weight_bytes=0, kv_bytes_per_token=0)
FROM_EXECUTOR = ("context_len", "page_size")  # values that the executor returns (LoadedInfo), not the settings
NAMES = sorted({*COMPUTED, *FROM_EXECUTOR, "schedule_policy"})  # the remaining fields are plain copies and need no test each


def other_than(value: object) -> object:
    """Returns a different value of the setting's type."""
    if isinstance(value, enum.Enum):
        return next(member for member in type(value) if member is not value)
    assert isinstance(value, int | float)
    return not value if isinstance(value, bool) else value + 1


def changed_fields(a: SchedulerConfig, b: SchedulerConfig) -> set[str]:
    return {field.name for field in fields(a) if getattr(a, field.name) != getattr(b, field.name)}


@pytest.mark.parametrize("name", NAMES)
def test_setting_changes_only_the_configuration_field_of_the_same_name(name: str) -> None:
    changed = SETTINGS.model_copy(update={name: other_than(getattr(SETTINGS, name))})
    before, after = (scheduler_config(settings, INFO, -1) for settings in (SETTINGS, changed))
    assert changed_fields(before, after) == ({name} - set(FROM_EXECUTOR))


def test_values_of_the_model_and_the_tokenizer_reach_the_scheduler_configuration() -> None:
    experts = ExpertShape((1, 3), 8, 2)
    config = scheduler_config(SETTINGS, replace(INFO, pooling_reuses_prefix=False, experts=experts), 7)
    assert (config.num_pages, config.page_size, config.context_len, config.vocab_size) == (64, 16, 4096, 1000)
    assert (config.eos_token_ids, config.bos_token_id, config.pooling_reuses_prefix) == ((2,), 7, False)
    assert config.experts == experts


def test_graph_limits_come_from_the_executor() -> None:
    with_graphs = replace(INFO, graph_rows=(1, 8, 128), graph_rereads=700, eager_step_cost=0.04)
    assert scheduler_config(SETTINGS, with_graphs, -1).graphs == GraphLimits(128, 700, 0.04)
    assert scheduler_config(SETTINGS, INFO, -1).graphs == GraphLimits()


def test_encoder_prompts_are_never_cut_and_never_cached() -> None:
    settings = SETTINGS.model_copy(update={"enable_mixed_chunk": True, "max_prefill_tokens": 512})
    config = scheduler_config(settings, replace(INFO, needs_whole_prompt=True), -1)
    plain = scheduler_config(settings, INFO, -1)
    assert config == replace(
        plain,
        whole_prompts=True,
        max_prefill_tokens=4096,
        chunked_prefill_size=0,
        enable_mixed_chunk=False,
        enable_radix_cache=False,
    )


@pytest.mark.parametrize("name", ["max_running_requests", "chunked_prefill_size", "enable_mixed_chunk"])
def test_scheduler_configuration_fails_when_a_device_limit_is_unresolved(name: str) -> None:
    unresolved = SETTINGS.model_copy(update={name: WorkerSettings.model_fields[name].default})
    with pytest.raises(AssertionError, match="device"):
        scheduler_config(unresolved, INFO, -1)


class TestValuesWithoutAnEnvironment:
    def test_settings_from_given_values_ignore_flags_and_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ROOTSTOCK_PAGE_SIZE", "32")
        assert WorkerSettings().page_size == 32
        settings = of_values(WorkerSettings, {"max_queued_requests": 7})
        assert (settings.page_size, settings.max_queued_requests) == (16, 7)

    def test_error_names_every_invalid_field(self) -> None:
        with pytest.raises(ValueError, match=r"^page_size: .*; pages: "):
            of_values(WorkerSettings, {"page_size": 0, "pages": 3})
