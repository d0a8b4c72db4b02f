"""Tests of each gRPC service as a process: its health service, and its end within the grace period after SIGTERM."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rootstock_llm.protos import worker_pb2_grpc
from rootstock_llm.services.local.ports import HOST, free_ports
from rootstock_llm.services.shared.settings import WRONG_SETTINGS
from tests.services.ip_families import EVERYWHERE, LOOPBACKS

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
FLAGS = {"tokenizer": [], "detokenizer": [], "worker": ["--executor", "fake"]}


def start(service: str, port: int, metrics_port: int, model: Path = DEMO, host: str = HOST) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", f"rootstock_llm.services.{service}", "--model", str(model), "--port", str(port)]
    argv += ["--metrics-port", str(metrics_port), "--host", host, *FLAGS[service]]
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)


def wait_serving(health: health_pb2_grpc.HealthStub, service: str) -> None:
    deadline = time.monotonic() + 30
    request = health_pb2.HealthCheckRequest(service=service)
    while health.Check(request, timeout=30, wait_for_ready=True).status != health_pb2.HealthCheckResponse.SERVING:
        assert time.monotonic() < deadline, f"{service} is not ready"
        time.sleep(0.05)


@pytest.mark.parametrize("service", FLAGS)
def test_process_becomes_ready_and_ends_on_sigterm(service: str) -> None:
    """A process that listens on all addresses accepts connections of each IP family that the machine has."""
    port, metrics_port = free_ports(2)
    process = start(service, port, metrics_port, host=EVERYWHERE)
    try:
        for host in LOOPBACKS:
            with grpc.insecure_channel(f"{host}:{port}") as channel:
                health = health_pb2_grpc.HealthStub(channel)
                wait_serving(health, service)
                wait_serving(health, "")
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text(), "loading libtorch would take seconds of the start"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert "Traceback" not in process.communicate()[1]
    finally:
        process.kill()
        process.wait()


ENDLESS_WARM_UP = """
import asyncio
from rootstock_llm.services.worker import __main__ as worker
worker._warm_up = lambda *_: asyncio.Event().wait()
worker.main()
"""


def test_worker_that_is_not_ready_sends_load_reports() -> None:
    """Without load reports, a gateway would count the worker as lost, although it may have sent requests to the worker."""
    port, metrics_port = free_ports(2)
    flags = ["--model", str(DEMO), "--port", str(port), "--metrics-port", str(metrics_port), "--host", HOST, *FLAGS["worker"]]
    process = subprocess.Popen([sys.executable, "-c", ENDLESS_WARM_UP, *flags], stderr=subprocess.DEVNULL)
    ended = threading.Event()
    try:
        with grpc.insecure_channel(f"{HOST}:{port}") as channel:
            requests = iter(ended.wait, True)  # a stream without requests
            messages = worker_pb2_grpc.WorkerStub(channel).Generate(requests, timeout=60, wait_for_ready=True)
            assert next(messages).HasField("hello")
            assert all(next(messages).HasField("load") for _ in range(3)), "the first load is followed by a load per second"
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="worker"))
            assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
    finally:
        ended.set()
        process.kill()
        process.wait()


def test_worker_ends_at_once_on_sigterm_while_the_model_is_loading(tmp_path: Path) -> None:
    """The worker must install a signal handler, because SIGTERM has no default action for the first process of a container."""
    folder = shutil.copytree(DEMO, tmp_path / "model")
    loading = folder / "config.json"
    loading.unlink()
    os.mkfifo(loading)
    process = start("worker", *free_ports(2), model=folder)
    try:
        deadline = time.monotonic() + 30
        while not is_being_read(loading):
            assert time.monotonic() < deadline, "the worker does not read the pipe"
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()


def is_being_read(pipe: Path) -> bool:
    """Whether a process has opened the pipe for reading. Keeps the writing end open, so that the reader waits."""
    try:
        os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        assert error.errno == errno.ENXIO, error
        return False
    return True


@pytest.mark.parametrize("service", FLAGS)
def test_error_names_the_folder_without_a_traceback_when_the_folder_has_no_model(service: str, tmp_path: Path) -> None:
    process = start(service, *free_ports(2), model=tmp_path)
    try:
        stderr = process.communicate(timeout=30)[1]
        assert process.returncode == WRONG_SETTINGS
        assert str(tmp_path) in stderr and "Traceback" not in stderr
    finally:
        process.kill()
