"""The scheduler's configuration of a worker with default settings. Tests change single fields."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from rootstock_llm.services.shared.settings import of_values
from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.device_limits import resolved
from rootstock_llm.services.worker.exec.contracts.model_info import LoadedInfo
from rootstock_llm.services.worker.scheduler_config import scheduler_config
from rootstock_llm.services.worker.settings import WorkerSettings

MODEL = LoadedInfo(
    architecture="fake",
    context_len=2,
    vocab_size=1,
    eos_token_ids=(),
    num_pages=1,
    page_size=1,
    dtype="none",
    weight_bytes=0,
    kv_bytes_per_token=0,
)


def deployed_config(num_pages: int, page_size: int, context_len: int, vocab_size: int, **given: Any) -> SchedulerConfig:
    """Returns the default configuration of a CPU worker with the given fields, which may be outside of the settings' ranges.

    enable_mixed_chunk is False if it is not given, as on a GPU, so that a step has one kind of rows.
    """
    return replace(_defaults(), num_pages=num_pages, page_size=page_size, context_len=context_len, vocab_size=vocab_size, **given)


@cache
def _defaults() -> SchedulerConfig:
    return scheduler_config(resolved(of_values(WorkerSettings, {"enable_mixed_chunk": False}), None), MODEL, bos_token_id=-1)
