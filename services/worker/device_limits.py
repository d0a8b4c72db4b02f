"""How many requests run at once and where prompts are cut, where the settings leave it to the device.

A device with more memory holds more rows' keys and values, and computes a longer chunk in the time of a shorter one elsewhere.
Chunks are those of SGLang's server arguments by GPU memory; rows those of the largest decode graphs that are captured by default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.worker.settings import BY_DEVICE, WorkerSettings


@dataclass(frozen=True, slots=True)
class StepLimits:
    """chunked_prefill_size: tokens."""

    max_running_requests: int
    chunked_prefill_size: int


ON_CPU = StepLimits(64, 2048)
ON_GPU = (  # by the device's memory in GiB, below which they hold
    (35.0, StepLimits(64, 2048)),  # T4, A10, L4, RTX 4090
    (60.0, StepLimits(128, 4096)),  # A100 of 40 GB, L40S
    (160.0, StepLimits(256, 8192)),  # A100 and H100 of 80 GB, H200
    (math.inf, StepLimits(256, 16384)),  # B200
)


def limits_of(device_bytes: int | None) -> StepLimits:
    """device_bytes: all memory of the GPU; None for steps on a CPU."""
    if device_bytes is None:
        return ON_CPU
    return next(limits for below, limits in ON_GPU if device_bytes / 2**30 < below)


def resolved(settings: WorkerSettings, device_bytes: int | None) -> WorkerSettings:
    """Returns the settings with both limits, found by the device where they are not set. No chunks are 0 tokens then."""
    limits, found = limits_of(device_bytes), {}
    if settings.max_running_requests == BY_DEVICE:
        found["max_running_requests"] = limits.max_running_requests
    chunk = settings.chunked_prefill_size
    found["chunked_prefill_size"] = limits.chunked_prefill_size if chunk is None else max(chunk, 0)
    return settings.model_copy(update=found)


def most_step_tokens(settings: WorkerSettings) -> int:
    """Tokens of the largest step that the scheduler plans. settings: resolved.

    It has one chunk at most, from which decode rows that ride along take all but a page. Without chunks it has what one step may
    compute of prompts, and the rows that ride along besides; a single prompt that is longer still is computed in pieces.
    """
    running = settings.max_running_requests
    if settings.chunked_prefill_size:
        return max(min(settings.max_prefill_tokens, settings.chunked_prefill_size), settings.page_size + running)
    return max(settings.max_prefill_tokens + (running if settings.enable_mixed_chunk else 0), running)
