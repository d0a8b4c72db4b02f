"""Tests of the supervisor, which starts, restarts and stops processes, and of the plan, which has the flags of each process."""

from __future__ import annotations

import asyncio
import errno
import itertools
import shutil
import sys
import uuid
from pathlib import Path

import pytest

from rootstock_llm.services.local.plan import memory_flags, num_gpus, num_ports, parts
from rootstock_llm.services.local.settings import LocalSettings
from rootstock_llm.services.local.supervisor import Child, Command, ProcessFailed, Supervisor
from rootstock_llm.services.shared.settings import load
from tests.e2e.system import processes_with, wait_until

WITH_GRANDCHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


@pytest.mark.parametrize("code", [WITH_GRANDCHILD, STUBBORN], ids=["grandchild", "ignores-sigterm"])
def test_stop_of_the_supervisor_ends_the_whole_process_tree(tmp_path: Path, code: str) -> None:
    marker = f"ROOTSTOCK_TEST_MARKER={uuid.uuid4().hex}"
    supervisor = Supervisor(tmp_path)
    supervisor.start(Command("child", [sys.executable, "-c", code], dict([marker.split("=")])))
    wait_until(lambda: len(processes_with(marker)) == (2 if code == WITH_GRANDCHILD else 1), 60, "the running processes")
    if code == STUBBORN:
        wait_until(lambda: "up" in supervisor.children[0].log.read_text(), 60, "the signal handler")
    asyncio.run(supervisor.stop())
    wait_until(lambda: not processes_with(marker), 60, "the end of all processes")
    assert supervisor.children[0].exit_code is not None


def test_supervisor_restarts_an_ended_process(tmp_path: Path) -> None:
    async def run() -> tuple[int, int]:
        supervisor = Supervisor(tmp_path)
        child = supervisor.start(Command("child", [sys.executable, "-c", "import time; time.sleep(60)"]))
        keeping = asyncio.create_task(supervisor.keep_running())
        first = child.pid
        child.signal(9)
        async with asyncio.timeout(60):
            while child.pid == first:
                await asyncio.sleep(0.05)
        second = child.pid
        keeping.cancel()
        await supervisor.stop()
        return first, second

    first, second = asyncio.run(run())
    assert first != second


def ended(tmp_path: Path, code: str, *, ready: bool = False, is_started: bool = False) -> tuple[str, list[str]]:
    """Runs a child that ends by itself, until the supervisor gives up or has started it three times.

    Returns:
        The error, "" for none, and the lines that the user saw.
    """
    lines: list[str] = []

    async def run() -> str:
        supervisor = Supervisor(tmp_path, report=lines.append)
        supervisor.is_started = is_started
        child = supervisor.start(Command("child", [sys.executable, "-c", code]))
        if ready:
            child.became_ready()
        keeping = asyncio.create_task(supervisor.keep_running())
        async with asyncio.timeout(60):
            while not keeping.done() and child.starts < 3:
                await asyncio.sleep(0.02)
        keeping.cancel()
        (error,) = await asyncio.gather(keeping, return_exceptions=True)
        await supervisor.stop()
        return str(error) if isinstance(error, ProcessFailed) else ""

    return asyncio.run(run()), lines


def test_start_fails_when_a_process_ends_twice_without_becoming_ready(tmp_path: Path) -> None:
    assert ended(tmp_path, "raise SystemExit(1)") == (
        "child ended with code 1.",
        ["child ended with code 1. The process is restarted."],
    )


def test_start_fails_at_once_when_a_process_refuses_the_flags(tmp_path: Path) -> None:
    assert ended(tmp_path, "raise SystemExit(2)") == ("child ended with code 2.", [])


def test_supervisor_restarts_a_ready_process_without_a_limit(tmp_path: Path) -> None:
    error, lines = ended(tmp_path, "raise SystemExit(1)", ready=True)
    assert not error and len(lines) == 2


def test_supervisor_restarts_every_ended_process_after_the_system_has_started(tmp_path: Path) -> None:
    error, lines = ended(tmp_path, "raise SystemExit(2)", is_started=True)
    assert not error and len(lines) == 2


