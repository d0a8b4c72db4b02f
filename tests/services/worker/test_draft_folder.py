"""Tests of the default folder of a draft model."""

from __future__ import annotations

from pathlib import Path

import pytest

from rootstock_llm.services.worker.draft_folder import draft_folder
from rootstock_llm.services.worker.settings import WorkerSettings


def test_draft_model_folder_is_the_configured_path_or_a_sibling_of_the_model_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(algorithm: str, model: str = str(tmp_path / "demo"), path: str = "") -> str:
        return draft_folder(WorkerSettings(model=model, speculative_algorithm=algorithm, speculative_draft_model_path=path))

    (tmp_path / "demo").mkdir()
    (tmp_path / "demo-draft").touch()
    default_folder = tmp_path / "demo-eagle3"
    assert found("eagle3") == found("draft") == found("mtp") == ""
    default_folder.mkdir()
    assert found("eagle3") == found("eagle3", f"{tmp_path}/demo/") == str(default_folder)
    assert found("eagle3", path="elsewhere") == found("none", path="elsewhere") == "elsewhere", "any path is accepted"
    assert found("ngram") == found("none") == found("draft") == "", "without a draft model, or with a file instead of a folder"
    monkeypatch.chdir(tmp_path / "demo")
    assert found("eagle3", ".") == str(default_folder)
