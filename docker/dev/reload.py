"""Runs this interpreter with the arguments given, and runs it again whenever a Python file below services/ has changed.

    python reload.py -m services.gateway

SIGTERM and SIGINT go to the child, whose exit status is then this one's. A child that ends by itself ends this process with its
status, unless a change came before: then, as over a syntax error, the next change starts it again.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

POLL_S = 0.5
WATCHED = Path("services")


def changed_at(folder: Path) -> float:
    """Newest modification below folder, in seconds; deletions show in their folder's own time."""
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
        """Until a signal has ended the child, or it has ended by itself with no file changed since this began."""
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
        print("sources have changed: starting again", file=sys.stderr, flush=True)
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
