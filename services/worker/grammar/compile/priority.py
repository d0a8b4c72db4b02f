"""Sets the niceness of a process or a thread."""

from __future__ import annotations

import os


def give_way(native_id: int, niceness: int) -> None:
    """Increases the niceness of a process or thread to at least `niceness` (-20 to 19). Only root may decrease it."""
    os.setpriority(os.PRIO_PROCESS, native_id, max(niceness, os.getpriority(os.PRIO_PROCESS, native_id)))
