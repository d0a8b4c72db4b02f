"""Returns memory that this process has freed to the device or to the system."""

from __future__ import annotations

import gc

import torch

from rootstock_llm.services.shared.memory import trim_heap


def return_memory(device: torch.device) -> None:
    """Collects garbage, and returns all memory that the allocator has cached."""
    gc.collect()
    return_cached(device)


def return_cached(device: torch.device) -> None:
    """Returns freed memory that torch's allocator (GPU) or the C library (CPU) has cached."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim_heap()
