from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services.gateway.system import System


@pytest.fixture(scope="module")
def shared() -> Iterator[System]:
    """One system for a module's tests that leave it as they found it."""
    with System() as system:
        yield system


@pytest.fixture
def system() -> Iterator[System]:
    """A system that one test may break."""
    with System() as fresh:
        yield fresh
