"""Cost of a service's start: python -m tests.benchmarks.starts [--beside CHECKOUT] [--python INTERPRETER] [--rounds N]

Each service starts with the demo model. The benchmark measures the seconds from the start of the process until its health is
SERVING, and the CPU seconds of the process and its children. Prints the minimum over the rounds. --beside also measures another
checkout, alternating with this one. --python uses another interpreter with this environment's packages. With an interpreter
whose standard library has no bytecode, services start as in an official Python image.
"""

from __future__ import annotations

import argparse
import os
import site
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rootstock_llm.services.local.ports import HOST, free_ports
from tests.benchmarks.server_process import ROOT, module_of

DEMO = ROOT / "models" / "demo"
WAIT_S = 120.0
SERVICES: dict[str, tuple[str, list[str]]] = {
    "tokenizer": ("tokenizer", []),
    "detokenizer": ("detokenizer", []),
    "worker, fake": ("worker", ["--executor", "fake"]),
    "worker, CPU": ("worker", ["--executor", "cpu", "--max-total-tokens", "4096"]),
}


@dataclass(frozen=True, slots=True)
class Start:
    """Times of a start, in seconds."""

    wall: float  # from the start of the process until the service is ready
    cpu: float  # CPU seconds of all cores


def measured(python: str, checkout: Path, service: str, flags: list[str]) -> Start:
    port, metrics_port = free_ports(2)
    argv = [
        python,
        "-m",
        module_of(checkout, service),
        "--model",
        str(DEMO),
        "--port",
        str(port),
        "--metrics-port",
        str(metrics_port),
    ]
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": os.pathsep.join((str(checkout), *site.getsitepackages()))}
    begun = time.monotonic()
    process = subprocess.Popen([*argv, *flags], cwd=checkout, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with grpc.insecure_channel(f"{HOST}:{port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=service)
            while health.Check(request, timeout=WAIT_S, wait_for_ready=True).status != health_pb2.HealthCheckResponse.SERVING:
                time.sleep(0.01)
        wall = time.monotonic() - begun
        return Start(wall, cpu_s(psutil.Process(process.pid)))
    finally:
        process.terminate()
        process.wait()


def cpu_s(process: psutil.Process) -> float:
    """Returns the CPU seconds of a process and of its running children."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system + each.children_user + each.children_system for each in times)


def fastest(starts: list[Start]) -> str:
    return f"{min(each.wall for each in starts):.2f} s, {min(each.cpu for each in starts):.2f} s of CPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="folder of another checkout that has its generated protos")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    checkouts = [ROOT] if asked.beside is None else [ROOT, asked.beside.resolve()]
    for name, (service, flags) in SERVICES.items():
        starts: dict[Path, list[Start]] = {checkout: [] for checkout in checkouts}
        for _ in range(asked.rounds):
            for checkout in checkouts:
                starts[checkout].append(measured(asked.python, checkout, service, flags))
        print(name, *(f"{checkout}: {fastest(found)}" for checkout, found in starts.items()), sep="; ", flush=True)


if __name__ == "__main__":
    main()
