"""Large blocks of memory as mappings of their own, which go back to the system when they are freed. Standard library only."""

from __future__ import annotations

import ctypes

MMAP_BYTES = 1 << 18
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def map_large_blocks() -> None:
    """Once, early: glibc raises its threshold with the first large block that is freed, and keeps such blocks from then on."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries may not have it
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES)
