"""Ctrl-C for programs that tests start."""

from __future__ import annotations

import signal


def hear_interrupts() -> None:
    """Restores SIGINT in a child process. A shell starts background processes with SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
