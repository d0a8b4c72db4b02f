"""Starts child processes, restarts them when they end, and stops them within a few seconds.

Each child has a separate process group, so that Ctrl-C reaches only the launcher. The kernel kills a child if the launcher dies
without stopping it. The Supervisor is the only owner of the processes' handles.

    started ──► ready ──► ended ──► restarted                at any time
       └──────► ended ──► restarted ──► ended                during the start: the start fails
       └──────► ended with status 2                          during the start: the start fails
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from rootstock_llm.services.shared.settings import WRONG_SETTINGS

logger = logging.getLogger(__name__)

STOP_S = 4.0  # seconds from SIGTERM to SIGKILL
CHECK_S = 0.5  # seconds between two checks for ended children
MOST_ENDS = 2  # the start fails if a process ends this often before it is ready
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start."""

    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)  # variables in addition to the launcher's environment


class Child:
    """A process and its log.

    Attributes:
        is_ready: whether the process has become ready since its last start. The launcher sets it.
        ends: number of times that the process has ended before it became ready; 0 after it becomes ready.
        starts: number of times that the process was started.
    """

    def __init__(self, command: Command, log_dir: Path) -> None:
        self.command = command
        self.log = log_dir / f"{command.name}.log"
        self.is_ready = False
        self.ends = self.starts = 0
        self._log_start = 0  # bytes of the log before the last start
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
        self.is_ready = False
        self.starts += 1
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
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
        """Kills descendants of the ended process that still run, for example a compiler."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def became_ready(self) -> None:
        self.is_ready, self.ends = True, 0

    def output(self) -> str:
        """Returns the part of the log that was written since the last start; "" if the user has moved or deleted the log."""
        try:
            with self.log.open("rb") as log:
                log.seek(self._log_start)
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def last_lines(self, count: int) -> str:
        return "\n".join(self.output().splitlines()[-count:])


class ProcessFailed(RuntimeError):
    """A process has ended during the start and is not restarted. The message has the cause and the path of the log."""


class Supervisor:
    """Owns the children of one launcher.

    Args:
        log_dir: folder of the children's logs; created if missing.
        explain: returns a message about why a child has ended, from its exit code.
        report: shows a line to the user. If it raises OSError, the line is lost.
    """

    def __init__(
        self,
        log_dir: Path,
        explain: Callable[[Child, int], str] | None = None,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self._log_dir = log_dir
        self._explain = explain or (lambda child, code: f"{child.command.name} ended with code {code}.")
        self._report = report
        self.is_started = False  # whether the start has ended. The launcher sets it. Ended processes are then always restarted.
        self.children: list[Child] = []

    @property
    def starts(self) -> int:
        """Number of starts of all children together."""
        return sum(child.starts for child in self.children)

    def start(self, command: Command) -> Child:
        child = Child(command, self._log_dir)
        child.log.unlink(missing_ok=True)
        child.start()
        self.children.append(child)
        return child

    async def keep_running(self) -> NoReturn:
        """Restarts ended children until cancelled. Raises ProcessFailed if the start fails; see the diagram above."""
        while True:
            for child in self.children:
                if (code := child.exit_code) is not None:
                    child.kill_group()
                    self._restart(child, code)
            await asyncio.sleep(CHECK_S)

    def _restart(self, child: Child, code: int) -> None:
        sentence = self._explain(child, code)
        if not child.is_ready:
            child.ends += 1
        if not self.is_started and (code == WRONG_SETTINGS or child.ends >= MOST_ENDS):
            raise ProcessFailed(sentence)
        with contextlib.suppress(OSError):  # the terminal is gone, or the disk is full; the other processes still serve
            self._report(f"{sentence} The process is restarted.")
        child.start()

    async def stop(self) -> None:
        """Sends SIGTERM to all children, and SIGKILL to each child that still runs after STOP_S. Returns when all have ended."""
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
    """Makes the kernel kill the child if the launcher dies. Runs in the child before exec. Has an effect only on Linux."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
