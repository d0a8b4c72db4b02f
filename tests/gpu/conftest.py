"""Skips all tests that need a GPU if torch finds none."""

from __future__ import annotations

import pytest
import torch

FOLDER = "tests/gpu/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.nodeid.startswith(FOLDER):
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda:0"
