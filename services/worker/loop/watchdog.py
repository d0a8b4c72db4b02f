"""Notices that the loop's pulse has stopped: dumps every thread's stack and turns liveness off."""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
from collections.abc import Callable

from services.worker.loop.pulse import Pulse

logger = logging.getLogger(__name__)


class Watchdog:
    """on_hang: once per hang, from the watchdog's thread; on_recover after it."""

    def __init__(self, pulse: Pulse, timeout_s: float, on_hang: Callable[[], None], on_recover: Callable[[], None]) -> None:
        self._pulse = pulse
        self._timeout_s = timeout_s
        self._on_hang, self._on_recover = on_hang, on_recover
        self._hung = False
        self._stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def look(self) -> None:
        """One look at the loop's last sign of life."""
        silent = self._pulse.silent_s
        if silent > self._timeout_s and not self._hung:
            self._hung = True
            logger.error("the loop has not turned for %.0f s; stacks follow", silent)
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            self._on_hang()
        elif silent <= self._timeout_s and self._hung:
            self._hung = False
            logger.warning("the loop turns again")
            self._on_recover()

    def _watch(self) -> None:
        while not self._stopped.wait(min(self._timeout_s / 4, 5.0)):
            self.look()
