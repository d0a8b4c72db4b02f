"""Notices that the loop has stopped turning while it has work: dumps every thread's stack and turns liveness off."""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Watchdog:
    """beat() is called by the loop each turn; on_hang once per hang, from the watchdog's thread, on_recover after it."""

    def __init__(
        self,
        timeout_s: float,
        on_hang: Callable[[], None],
        on_recover: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s = timeout_s
        self._on_hang, self._on_recover = on_hang, on_recover
        self._clock = clock
        self._last = clock()
        self._hung = False
        self._stopped = threading.Event()

    def beat(self) -> None:
        self._last = self._clock()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def look(self) -> None:
        """One look at the loop's last sign of life. An idle loop beats too: it wakes every second."""
        silent = self._clock() - self._last
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
