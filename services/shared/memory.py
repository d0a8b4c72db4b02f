"""Makes glibc return freed memory to the operating system. Has no effect with other C libraries. Standard library only."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3  # from glibc's malloc.h


def map_large_blocks(threshold_bytes: int) -> None:
    """Makes malloc use a separate mapping for each block of at least this size, which free() returns to the operating system.

    By default, glibc raises this threshold to the size of the largest freed mapping, up to 32 MiB, and caches smaller freed
    blocks. The caller must call this function before the first thread starts. The kernel zeroes each mapping, so frequent large
    allocations become slower.
    Source: mallopt(3).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, threshold_bytes)


def trim_heap() -> None:
    """Returns the free pages of all malloc arenas to the operating system.

    Without this call, glibc caches freed blocks below the threshold of map_large_blocks(). During the call, threads that allocate
    wait for some milliseconds. Source: malloc_trim(3).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
