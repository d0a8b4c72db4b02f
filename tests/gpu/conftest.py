"""Tests that need a GPU: skipped, one and all, where torch sees none. By day one in eight of a test's cases is, by night all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.night import wait_for_night

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    wait_for_night(config, items, lambda item: HERE in item.path.parents, one_in=8, few=1)
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda:0"
