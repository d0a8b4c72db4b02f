"""Defaults of max_running_requests, chunked_prefill_size and enable_mixed_chunk, by the device and its memory.

A device with more memory stores the KV of more requests. It is usually also faster and computes a longer chunk in the same time.
The chunk sizes are SGLang's defaults by GPU memory. No default of max_running_requests exceeds 256, because decode graphs have at
most 256 rows by default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rootstock_llm.services.worker.settings import BY_DEVICE, WorkerSettings


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The defaults for one class of devices."""

    max_running_requests: int
    chunked_prefill_size: int  # tokens


ON_CPU = StepLimits(64, 2048)
ON_GPU = (  # (upper limit of the device's memory in GiB, defaults), ascending
    (35.0, StepLimits(64, 2048)),  # T4, A10, L4, RTX 4090
    (60.0, StepLimits(128, 4096)),  # A100 of 40 GB, L40S
    (160.0, StepLimits(256, 8192)),  # A100 and H100 of 80 GB, H200
    (math.inf, StepLimits(256, 16384)),  # B200
)


def limits_of(device_bytes: int | None) -> StepLimits:
    """Returns the defaults for a GPU with `device_bytes` of memory, or for a CPU if it is None."""
    if device_bytes is None:
        return ON_CPU
    return next(limits for below, limits in ON_GPU if device_bytes / 2**30 < below)


def resolved(settings: WorkerSettings, device_bytes: int | None) -> WorkerSettings:
    """Returns the settings with unset limits replaced by the device's defaults.

    In the result, a chunked_prefill_size of 0 means that prompts are not split into chunks.
    """
    limits = limits_of(device_bytes)
    found: dict[str, int] = {}
    if settings.max_running_requests == BY_DEVICE:
        found["max_running_requests"] = limits.max_running_requests
    chunk = settings.chunked_prefill_size
    found["chunked_prefill_size"] = limits.chunked_prefill_size if chunk is None else max(chunk, 0)
    if settings.enable_mixed_chunk is None:
        found["enable_mixed_chunk"] = device_bytes is None
    return settings.model_copy(update=found)


def max_step_tokens(settings: WorkerSettings) -> int:
    """Returns the number of tokens of the largest step that the scheduler plans.

    With chunks, a step has at most chunked_prefill_size and at most max_prefill_tokens tokens, including the decode rows of a
    mixed step. A mixed step with many decode rows still has one page of prompt tokens. Without chunks, a step has up to
    max_prefill_tokens plus the decode rows of a mixed step. A single prompt may be longer; the executor then computes it in
    pieces.

    Args:
        settings: settings from resolved().
    """
    running = settings.max_running_requests
    if settings.chunked_prefill_size:
        return max(min(settings.max_prefill_tokens, settings.chunked_prefill_size), settings.page_size + running)
    return max(settings.max_prefill_tokens + (running if settings.enable_mixed_chunk else 0), running)
