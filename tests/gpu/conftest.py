"""Tests that need a GPU: skipped, one and all, where torch sees none. By day one in eight of a test's cases is, by night all."""

from __future__ import annotations

import pytest
import torch

from tests.night import wait_for_night

FOLDER = "tests/gpu/"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    wait_for_night(config, items, lambda item: item.nodeid.startswith(FOLDER), one_in=8, few=1)
    for item in items:
        if item.nodeid.startswith(FOLDER):
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda:0"
