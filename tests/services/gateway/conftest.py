from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services.gateway.system import System


@pytest.fixture(scope="module")
def shared() -> Iterator[System]:
    """Yields one system for all tests of a module. The tests must not change its state."""
    with System() as system:
        yield system


@pytest.fixture
def system() -> Iterator[System]:
    """Yields a system that the test may break."""
    with System() as fresh:
        yield fresh