def test_supervisor_restarts_an_ended_process_when_the_terminal_is_gone(tmp_path: Path) -> None:
    def report(text: str) -> None:
        raise OSError(errno.EIO, text)

    async def run() -> int:
        supervisor = Supervisor(tmp_path, report=report)
        child = supervisor.start(Command("child", [sys.executable, "-c", "raise SystemExit(1)"]))
        child.became_ready()
        keeping = asyncio.create_task(supervisor.keep_running())
        async with asyncio.timeout(60):
            while child.starts < 2 and not keeping.done():
                await asyncio.sleep(0.02)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await supervisor.stop()
        return child.starts

    assert asyncio.run(run()) == 2


def test_reported_output_of_a_process_begins_at_the_last_start(tmp_path: Path) -> None:
    ended(tmp_path, "import os; print('one'); raise SystemExit(1)", is_started=True)
    child = Child(Command("child", [sys.executable, "-c", "print('two')"]), tmp_path)
    child.start()
    wait_until(lambda: child.exit_code is not None, 60, "the end of the process")
    assert "one" in child.log.read_text() and child.output() == "two\n"


def test_process_is_restarted_when_the_user_has_deleted_the_logs(tmp_path: Path) -> None:
    child = Child(Command("child", [sys.executable, "-c", "print('one')"]), tmp_path / "logs")
    child.start()
    wait_until(lambda: child.exit_code is not None, 60, "the end of the process")
    shutil.rmtree(tmp_path / "logs")
    assert child.output() == child.last_lines(5) == ""
    child.start()
    wait_until(lambda: child.exit_code is not None, 60, "the end of the process")
    assert child.output() == "one\n"


