"""Tests that need a GPU: skipped, one and all, where torch sees none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda:0"
