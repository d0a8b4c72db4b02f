"""Runs a measured server as a child process. The server is stopped together with its own children."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rootstock_llm.services.local.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
ROOTSTOCK = "{python} -m rootstock_llm.services.local --model {model} --port {port} --dtype bfloat16 --no-demo"
READINESS_PATH = "/readiness"
START_S = 600.0
STOP_S = 30.0
POLL_S = 0.25
LOG_TAIL_CHARS = 3000


class ServerFailed(Exception):
    """Raised if the server ends or is not ready after START_S seconds. The message contains the end of the server's log."""


def server_command(template: str, model: Path, port: int) -> list[str]:
    """Returns the argument list of a command template, which runs without a shell."""
    return [part.format(python=sys.executable, model=model, port=port) for part in shlex.split(template)]


def module_of(checkout: Path, name: str) -> str:
    """Returns the dotted name of a module of `services` in a checkout. Older checkouts lack the package rootstock_llm."""
    return f"rootstock_llm.services.{name}" if (checkout / "rootstock_llm").is_dir() else f"services.{name}"


@contextmanager
def running_server(template: str, model: Path, log: Path, checkout: Path = ROOT) -> Iterator[str]:
    """Yields the base URL of a ready server, and ends all its processes on exit.

    Args:
        template: command with {python}, {model} and {port}.
        model: folder of the checkpoint.
        log: file for the server's output.
        checkout: repository whose code the server runs; also the working directory of the server.

    Raises:
        ServerFailed: the server ended or was not ready after START_S seconds.
    """
    (port,) = free_ports(1)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        command = server_command(template, model, port)
        process = subprocess.Popen(command, cwd=checkout, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(process, url, log)
            yield url
        finally:
            stop(process)


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not answers(url + READINESS_PATH):
        if has_ended(process):
            raise ServerFailed(f"the server ended before it was ready:\n{tail(log)}")
        if time.monotonic() > deadline:
            raise ServerFailed(f"the server was not ready after {START_S:.0f} s:\n{tail(log)}")
        time.sleep(POLL_S)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """Sends SIGTERM to the server and waits. Then kills its process group, which contains only the server and its children."""
    process.terminate()
    deadline = time.monotonic() + STOP_S
    while not has_ended(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    if not has_ended(process):
        print(f"the server did not stop within {STOP_S:.0f} s of SIGTERM", file=sys.stderr)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Returns whether the process has ended, without reaping it, so that its id stays reserved for the process group."""
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_TAIL_CHARS:]
