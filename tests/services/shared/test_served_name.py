"""Tests that all services derive the same served name from a model folder, because gateways match replicas by this name."""

from __future__ import annotations

from pathlib import Path

import pytest

from rootstock_llm.services.detokenizer.settings import DetokenizerSettings
from rootstock_llm.services.tokenizer.settings import TokenizerSettings
from rootstock_llm.services.worker.identity.model_identity import identify_model


@pytest.mark.parametrize(("setting", "name"), [("", "current"), ("ours", "ours")])
def test_services_with_the_same_model_folder_serve_the_same_name(tmp_path: Path, setting: str, name: str) -> None:
    """For a symbolic link, the name of the link is used, because the link's target may change."""
    (tmp_path / "release-7").mkdir()
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / "release-7" / file).write_text("{}")
    folder = tmp_path / "current"
    folder.symlink_to(tmp_path / "release-7")
    front = [make(model=folder, served_model_name=setting) for make in (TokenizerSettings, DetokenizerSettings)]
    assert {settings.model_name for settings in front} == {identify_model(folder, setting, "").model} == {name}