@pytest.mark.parametrize(
    ("workers", "index", "gpus", "flags"),
    [
        (1, 0, 0, ["--mem-fraction-static", "0.5"]),
        (3, 1, 0, ["--mem-fraction-static", str(0.5 / 3), "--hicache-memory-fraction", str(0.25 / 3)]),
        (1, 0, 1, ["--device", "cuda:0"]),
        (2, 1, 2, ["--device", "cuda:1", "--hicache-memory-fraction", "0.125"]),
        (4, 2, 2, ["--device", "cuda:0", "--mem-fraction-static", "0.45", "--hicache-memory-fraction", "0.0625"]),
        (4, 1, 4, ["--device", "cuda:1", "--hicache-memory-fraction", "0.0625"]),
    ],
)
def test_workers_are_spread_over_the_gpus(workers: int, index: int, gpus: int, flags: list[str]) -> None:
    assert memory_flags(workers, index, gpus) == flags


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [(None, 2), ("", 0), ("-1", 0), ("1", 1), ("1, 0", 2), ("0,-1,1", 1), ("MIG-a,MIG-b,MIG-c", 3)],
    ids=["unset", "empty", "none", "one", "both", "negative entry", "parts"],
)
def test_number_of_gpus_follows_the_device_files_and_the_visible_devices(
    visible: str | None, gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert num_gpus(tmp_path) == gpus and num_gpus(tmp_path / "none") == 0


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_share_the_memory_and_the_gateway_gets_all_worker_addresses(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rootstock_llm.services.local.plan.num_gpus", lambda: 0)
    settings = LocalSettings(_cli_parse_args=False, workers=workers, worker_flags="--mem-fraction-static 0.1")  # type: ignore[call-arg]
    ports = list(range(9000, 9000 + num_ports(settings)))
    plan = {part.command.name: part.command.argv for part in parts(settings, "models/demo", ports)}
    assert len(plan) == 5 + workers and len(set(ports)) == len(ports)
    argv = plan["worker-0"]
    fractions = [float(argv[i + 1]) for i, flag in enumerate(argv) if flag == "--mem-fraction-static"]
    assert fractions == [0.5 / workers, 0.1], "a user's flag comes last and wins"
    gateway = plan["gateway"]
    assert len(gateway[gateway.index("--workers") + 1].split(",")) == workers


def test_requested_prefill_and_decode_workers_replace_ordinary_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make run` also passes --workers, which is then ignored."""
    monkeypatch.setattr("rootstock_llm.services.local.plan.num_gpus", lambda: 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    argv = ["--workers", "1", "--prefill-workers", "1", "--decode-workers", "2", "--admin-port", "8001"]
    settings = load(LocalSettings, "rootstock-local", argv)
    ports = list(range(9000, 9000 + num_ports(settings)))
    plan = {part.command.name: part.command.argv for part in parts(settings, "models/demo", ports)}
    workers = {name: argv for name, argv in plan.items() if "rootstock_llm.services.worker" in argv}
    assert list(workers) == ["prefill-0", "decode-0", "decode-1"] and len(plan) == 5 + 3
    said = {name: dict(itertools.pairwise(argv)) for name, argv in plan.items()}
    for name in workers:
        assert said[name]["--worker-id"] == name and said[name]["--disaggregation-mode"] == name.split("-")[0]
        assert said[name]["--mem-fraction-static"] == str(0.5 / 3) and said[name]["--num-threads"] == "2"
    assert {name: each.get("--disaggregation-host") for name, each in said.items() if name in workers} == {
        "prefill-0": "127.0.0.1",
        "decode-0": None,
        "decode-1": None,
    }
    assert said["gateway"]["--workers"] == ",".join(f"127.0.0.1:{said[name]['--port']}" for name in workers)
    flags = ("--port", "--metrics-port", "--control-port", "--health-port")
    ports = [each[flag] for each in said.values() for flag in flags if flag in each]
    assert len(set(ports)) == len(ports), "all ports are different"


def test_worker_without_a_role_gets_no_role_flag() -> None:
    settings = LocalSettings(_cli_parse_args=False)  # type: ignore[call-arg]
    plan = parts(settings, "models/demo", list(range(9000, 9000 + num_ports(settings))))
    assert not [part for part in plan if "--disaggregation-mode" in part.command.argv]


@pytest.mark.parametrize("enabled", [True, False], ids=["default", "disabled"])
def test_every_gateway_serves_the_playground(enabled: bool) -> None:
    flags = [] if enabled else ["--no-playground"]
    settings = load(LocalSettings, "rootstock-local", ["--gateways", "2", *flags])
    plan = parts(settings, "models/demo", list(range(9000, 9000 + num_ports(settings))))
    assert ["--playground" in part.command.argv for part in plan if part.url] == [enabled] * 2


@pytest.mark.parametrize(
    ("flags", "url", "metrics"),
    [
        ("", "http://127.0.0.1:8000", "http://127.0.0.1:8000/metrics"),
        ("--host 0.0.0.0 --port 81", "http://127.0.0.1:81", "http://127.0.0.1:81/metrics"),
        ("--host ::1", "http://[::1]:8000", "http://[::1]:8000/metrics"),
        ("--host 10.0.0.1 --metrics-port 82", "http://10.0.0.1:8000", "http://127.0.0.1:82/metrics"),
        ("--tls-cert-file a --tls-key-file b --no-metrics-on-http", "https://127.0.0.1:8000", ""),
    ],
    ids=["default", "any address", "IPv6", "metrics port", "TLS"],
)
def test_gateway_urls_follow_the_gateways_own_flags(flags: str, url: str, metrics: str) -> None:
    settings = load(LocalSettings, "rootstock-local", ["--gateway-flags", flags])
    (gateway,) = [part for part in parts(settings, "models/demo", list(range(9000, 9000 + num_ports(settings)))) if part.url]
    assert (gateway.url, gateway.metrics_url) == (url, metrics)


@pytest.mark.parametrize("role", ["--prefill-workers", "--decode-workers"])
def test_settings_refuse_prefill_workers_without_decode_workers_and_the_reverse(
    role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load(LocalSettings, "rootstock-local", [role, "2"])
    assert "prefill_workers and decode_workers must be set together, both to at least 1" in capsys.readouterr().err
