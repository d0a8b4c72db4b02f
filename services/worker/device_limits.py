"""Defaults of the number of running requests and the length of chunks, by the device's memory.

A device with more memory holds the KV of more rows, and is usually faster, so that it computes a longer chunk in the same time.
The chunks are SGLang's defaults by GPU memory. The numbers of requests follow the largest decode graphs captured by default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rootstock_llm.services.worker.settings import BY_DEVICE, WorkerSettings


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits of a kind of device."""

    max_running_requests: int
    chunked_prefill_size: int  # tokens


ON_CPU = StepLimits(64, 2048)
ON_GPU = (  # limits for devices with less memory than this, in GiB
    (35.0, StepLimits(64, 2048)),  # T4, A10, L4, RTX 4090
    (60.0, StepLimits(128, 4096)),  # A100 of 40 GB, L40S
    (160.0, StepLimits(256, 8192)),  # A100 and H100 of 80 GB, H200
    (math.inf, StepLimits(256, 16384)),  # B200
)


def limits_of(device_bytes: int | None) -> StepLimits:
    """Returns the limits for a GPU with this memory. None means a CPU."""
    if device_bytes is None:
        return ON_CPU
    return next(limits for below, limits in ON_GPU if device_bytes / 2**30 < below)


def resolved(settings: WorkerSettings, device_bytes: int | None) -> WorkerSettings:
    """Returns the settings with both limits, from the device if they are not set. A chunk of 0 tokens means no chunks."""
    limits, found = limits_of(device_bytes), {}
    if settings.max_running_requests == BY_DEVICE:
        found["max_running_requests"] = limits.max_running_requests
    chunk = settings.chunked_prefill_size
    found["chunked_prefill_size"] = limits.chunked_prefill_size if chunk is None else max(chunk, 0)
    return settings.model_copy(update=found)


def most_step_tokens(settings: WorkerSettings) -> int:
    """Returns the tokens of the largest step that the scheduler plans.

    With chunks, a step has at most one chunk. Decode rows of a mixed step count in it, but leave one page or more to the prompt.
    Without chunks, a step has up to max_prefill_tokens and the decode rows of a mixed step. A single prompt that is longer is
    computed in pieces.

    Args:
        settings: settings from resolved().
    """
    running = settings.max_running_requests
    if settings.chunked_prefill_size:
        return max(min(settings.max_prefill_tokens, settings.chunked_prefill_size), settings.page_size + running)
    return max(settings.max_prefill_tokens + (running if settings.enable_mixed_chunk else 0), running)
