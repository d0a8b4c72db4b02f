"""Memory that this process does not use goes back to the device, or to the system."""

from __future__ import annotations

import gc

import torch

from services.shared.memory import trim_heap


def return_memory(device: torch.device) -> None:
    """What is free inside the process becomes free on the device, garbage too."""
    gc.collect()
    return_cached(device)


def return_cached(device: torch.device) -> None:
    """What the allocator keeps for later becomes free on the device. The C library keeps small and middle-sized blocks."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim_heap()
