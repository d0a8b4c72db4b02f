"""Model folders whose config and tensors disagree are loaded like transformers loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, ModernBertDecoderConfig

from tests.exec.driver import Driver, Sequence, greedy
from tests.exec.expert_folders import fuse_experts
from tests.exec.host_executors import build_host_executor
from tests.exec.tiny_models import MODELS, SHAPE, greedy_answers

PROMPT = [int(token) for token in torch.randint(6, 257, (150,), generator=torch.Generator().manual_seed(4))]
NUM_NEW = 24


def edit_config(folder: Path, removed: str = "", **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    config.pop(removed, None)
    (folder / "config.json").write_text(json.dumps(config))


def check(folder: Path) -> int:
    """Checks that outputs equal those of transformers for the folder. Returns the context length."""
    torch.set_num_threads(1)
    (expected,) = greedy_answers(AutoModelForCausalLM.from_pretrained(folder).eval(), [PROMPT], NUM_NEW)
    executor, info = build_host_executor(str(folder), "auto", 16, 4, 64, 0.5, None, 1, lambda _: None)
    try:
        driver, sequence = Driver(executor, 16), Sequence(PROMPT, 1, greedy())
        driver.prefill([sequence], 40)
        driver.decode([sequence], NUM_NEW)
    finally:
        executor.close()
    assert sequence.output == expected
    return info.context_len


def test_loading_uses_a_separate_head_although_the_config_has_tied_embeddings(tmp_path: Path) -> None:
    """A fine-tuned model may have separate tensors for embedding and head although its config ties them."""
    MODELS["llama-untied"].build(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=True)
    check(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    check(tmp_path)


def test_loading_reads_an_original_context_that_is_outside_the_rope_parameters(tmp_path: Path) -> None:
    MODELS["llama-untied"].build(tmp_path)
    scaling = {"rope_type": "yarn", "factor": 4.0}
    edit_config(tmp_path, "rope_parameters", rope_theta=50000.0, rope_scaling=scaling, original_max_position_embeddings=64)
    check(tmp_path)


def test_factor_of_yarn_is_the_ratio_of_the_contexts_when_the_config_has_none(tmp_path: Path) -> None:
    MODELS["llama-yarn-rope"].build(tmp_path)
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": None, "original_max_position_embeddings": 64}
    edit_config(tmp_path, rope_parameters=rope)
    check(tmp_path)


def test_loading_prefers_a_single_file_to_an_index(tmp_path: Path) -> None:
    MODELS["llama-untied"].build(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "other.safetensors"}}))
    check(tmp_path)


def test_loading_ignores_unneeded_index_entries_without_a_tensor(tmp_path: Path) -> None:
    MODELS["llama-sharded"].build(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = index["weight_map"]["model.norm.weight"]
    index["weight_map"] |= {"model.layers.0.self_attn.rotary_emb.inv_freq": file}
    path.write_text(json.dumps(index))
    check(tmp_path)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "qwen3.5-moe"])
def test_loading_reads_experts_that_are_stored_in_one_tensor(name: str, tmp_path: Path) -> None:
    MODELS[name].build(tmp_path)
    fuse_experts(tmp_path)
    check(tmp_path)


def test_transformers_computes_a_model_with_a_known_architecture_but_another_model_type(tmp_path: Path) -> None:
    """EXAONE's config names the architecture LlamaForCausalLM, but its tensors have other names than Llama's."""
    torch.manual_seed(1)
    config = AutoConfig.for_model("exaone", **{**SHAPE, "pad_token_id": 0, "bos_token_id": 0})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    check(tmp_path)


def test_loading_accepts_a_head_with_the_name_decoder(tmp_path: Path) -> None:
    """Ettin's decoders have a head with this name, and windows that differ between layers."""
    torch.manual_seed(1)
    special = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1}
    config = ModernBertDecoderConfig(**{**SHAPE, **special, "local_attention": 32, "global_attn_every_n_layers": 2})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    check(tmp_path)
