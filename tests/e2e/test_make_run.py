"""What a newcomer types first."""

from __future__ import annotations

import os
import signal
import uuid

import pytest

from services.local.ports import free_ports
from tests.e2e.system import make_run, processes_with
from tests.services.redis_server import EITHER_SERVER


def read_until(process: object, text: str) -> str:
    seen = ""
    for line in process.stdout:  # type: ignore[attr-defined]
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} was never printed:\n{seen}")


@pytest.mark.parametrize("redis", EITHER_SERVER)
def test_make_run_answers_and_ctrl_c_leaves_nothing(redis: str) -> None:
    (port,) = free_ports(1)
    marker = uuid.uuid4().hex
    env = {"ROOTSTOCK_TEST_MARKER": marker, "ROOTSTOCK_LOCAL_NUM_THREADS": "1", "ROOTSTOCK_LOCAL_REDIS_SERVER": redis}
    process = make_run(env, f"PORT={port}")
    try:
        text = read_until(process, "Ctrl-C")
        assert "What is 17 + 25?\n  17 + 25 = 42." in text
        for service in ("redis", "tokenizer", "detokenizer", "worker-0", "gateway"):
            assert f"  {service} " in text, "a progress line each"
        assert f"http://127.0.0.1:{port}/docs" in text
        assert f"  playground   http://127.0.0.1:{port}/\n" in text
        assert "curl " in text
        second = make_run(env, f"PORT={port}")
        assert f"port {port} is taken" in second.communicate(timeout=60)[0]
        assert second.returncode != 0
    finally:
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does at Ctrl-C
        process.communicate(timeout=60)
    assert not processes_with(f"ROOTSTOCK_TEST_MARKER={marker}")
