"""Returns unused memory of this process to the device or to the system."""

from __future__ import annotations

import gc

import torch

from rootstock_llm.services.shared.memory import trim_heap


def return_memory(device: torch.device) -> None:
    """Collects garbage, and returns all free memory of the process."""
    gc.collect()
    return_cached(device)


def return_cached(device: torch.device) -> None:
    """Returns the memory that the allocator caches. The C library keeps small and middle-sized blocks."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim_heap()
