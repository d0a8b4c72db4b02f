"""Tests reloading in development images: a service restarts after a change of a source file, even if it had failed before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

DEV = Path(__file__).resolve().parents[2] / "docker/dev"
FIRST = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("first", flush=True)
time.sleep(60)
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "rootstock_llm/one").mkdir(parents=True)
    (tmp_path / "rootstock_llm/one/__main__.py").write_text(FIRST)
    return tmp_path


@pytest.fixture
def reloader(app: Path) -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(DEV / "reload.py"), "-m", "rootstock_llm.one"]
    process = subprocess.Popen(command, cwd=app, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    yield process
    process.send_signal(signal.SIGTERM)
    process.wait(60)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_reloader_restarts_the_service_after_a_change_and_waits_after_a_failure(
    app: Path, reloader: subprocess.Popen[str]
) -> None:
    source = app / "rootstock_llm/one/__main__.py"
    assert line(reloader) == "first"
    source.write_text("print('second', flush=True); raise SystemExit(3)")
    assert line(reloader) == "second"
    time.sleep(1.2)  # longer than a poll interval, so that the loop has seen the end of the service
    assert reloader.poll() is None
    source.write_text(FIRST.replace("first", "third"))
    assert line(reloader) == "third"


def test_reloader_forwards_signals_and_returns_the_exit_status_of_the_service(reloader: subprocess.Popen[str]) -> None:
    assert line(reloader) == "first"
    reloader.send_signal(signal.SIGTERM)
    assert reloader.wait(60) == 7


def test_reloader_ends_when_the_first_start_fails(app: Path) -> None:
    (app / "rootstock_llm/one/__main__.py").write_text("raise SystemExit(5)")
    command = [sys.executable, str(DEV / "reload.py"), "-m", "rootstock_llm.one"]
    assert subprocess.run(command, cwd=app, timeout=60, check=False).returncode == 5


@pytest.mark.parametrize(
    ("arguments", "reloads"),
    [
        (["-m", "rootstock_llm.services.gateway"], True),
        (["-m", "rootstock_llm.services.shared.rpc.probe", "x"], False),
        (["-c", "pass"], False),
        (["-m", "compileall"], False),
    ],
)
def test_development_image_reloads_only_services(arguments: list[str], reloads: bool, tmp_path: Path) -> None:
    """Runs the script with a program that prints its arguments instead of the interpreter."""
    (tmp_path / "interpreter").write_text('#!/bin/sh\necho "$@"\n')
    script = tmp_path / "python"
    script.write_text((DEV / "python").read_text().replace("/opt/venv/bin/python", str(tmp_path / "interpreter")))
    for file in (script, tmp_path / "interpreter"):
        file.chmod(0o755)
    ran = subprocess.run([script, *arguments], capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert ran == (["/opt/dev/reload.py"] if reloads else []) + arguments
