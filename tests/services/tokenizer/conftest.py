from __future__ import annotations

from pathlib import Path

import pytest

from tests.services.tokenizer.model_folders import KINDS


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns the model folders by kind."""
    root = tmp_path_factory.mktemp("models")
    return {kind: make(root / kind) for kind, make in KINDS.items()}
