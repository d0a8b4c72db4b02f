"""`python -m rootstock_llm.services.gateway` as a process that is connected to the services of a System."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import httpx

from rootstock_llm.services.local.ports import free_ports
from tests.services.gateway.system import RawClient, System, wait_until

START_S = 120.0  # seconds for the imports of a process on a busy machine


class Process:
    """A gateway process that is connected to the services of a System."""

    def __init__(self, system: System, *flags: str, **ports: int) -> None:
        self.clients: list[RawClient] = []
        port, health_port = free_ports(2)
        self.port = ports.get("port") or port
        self.health_port = ports.get("health_port") or health_port
        addresses = {"workers": system.workers, "detokenizers": system.detokenizers, "tokenizers": system.tokenizers}
        peers = [word for name, hosts in addresses.items() for word in (f"--{name}", ",".join(host.address for host in hosts))]
        command = [
            sys.executable,
            "-m",
            "rootstock_llm.services.gateway",
            "--port",
            str(self.port),
            "--health-port",
            str(self.health_port),
        ]
        quiet = {**os.environ, "GRPC_VERBOSITY": "NONE"}  # without the log lines of gRPC's C core
        few = ["prlimit", "--nofile=256:4096"]  # a low soft limit of open files, which the gateway must raise
        self._process = subprocess.Popen([*few, *command, *peers, *flags], stderr=subprocess.PIPE, text=True, env=quiet)
        self.pid = self._process.pid

    def wait_ready(self) -> None:
        wait_until(lambda: self._status("/readiness") == 200, "readiness", START_S)

    def _status(self, path: str) -> int:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}{path}", verify=False).status_code  # False: loads no certificates
        except httpx.TransportError:
            return 0

    def terminate(self) -> float:
        """Sends SIGTERM and returns the time at which it was sent."""
        self._process.send_signal(signal.SIGTERM)
        return time.monotonic()

    def wait(self) -> tuple[int, list[dict[str, Any]]]:
        """Waits for the end of the process. Returns its exit code and log lines."""
        _, errors = self._process.communicate(timeout=30)
        return self._process.returncode, [json.loads(line) for line in errors.splitlines()]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
