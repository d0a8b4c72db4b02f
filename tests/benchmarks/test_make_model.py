"""The random checkpoint loads like a published one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.benchmarks.make_model import SHAPES, Shape, config_of, make_tokenizer, random_model, write_model

TINY = SHAPES["tiny"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_model(folder, TINY, seed=1)
    return folder


def test_checkpoint_loads_in_bf16_and_generates(checkpoint: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.config.rope_parameters["rope_theta"] == 1e6
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.embed_tokens.weight.float().std().item() == pytest.approx(0.02, rel=0.02)
    out = model.generate(torch.tensor([[5, 6, 7]]), min_new_tokens=4, max_new_tokens=4, do_sample=False)
    assert out.shape == (1, 7)


def test_checkpoint_stores_a_tied_head_once(checkpoint: Path) -> None:
    with safetensors.safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_random_model_has_equal_weights_for_equal_seeds() -> None:
    first, again, other = (random_model(TINY, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_tokenizer_decodes_all_text_ids_and_round_trips(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = "Grüße, 世界! some words\n\tand 12 numbers 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert all(tokenizer.decode([i]) for i in range(TINY.text_tokens))
    assert GenerationConfig.from_pretrained(checkpoint).eos_token_id == [tokenizer.eos_token_id, tokenizer.pad_token_id]


def test_tokenizer_has_a_chatml_template(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(text).count(TINY.text_tokens + 1) == 2


def test_tokenizer_has_the_special_ids_of_qwen3() -> None:
    tokenizer = make_tokenizer(SHAPES["qwen3-0.6b"])
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [151_643, 151_644, 151_645]


def test_new_model_replaces_an_old_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "stale").touch()
    write_model(folder, TINY)
    assert not (folder / "stale").exists() and (folder / "config.json").is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(("name", "parameters"), [("qwen3-0.6b", 596_049_920), ("qwen3-8b", 8_190_735_360)])
def test_shape_has_the_published_number_of_parameters(name: str, parameters: int) -> None:
    s: Shape = SHAPES[name]
    attention = s.hidden * s.head_dim * (2 * s.heads + 2 * s.kv_heads) + 2 * s.head_dim
    layer = attention + 3 * s.hidden * s.intermediate + 2 * s.hidden
    assert s.vocab * s.hidden * (1 if s.tied else 2) + s.layers * layer + s.hidden == parameters


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("smollm2-360m", 361_821_120), ("qwen2.5-0.5b", 494_032_768), ("moe-1b", 1_014_657_024), ("gpt-oss-1b", 997_592_832)],
)
def test_shape_of_a_model_has_the_stated_number_of_parameters(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config_of(SHAPES[name]))
    assert model.num_parameters() == parameters
