"""Child processes that live and die with this one: started, restarted when they fall over, stopped within a few seconds.

Each child leads its own process group, so Ctrl-C reaches the launcher alone, and asks the kernel to be killed should the
launcher die without stopping it. Single owner of every child's handle.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

logger = logging.getLogger(__name__)

STOP_S = 4.0  # from SIGTERM to SIGKILL
RESTART_S = 0.5
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True, slots=True)
class Command:
    """env is added to the launcher's own environment."""

    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)


class Child:
    def __init__(self, command: Command, log_dir: Path) -> None:
        self.command = command
        self.log = log_dir / f"{command.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll() if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.command.env},
                process_group=0,
                preexec_fn=_die_with_parent,
            )

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def kill_group(self) -> None:
        """Kills what the process has started and left behind: a compiler, say."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def last_lines(self, count: int) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])


class Supervisor:
    def __init__(self, log_dir: Path) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self._log_dir = log_dir
        self.children: list[Child] = []

    def start(self, command: Command) -> Child:
        child = Child(command, self._log_dir)
        child.log.unlink(missing_ok=True)
        child.start()
        self.children.append(child)
        return child

    async def keep_running(self) -> None:
        """Restarts whatever ends, until cancelled."""
        while True:
            await asyncio.sleep(RESTART_S)
            for child in self.children:
                if (code := child.exit_code) is not None:
                    child.kill_group()
                    logger.warning("%s ended with code %d; starting it again", child.command.name, code)
                    child.start()

    async def stop(self) -> None:
        """SIGTERM to all, SIGKILL to what is left after STOP_S seconds. On return no child is left."""
        for child in self.children:
            child.signal(signal.SIGTERM)
        deadline = asyncio.get_running_loop().time() + STOP_S
        while any(child.exit_code is None for child in self.children):
            if asyncio.get_running_loop().time() > deadline:
                for child in self.children:
                    child.signal(signal.SIGKILL)
            await asyncio.sleep(0.02)
        for child in self.children:
            child.kill_group()


def _die_with_parent() -> None:
    """In the child, before exec. Linux only; elsewhere a killed launcher leaves its children."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
