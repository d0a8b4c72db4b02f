"""Runs the launcher as a process, reads its output, and finds the processes that it starts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from rootstock_llm.services.local.ports import free_ports
from tests.e2e.system import ROOT, wait_until

SERVICES = "rootstock_llm.services."


class Launcher:
    """A running `python -m rootstock_llm.services.local` in its own process group, with logs and state below `folder`."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        env: Mapping[str, str] | None = None,
        port: int = 0,
        after: Sequence[str] = (),
        checkout: Path = ROOT,
    ) -> None:
        """Starts the launcher.

        Args:
            flags: flags of the launcher, added to those of this class.
            env: environment variables, added to those of this process.
            port: the gateway's port; 0 for a free port.
            after: last flags, which override earlier ones.
            checkout: folder of the code that runs.
        """
        self.folder, self.port = folder, port or free_ports(1)[0]
        self.logs = folder / "run" / str(self.port)
        argv = [sys.executable, "-m", "rootstock_llm.services.local", "--port", str(self.port), "--num-threads", "1", *flags]
        argv += ["--log-dir", str(folder / "run"), "--state-dir", str(folder / "state"), *after]
        self.process = subprocess.Popen(
            argv,
            cwd=checkout,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output = ""

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
        self.output += self.process.communicate(timeout=60)[0]

    def read_until(self, text: str) -> str:
        """Reads the output until a line contains the text, and returns the whole output so far."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return self.output
        raise AssertionError(f"the launcher ended without printing {text!r}:\n{self.output}")

    def read_all(self) -> str:
        """Waits until the launcher ends by itself, and returns its whole output."""
        self.output += self.process.communicate(timeout=240)[0]
        return self.output

    def child(self, name: str) -> psutil.Process | None:
        """Returns the running process with this name in the launcher's plan, or None."""
        for process in psutil.Process(self.process.pid).children():
            try:
                if self._name_of(process) == name and process.status() != psutil.STATUS_ZOMBIE:
                    return process
            except psutil.NoSuchProcess:
                continue
        return None

    def _name_of(self, process: psutil.Process) -> str:
        """Returns the name of a process in the launcher's plan; "" while a new process still has the launcher's command line."""
        argv = process.cmdline()
        if "--worker-id" in argv:
            return str(argv[argv.index("--worker-id") + 1])
        # A running Redis replaces its command line by its title, which contains "server". Only the state store has --dir, and
        # runs in a folder below `state`.
        if "server" in " ".join(argv[:1]):
            return "state" if Path(process.cwd()).is_relative_to(self.folder / "state") or "--dir" in argv else "redis"
        service = next((word.removeprefix(SERVICES) for word in argv if word.startswith(SERVICES)), "")
        return "" if service == "local" else service  # local: the fork has not started the service's program yet

    def wait_for(self, name: str, besides: int = 0) -> psutil.Process:
        """Waits until a process with this name runs, and returns it.

        Args:
            besides: id of a process that does not count, such as a killed one.
        """

        def is_there() -> bool:
            found = self.child(name)
            return found is not None and found.pid != besides

        wait_until(is_there, 60, f"{name} to be started")
        found = self.child(name)
        assert found is not None
        return found

    def log(self, name: str) -> str:
        path = self.logs / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def curl(self) -> str:
        """Returns the curl command that the launcher has printed, as a user pastes it."""
        return next(line.strip() for line in self.output.splitlines() if line.startswith("  curl "))

    def urls(self) -> list[str]:
        return re.findall(r"https?://[^\s'\"]+", self.output)


def paste(command: str, env: Mapping[str, str] | None = None) -> str:
    """Runs a command in a shell and returns its output."""
    done = subprocess.run(["sh", "-c", command], env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout
