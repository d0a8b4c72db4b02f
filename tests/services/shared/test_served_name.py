"""A model goes by one name, whichever service is asked: front services serve only models that they have the name of."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.detokenizer.settings import DetokenizerSettings
from services.tokenizer.settings import TokenizerSettings
from services.worker.identity.model_identity import identify_model


@pytest.mark.parametrize(("given", "name"), [("", "current"), ("ours", "ours")])
def test_services_that_share_a_folder_agree_on_its_name(tmp_path: Path, given: str, name: str) -> None:
    """Through a link too, which may lead somewhere else tomorrow."""
    (tmp_path / "release-7").mkdir()
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / "release-7" / file).write_text("{}")
    folder = tmp_path / "current"
    folder.symlink_to(tmp_path / "release-7")
    front = [make(model=folder, served_model_name=given) for make in (TokenizerSettings, DetokenizerSettings)]
    assert {settings.model_name for settings in front} == {identify_model(folder, given, "").model} == {name}
