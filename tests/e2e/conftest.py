from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.plain_answers import PlainAnswers, folder_of_the_run
from tests.e2e.system import System


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One system for the tests that leave it as they found it."""
    with System(tmp_path_factory.mktemp("system")) as running:
        yield running


@pytest.fixture(scope="session")
def exact_system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """float32, for those of them to whom an answer may not depend on who is computed beside it."""
    with System(tmp_path_factory.mktemp("exact"), dtype="float32") as running:
        yield running


@pytest.fixture(scope="session")
def plain_answers(tmp_path_factory: pytest.TempPathFactory) -> PlainAnswers:
    return PlainAnswers(folder_of_the_run(tmp_path_factory))
