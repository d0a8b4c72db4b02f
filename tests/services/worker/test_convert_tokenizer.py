"""Tests that a folder without tokenizer.json gets one with the ids of transformers, and that errors name the command for this."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from sentencepiece import SentencePieceProcessor

from rootstock_llm.services.shared.hf_tokenizer import TokenizerFolderError, load_tokenizer
from rootstock_llm.services.worker.text import convert_tokenizer, tokenizer_folder
from rootstock_llm.services.worker.text.convert_tokenizer import LIBRARIES, NotConverted, convert
from rootstock_llm.services.worker.text.tokenizer_folder import with_tokenizer
from tests.services.tokenizer.model_folders import byte_level, sentencepiece_model, tiktoken_ranks

TEXTS = ["", "Hello, world! 你好", "<|im_start|>user\n  two  spaces<|im_end|>"]


def unconverted(folder: Path, **config: Any) -> Path:
    """Makes a folder with vocab.json, merges.txt and the model's other files."""
    complete = byte_level(folder.with_name(f"{folder.name}-whole"))
    described = json.loads((complete / "tokenizer.json").read_text())
    folder.mkdir()
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in described["model"]["merges"]]
    (folder / "vocab.json").write_text(json.dumps(described["model"]["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    added = {
        str(token["id"]): {name: value for name, value in token.items() if name != "id"} for token in described["added_tokens"]
    }
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, **config}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "GPT2Tokenizer", ""])
def test_converted_tokenizer_has_the_ids_of_transformers(tmp_path: Path, name: str) -> None:
    folder = unconverted(tmp_path / "model", **({"tokenizer_class": name, "eos_token": "<|im_end|>"} if name else {}))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    convert(folder, folder)
    ours = load_tokenizer(folder)
    assert ours.encode_batch(TEXTS, True) == [theirs(text).input_ids for text in TEXTS]
    assert ours.special_tokens.get("eos_token") == theirs.eos_token


def test_converted_tokenizer_has_the_ids_of_sentencepiece_when_the_folder_has_only_tokenizer_model(tmp_path: Path) -> None:
    folder = sentencepiece_model(tmp_path / "tokenizer.model")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    convert(folder, folder)
    theirs = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    assert load_tokenizer(folder).encode_batch(TEXTS, False) == [theirs.encode(text) for text in TEXTS]


@pytest.mark.parametrize(("name", "model_type"), [("tokenizer.model", "llama"), ("qwen.tiktoken", "qwen2")])
def test_tiktoken_file_can_be_converted(tmp_path: Path, name: str, model_type: str) -> None:
    folder = tiktoken_ranks(tmp_path / name)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    convert(folder, folder)
    assert load_tokenizer(folder).encode_batch(["hello"], False)


@pytest.mark.parametrize(
    ("libraries", "remedy"),
    [(LIBRARIES, "Correct the files"), (("missing_one", "missing_two"), "Install missing_one and missing_two with pip")],
    ids=["present", "absent"],
)
def test_error_of_a_failed_conversion_names_missing_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libraries: tuple[str, ...], remedy: str
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"no tokenizer")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    monkeypatch.setattr(convert_tokenizer, "LIBRARIES", libraries)
    with pytest.raises(NotConverted, match=rf"\. {remedy} and run `python"):
        convert(tmp_path, tmp_path)


def test_folder_without_tokenizer_json_is_completed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = unconverted(tmp_path / "model", tokenizer_class="Qwen2Tokenizer")
    before = {path.name for path in folder.iterdir()}
    complete = with_tokenizer(folder, tmp_path / "built")
    assert {path.name for path in complete.iterdir()} == before | {"tokenizer.json"}
    assert (complete / "model.safetensors").resolve() == folder / "model.safetensors"
    assert {path.name for path in folder.iterdir()} == before and load_tokenizer(complete).vocab_size
    monkeypatch.setattr(tokenizer_folder, "CONVERTER", "is.not.run.again")
    assert with_tokenizer(folder, tmp_path / "built") == complete
    assert with_tokenizer(complete, tmp_path / "built") == complete, "a folder with tokenizer.json is used as it is"
    assert len(list((tmp_path / "built").iterdir())) == 1, "only the converted folder is left"


def test_error_has_the_reason_when_transformers_cannot_convert_the_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(b"no tokenizer")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    command = rf"`python -m rootstock_llm\.services\.worker\.text\.convert_tokenizer {folder}`"
    with pytest.raises(
        NotConverted, match=f"^transformers cannot convert the tokenizer of {folder} \\(tokenizer.model\\): .*{command}"
    ):
        convert(folder, folder)
    with pytest.raises(ValueError, match=f"^transformers cannot convert the tokenizer of {folder} .*{command}"):
        with_tokenizer(folder, tmp_path / "built")
    assert not list((tmp_path / "built").iterdir())


def test_error_for_a_missing_tokenizer_json_has_the_command_for_a_conversion(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(TokenizerFolderError, match=r"has no tokenizer\.json\. Copy "):
        load_tokenizer(folder)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_text("{}")
    command = rf"`python -m rootstock_llm\.services\.worker\.text\.convert_tokenizer {folder}`\.$"
    with pytest.raises(TokenizerFolderError, match=rf"has merges\.txt, vocab\.json but no tokenizer\.json\. .*{command}"):
        load_tokenizer(folder)
