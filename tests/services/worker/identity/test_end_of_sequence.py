"""Tests that the end-of-sequence tokens of a model folder are all tokens that one of its files names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from rootstock_llm.services.shared.hf_tokenizer import load_tokenizer
from rootstock_llm.services.worker.identity.end_of_sequence import end_of_sequence

TOKENS = ["a", "b", "<end>", "<stop>", "<turn>", "<eot>"]
END, STOP, TURN, EOT = range(2, 6)


def ends(folder: Path, of_config: tuple[int, ...] = (), **files: dict[str, Any]) -> tuple[int, ...]:
    """Returns the end-of-sequence ids of a folder with these files and a tokenizer of TOKENS.

    Args:
        of_config: end-of-sequence ids of the loaded config object.
    """
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(TOKENS)}, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in TOKENS[2:]])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return end_of_sequence(folder, of_config, load_tokenizer(folder), len(TOKENS))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config": {"eos_token_id": STOP}, "tokenizer_config": {"eos_token": "<end>"}}, {STOP, END}),
        ({"config": {"eos_token_id": [STOP, TURN]}, "generation_config": {"eos_token_id": EOT}}, {STOP, TURN, EOT}),
        ({"config": {"text_config": {"eos_token_id": STOP}}}, {STOP}),
        ({"config": {"eos_token_id": None, "text_config": {"eos_token_id": [STOP, END]}}}, {STOP, END}),
        ({"generation_config": {"eos_token_id": [STOP, STOP]}, "config": {}}, {STOP}),
        ({"special_tokens_map": {"eos_token": {"content": "<eot>", "lstrip": False}}}, {EOT}),
        (
            {
                "tokenizer_config": {"eos_token": "<end>", "added_tokens_decoder": {"2": {"content": "<end>", "special": True}}},
                "special_tokens_map": {"eos_token": "<turn>"},
            },
            {END, TURN},
        ),
        ({"tokenizer_config": {"eos_token": None}, "config": {"eos_token_id": -1}}, set()),
        ({"config": {"eos_token_id": [STOP, 10_000]}}, {STOP}),
        ({}, set()),
    ],
    ids=[
        "tokenizer_config",
        "lists",
        "text_config",
        "null above text_config",
        "twice",
        "special_tokens_map",
        "two tokenizer files",
        "none",
        "outside the vocabulary",
        "no file",
    ],
)
def test_end_of_sequence_tokens_are_the_union_of_all_files(tmp_path: Path, files: dict[str, Any], expected: set[int]) -> None:
    found = ends(tmp_path, **files)
    assert set(found) == expected and len(found) == len(expected)


def test_end_of_sequence_tokens_include_the_default_of_the_config_class(tmp_path: Path) -> None:
    assert ends(tmp_path, (END,), config={}, tokenizer_config={"eos_token": "<stop>"}) == (END, STOP)


@pytest.mark.parametrize("value", ["<end>", [STOP, "<end>"], 2.5, True, {"a": 1}], ids=str)
def test_error_names_file_and_value_when_an_end_of_sequence_is_no_token_id(tmp_path: Path, value: object) -> None:
    with pytest.raises(ValueError, match=r"generation_config\.json: 'eos_token_id' is .*; it must be a token id or a list"):
        ends(tmp_path, generation_config={"eos_token_id": value})
