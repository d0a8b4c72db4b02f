"""Tests that `make run` starts the bundled Redis unless a setting names another program."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rootstock_llm.services.local.plan import num_ports, parts
from rootstock_llm.services.local.settings import LocalSettings


def planned_program(**settings: str) -> str:
    """Returns the program of the Redis in the plan."""
    local = LocalSettings(_cli_parse_args=False, **settings)  # type: ignore[call-arg]
    (part,) = [each for each in parts(local, "models/demo", list(range(num_ports(local)))) if each.command.name == "redis"]
    return part.command.argv[0]


@pytest.fixture
def redis_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Puts a program named redis-server first on PATH and returns the path of the program."""
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("ROOTSTOCK_LOCAL_REDIS_SERVER", raising=False)
    return str(program)


def test_launcher_runs_the_bundled_redis_by_default(redis_on_path: str) -> None:
    said = subprocess.run([planned_program(), "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.startswith("Valkey server v=9.")


def test_launcher_runs_the_redis_program_in_the_setting(redis_on_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned_program(redis_server="redis-server") == planned_program(redis_server=redis_on_path) == redis_on_path
    monkeypatch.setenv("ROOTSTOCK_LOCAL_REDIS_SERVER", redis_on_path)
    assert planned_program() == redis_on_path


def test_launcher_refuses_a_redis_program_that_does_not_exist(redis_on_path: str) -> None:
    with pytest.raises(ValueError, match="redis_server: no-such-server is not a program on this machine"):
        planned_program(redis_server="no-such-server")
