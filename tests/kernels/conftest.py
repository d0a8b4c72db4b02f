"""Where there is no GPU, Triton's interpreter runs the kernels: it has to be chosen before triton is imported. By day it and the
C++ kernels are given half of the cases that differ in their parameters alone, the same ones every time; all of them by night, and
on a GPU. By day tests/exec holds the C++ kernels as well: every executor there that says nothing else computes with them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.night import wait_for_night

HERE = Path(__file__).parent
SLOW = ("triton", "test_top_n_sigma", "test_cpu_kernels", "test_sampling_twin")
ALL = ("::test_paged_attention", "::test_draw")  # whose cases have each a body or a rule to themselves

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        wait_for_night(config, items, _slow)


def _slow(item: pytest.Item) -> bool:
    named = any(name in item.nodeid for name in SLOW) and not any(name in item.nodeid for name in ALL)
    return HERE in item.path.parents and named
