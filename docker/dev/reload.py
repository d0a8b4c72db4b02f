"""Runs this interpreter with the given arguments, and restarts it when a Python file below rootstock_llm/ changes.

    python reload.py -m rootstock_llm.services.gateway

SIGTERM and SIGINT are passed to the child, and this process then ends with the child's exit status. If the child ends by itself
before the first change, this process also ends with its status. If the child ends after a change, for example because of a syntax
error, this process waits for the next change and starts the child again.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

POLL_S = 0.5  # seconds between two checks for changes
WATCHED = Path("rootstock_llm")


def changed_at(folder: Path) -> float:
    """Returns the newest modification time below the folder, in seconds. A deletion changes the time of its folder."""
    return max((path.stat().st_mtime for path in [folder, *folder.rglob("*.py")] if path.exists()), default=0.0)


class Reloader:
    def __init__(self, argv: list[str]) -> None:
        self._argv = argv
        self._stopping = False
        self._edited = False
        self._child = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, *self._argv])

    def stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True
        self._child.send_signal(number)

    def run(self) -> int:
        """Runs until a signal has ended the child, or the child has ended by itself before any file changed."""
        seen = changed_at(WATCHED)
        while True:
            time.sleep(POLL_S)
            now, ended = changed_at(WATCHED), self._child.poll()
            if now != seen and not self._stopping:
                seen = now
                self._replace()
            elif ended is not None and (self._stopping or not self._edited):
                return ended

    def _replace(self) -> None:
        self._edited = True
        print("sources have changed: restarting the service", file=sys.stderr, flush=True)
        self._child.kill()
        self._child.wait()
        self._child = self._start()


def main() -> int:
    reloader = Reloader(sys.argv[1:])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, reloader.stop)
    return reloader.run()


if __name__ == "__main__":
    sys.exit(main())
