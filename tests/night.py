"""Whether it is night: `make nightly` runs what takes too long for `make test`."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from zlib import crc32

import pytest

NIGHTLY = bool(os.environ.get("ROOTSTOCK_TEST_NIGHTLY"))
FEW = 4  # cases of a test that all run by day


def wait_for_night(config: pytest.Config, items: list[pytest.Item], slow: Callable[[pytest.Item], bool]) -> None:
    """Half of the cases of slow tests that differ in their parameters alone, the same ones every time, are taken out by day."""
    if NIGHTLY:
        return
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in filter(slow, items):
        tests[item.nodeid.partition("[")[0]].append(item)
    many = [item for cases in tests.values() if len(cases) > FEW for item in cases]
    by_night = {item for item in many if crc32(item.nodeid.encode()) % 2}
    config.hook.pytest_deselected(items=[item for item in items if item in by_night])
    items[:] = [item for item in items if item not in by_night]
