"""By day half of the cases of one kind of damage, or of one place at which a disk fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.night import wait_for_night

HERE = Path(__file__).parent
SLOW = ("test_disk_faults.py", "test_store_damage.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wait_for_night(config, items, lambda item: item.path.parent == HERE and item.path.name in SLOW)
