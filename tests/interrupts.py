"""Lets programs that tests start receive Ctrl-C."""

from __future__ import annotations

import signal


def hear_interrupts() -> None:
    """Restores the default handler of SIGINT in a child process.

    A shell starts background processes with SIGINT ignored, and their children inherit this setting.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
