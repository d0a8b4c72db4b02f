"""The watchdog: it detects that the loop makes no progress, logs the stack of every thread and turns liveness off."""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
from collections.abc import Callable

from services.worker.loop.pulse import Pulse

logger = logging.getLogger(__name__)


class Watchdog:
    """A thread that watches the pulse of one loop."""

    def __init__(self, pulse: Pulse, timeout_s: float, on_hang: Callable[[], None], on_recover: Callable[[], None]) -> None:
        """Prepares the watchdog; start() starts its thread.

        Args:
            pulse: the loop's signs of life.
            timeout_s: silence in seconds after which the loop counts as hung.
            on_hang: called once per hang, on the watchdog's thread.
            on_recover: called when the loop turns again, on the same thread.
        """
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
        """Compares the loop's silence with the limit once."""
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
