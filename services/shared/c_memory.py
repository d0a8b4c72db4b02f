"""What the C library keeps of freed memory."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3  # malloc.h
LARGE_BLOCK_BYTES = 1 << 20


def map_large_blocks() -> None:
    """From now on a block of a MiB or more has pages of its own, which go back to the system when it is freed. glibc otherwise
    raises that bound to the largest block freed so far, up to 32 MiB, and keeps what is below it. To be called before any
    thread is started; not by who allocates large blocks all the time, since each is zeroed anew. Nothing in other C libraries.
    Source: mallopt(3).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def return_freed() -> None:
    """Pages without anything in them go back to the system, of all arenas; threads that allocate wait meanwhile for some
    milliseconds. glibc keeps blocks of small and middle size for ever; other C libraries have no such call, and nothing happens.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
