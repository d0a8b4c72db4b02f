"""Ctrl-C for programs that tests start."""

from __future__ import annotations

import signal


def hear_interrupts() -> None:
    """In a child, before its program: who was started by a shell in the background hears none, and its children neither."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
