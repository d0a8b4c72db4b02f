"""Sets the niceness of a process or a thread."""

from __future__ import annotations

import os


def lower_priority(native_id: int, niceness: int) -> None:
    """Raises the niceness of a process or thread to `niceness` (-20 to 19), which lowers its priority. Never lowers niceness."""
    os.setpriority(os.PRIO_PROCESS, native_id, max(niceness, os.getpriority(os.PRIO_PROCESS, native_id)))
