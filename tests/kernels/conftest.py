"""Where there is no GPU, Triton's interpreter runs the kernels: it has to be chosen before triton is imported. By day it is given
half of the cases that differ in their parameters alone, the same ones every time; all of them by night, and on a GPU."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from zlib import crc32

import pytest
import torch

from tests.night import NIGHTLY

HERE = Path(__file__).parent
FEW = 4  # cases of a test that all run by day

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if NIGHTLY or torch.cuda.is_available():
        return
    by_night = _by_night([item for item in items if HERE in item.path.parents and "triton" in item.nodeid])
    config.hook.pytest_deselected(items=[item for item in items if item in by_night])
    items[:] = [item for item in items if item not in by_night]


def _by_night(items: list[pytest.Item]) -> set[pytest.Item]:
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    return {each for cases in tests.values() if len(cases) > FEW for each in cases if crc32(each.nodeid.encode()) % 2}
