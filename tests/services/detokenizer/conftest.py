from __future__ import annotations

import pytest

from rootstock_llm.services.shared.hf_tokenizer import HfTokenizer, load_tokenizer
from tests.services.tokenizer.model_folders import KINDS


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HfTokenizer]:
    """Returns the loaded tokenizers by kind."""
    root = tmp_path_factory.mktemp("models")
    return {kind: load_tokenizer(make(root / kind)) for kind, make in KINDS.items()}
