"""Whether it is night: `make nightly` runs what takes too long for `make test`."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from zlib import crc32

import pytest

NIGHTLY = bool(os.environ.get("ROOTSTOCK_TEST_NIGHTLY"))
FEW = 2  # cases of a test that all run by day


def wait_for_night(
    config: pytest.Config, items: list[pytest.Item], slow: Callable[[pytest.Item], bool], one_in: int = 2, few: int = FEW
) -> None:
    """Of the cases of slow tests that differ in their parameters alone, one in so many or fewer stay by day: the same ones every
    time, and never none of a test's. few: cases of a test that all stay."""
    if NIGHTLY:
        return
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in filter(slow, items):
        tests[item.nodeid.partition("[")[0]].append(item)
    by_night = {item for cases in tests.values() if len(cases) > few for item in _of_the_night(cases, one_in)}
    config.hook.pytest_deselected(items=[item for item in items if item in by_night])
    items[:] = [item for item in items if item not in by_night]


def _of_the_night(cases: Sequence[pytest.Item], one_in: int) -> Sequence[pytest.Item]:
    """All but those whose checksum is a multiple, of which one in so many cases at most stay, and one at least."""
    checksums = {case: crc32(case.nodeid.encode()) for case in cases}
    ordered = sorted(cases, key=lambda case: (checksums[case] % one_in > 0, checksums[case]))
    multiples = sum(checksum % one_in == 0 for checksum in checksums.values())
    return ordered[max(1, min(multiples, -(-len(cases) // one_in))) :]
