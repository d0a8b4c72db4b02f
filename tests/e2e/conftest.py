from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.plain_answers import PlainAnswers, folder_of_the_run
from tests.e2e.system import System


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A running system shared by all tests that leave its state unchanged."""
    with System(tmp_path_factory.mktemp("system")) as running:
        yield running


@pytest.fixture(scope="session")
def exact_system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A shared system in float32, for tests whose output must not depend on the other requests of a step."""
    with System(tmp_path_factory.mktemp("exact"), dtype="float32") as running:
        yield running


@pytest.fixture(scope="session")
def plain_answers(tmp_path_factory: pytest.TempPathFactory) -> PlainAnswers:
    return PlainAnswers(folder_of_the_run(tmp_path_factory))
