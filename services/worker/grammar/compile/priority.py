"""Of a process or a thread: how far it stands back for others."""

from __future__ import annotations

import os


def give_way(native_id: int, niceness: int) -> None:
    """To at least this niceness (-20 to 19). One that is nicer already stays: only root may lower it."""
    os.setpriority(os.PRIO_PROCESS, native_id, max(niceness, os.getpriority(os.PRIO_PROCESS, native_id)))
