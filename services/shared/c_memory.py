"""What the C library keeps of freed memory."""

from __future__ import annotations

import ctypes


def return_freed() -> None:
    """Pages without anything in them go back to the system, of all arenas; threads that allocate wait meanwhile for some
    milliseconds. glibc keeps blocks of small and middle size for ever; other C libraries have no such call, and nothing happens.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
