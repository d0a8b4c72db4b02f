"""Tests of `make run` with --chat-template."""

from __future__ import annotations

from pathlib import Path

import pytest

from rootstock_llm.services.local.plan import num_ports, parts
from rootstock_llm.services.local.settings import LocalSettings
from rootstock_llm.services.shared.hf_tokenizer import TokenizerFolderError, has_chat_template, load_tokenizer
from rootstock_llm.services.shared.settings import of_values
from tests.services.tokenizer.model_folders import CHATML, byte_level


def test_chat_template_flag_is_passed_to_tokenizers_and_workers(tmp_path: Path) -> None:
    settings = of_values(LocalSettings, {"model": str(tmp_path), "chat_template": "own.jinja", "workers": 2, "tokenizers": 2})
    started = parts(settings, str(tmp_path), list(range(1, num_ports(settings) + 1)))
    given = {part.command.name for part in started if "--chat-template own.jinja" in " ".join(part.command.argv)}
    assert given == {"tokenizer-0", "tokenizer-1", "worker-0", "worker-1"}


def test_template_file_replaces_all_chat_templates_of_the_model(tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0].content }}é", encoding="utf-8")
    for name, template in (("with", CHATML), ("without", None)):
        folder = byte_level(tmp_path / name, template)
        assert has_chat_template(folder) == (template is not None)
        assert load_tokenizer(folder, str(own)).chat_templates == {"default": "{{ messages[0].content }}é"}


@pytest.mark.parametrize(("content", "fault"), [(None, "is not readable: No such file"), (b"\xff", "is not UTF-8 text")])
def test_error_names_an_unreadable_template_file(tmp_path: Path, content: bytes | None, fault: str) -> None:
    folder, own = byte_level(tmp_path / "model"), tmp_path / "own.jinja"
    if content is not None:
        own.write_bytes(content)
    with pytest.raises(TokenizerFolderError, match=f"^--chat-template {own} {fault}"):
        load_tokenizer(folder, str(own))
