"""The options with which the engine builds a GPU's executor if the settings do not fix the numbers of rows and chunk tokens."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rootstock_llm.services.worker import engine
from rootstock_llm.services.worker.exec import build
from rootstock_llm.services.worker.loop.inbox import Inbox
from rootstock_llm.services.worker.settings import WorkerSettings

H200_BYTES = 143_771 << 20


class Asked(Exception):
    """Raised instead of building the executor."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments with which the engine calls build_device_executor. The machine appears to have an H200."""
    found: dict[str, Any] = {}

    def note(**arguments: Any) -> None:
        found.update(arguments)
        raise Asked

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=H200_BYTES))
    monkeypatch.setattr(build, "build_device_executor", note)
    return found


def build_engine(**given: Any) -> None:
    with pytest.raises(Asked):
        engine.build_engine(WorkerSettings(**given), Inbox(), lambda sentence: None)


def test_engine_reserves_memory_for_the_activations_of_one_chunk(asked: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        build_engine()
    assert (asked["max_slots"], asked["options"].max_tokens) == (256, 8192)
    assert "up to 256 requests run at once; long prompts are computed in pieces of 8192 tokens" in caplog.text
    build_engine(chunked_prefill_size=0)
    assert asked["options"].max_tokens == 16384, "without chunks, steps must have memory for max_prefill_tokens tokens"
    build_engine(executor="cuda", chunked_prefill_size=2048, max_running_requests=5000 - 1000)
    assert (asked["max_slots"], asked["options"].max_tokens) == (4000, 4016)


def test_step_of_an_encoder_may_have_more_tokens_than_a_chunk(asked: dict[str, Any]) -> None:
    build_engine()
    loaded = SimpleNamespace(is_encoder=True, context_len=512)
    assert build._step_tokens(asked["options"], loaded) == 16384  # type: ignore[arg-type]
    assert build._step_tokens(asked["options"], SimpleNamespace(is_encoder=False)) == 8192  # type: ignore[arg-type]
