"""The whole system as real processes on free ports. A test can kill and restart each of them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from rootstock_llm.services.local.plan import Part, num_ports, parts, state_folder
from rootstock_llm.services.local.ports import HOST, free_ports
from rootstock_llm.services.local.settings import LocalSettings
from rootstock_llm.services.local.supervisor import Child
from tests.night import NIGHTLY

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
# Settings of systems by model. Both models are served under the name `demo`. demo-hybrid has windows and recurrent layers.
MODELS: dict[str, dict[str, Any]] = {
    "demo": {},
    "demo-hybrid": {"model": str(DEMO.parent / "demo-hybrid"), "served_model_name": "demo", "max_total_tokens": 16_384},
}
CHOSEN_MODELS = [*MODELS] if NIGHTLY else ["demo"]  # by day, test_cache_groups.py covers the second model
START_S = 240.0


class System:
    """A context manager that starts the processes of a system and ends them on exit.

    Args:
        env: additional environment variables of every process.
        settings: settings of LocalSettings.
    """

    def __init__(self, log_dir: Path, env: dict[str, str] | None = None, **settings: Any) -> None:
        port, *ports = free_ports(1 + 64)
        self.port = port
        self.url = f"http://{HOST}:{port}"
        values = {
            "model": str(DEMO),
            "port": port,
            "num_threads": 1,
            "log_level": "debug",
            "state_dir": str(log_dir / "state"),
            **settings,
        }
        self.access_log = log_dir / "access.log"
        flags = shlex.join(("--access-log", "json", "--access-log-file", str(self.access_log)))
        values["gateway_flags"] = f"{flags} {values.get('gateway_flags', '')}"
        local = LocalSettings(_cli_parse_args=False, **values)  # type: ignore[call-arg]
        self.parts: dict[str, Part] = {p.command.name: p for p in parts(local, values["model"], ports[: num_ports(local)])}
        log_dir.mkdir(parents=True, exist_ok=True)
        if local.state_dir:
            state_folder(local).mkdir(parents=True, exist_ok=True)
        for part in self.parts.values():
            part.command.env.update(env or {})
        self.children = {name: Child(part.command, log_dir) for name, part in self.parts.items()}

    def __enter__(self) -> System:
        for child in self.children.values():
            child.start()
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children.values():
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + 6
        while time.monotonic() < deadline and any(child.exit_code is None for child in self.children.values()):
            time.sleep(0.05)
        for child in self.children.values():
            child.signal(signal.SIGKILL)

    def wait_ready(self) -> None:
        def ready() -> bool:
            dead = [name for name, child in self.children.items() if child.exit_code is not None]
            assert not dead, f"{dead} ended before the system was ready: {self.children[dead[0]].last_lines(20)}"
            return self.status("/readiness") == 200

        wait_until(ready, START_S, "the system to be ready")

    def kill(self, name: str) -> None:
        self.children[name].signal(signal.SIGKILL)
        self.wait_ended(name)

    def start(self, name: str) -> None:
        """Waits until the process has exited, because its ports are in use until then, and starts it again."""
        self.wait_ended(name)
        self.children[name].start()

    def wait_ended(self, name: str) -> None:
        wait_until(lambda: not self.children[name].running, 60, f"{name} to end")

    def status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.url + path, timeout=20) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def post(self, path: str, body: dict[str, Any], timeout: float = 120, key: str = "") -> tuple[int, dict[str, Any]]:
        """Posts a JSON body.

        Args:
            key: API key; "" for no key.

        Returns:
            Status and JSON body of the response, which may be an error.

        Raises:
            OSError: the gateway sent no response.
        """
        headers = {"content-type": "application/json"} | ({"x-api-key": key} if key else {})
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def metric(self, name: str, metric: str, **labels: str) -> float:
        """Returns the sum of a process's samples of a metric with these labels."""
        with urllib.request.urlopen(self.parts[name].metrics_url, timeout=60) as response:
            families = text_string_to_metric_families(response.read().decode())
            samples = [sample for family in families for sample in family.samples if sample.name == metric]
            values = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
        assert values, f"{name} reports no sample of {metric} with the labels {labels}"
        return sum(values)

    def resident_mb(self, name: str) -> float:
        """Returns the resident memory in MiB of the process and its children."""
        process = psutil.Process(self.children[name].pid)
        return sum(p.memory_info().rss for p in [process, *process.children(recursive=True)]) / 2**20

    def log(self, name: str) -> str:
        """Returns the log of a process. The name "access" stands for the gateways' access log."""
        path = self.access_log if name == "access" else self.children[name].log
        return path.read_text(errors="replace")


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Waits until the condition is true and returns the seconds that it took. Fails after `seconds`.

    Args:
        what: the awaited state, for the message.
    """
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, f"waited {seconds} s for {what}"
        time.sleep(0.02)
    return time.monotonic() - begun


def processes_with(marker: str) -> list[str]:
    """Returns the command lines of the processes whose environment contains `marker`, a NAME=VALUE."""
    name, value = marker.split("=")
    out = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                out.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return out


def make_run(env: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    """Starts `make run` as a user does, in its own process group like a terminal's foreground job."""
    return subprocess.Popen(
        ["make", "-s", "run", *arguments],
        cwd=ROOT,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
