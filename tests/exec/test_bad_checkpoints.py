"""Loading an invalid model folder raises a ValueError with the reason."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rootstock_llm.services.worker.exec.weights.checkpoint import CheckpointError
from tests.exec.host_executors import build_host_executor
from tests.exec.tiny_models import MODELS
from tests.exec.transformers_families import SERVED

CASES: dict[str, dict[str, Any]] = {
    "vocabulary is text": {"vocab_size": "x"},
    "vocabulary below zero": {"vocab_size": -3},
    "no hidden size": {"hidden_size": None},
    "no layers": {"num_hidden_layers": 0},
    "no positions": {"max_position_embeddings": 0},
    "heads are no multiple of KV heads": {"num_attention_heads": 5, "num_key_value_heads": 2},
    "another architecture": {"architectures": ["GPT2LMHeadModel"]},
    "quantized": {"quantization_config": {"quant_method": "awq"}},
    "shape differs from the weights": {"intermediate_size": 100},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    MODELS["qwen3"].build(path)
    return path


def build(folder: Path) -> None:
    executor, _ = build_host_executor(str(folder), "auto", 4, 2, 8, 0.5, None, 1, lambda _: None)
    executor.close()


@pytest.mark.by_day(one_in=2, seed=35)
@pytest.mark.parametrize("name", CASES)
def test_loading_refuses_a_checkpoint_with_a_wrong_config(folder: Path, tmp_path: Path, name: str) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text()) | CASES[name]
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"\w"):
        build(tmp_path)


def test_loading_refuses_quantized_tensors_that_the_config_does_not_mention(tmp_path: Path) -> None:
    """Some quantization tools write the method to a separate file. Tests our models and those of transformers."""
    for family, dtype in itertools.product(("qwen3", "gemma"), (torch.float8_e4m3fn, torch.int8)):
        path = tmp_path / f"{family}-{dtype}"
        {**MODELS, **SERVED}[family].build(path)
        file = path / "model.safetensors"
        tensors = load_file(file)
        (name,) = [each for each in tensors if each.endswith("layers.1.mlp.up_proj.weight")]
        save_file({**tensors, name: tensors[name].to(dtype), f"{name}_scale": torch.ones(1)}, file, {"format": "pt"})
        with pytest.raises(CheckpointError, match="quantized"):
            build(path)
    (path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="ModelOpt"):
        build(path)


def test_loading_refuses_a_config_that_is_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(CheckpointError, match="cannot read"):
        build(tmp_path)


def test_loading_names_the_dtype_of_a_tensor_in_float64(tmp_path: Path) -> None:
    """Tensors that the model does not need may have this dtype."""
    MODELS["qwen3"].build(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file) | {"model.rotary_emb.inv_freq": torch.ones(16, dtype=torch.float64)}
    save_file(tensors, file, {"format": "pt"})
    build(tmp_path)
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"].double()}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* has dtype float64; supported: F32, BF16, F16"):
        build(tmp_path)


@pytest.mark.parametrize("weight_map", [[1], {"a": 3}, {"a": "../x.safetensors"}, {}, "x"], ids=str)
def test_loading_refuses_a_checkpoint_with_a_wrong_index(folder: Path, tmp_path: Path, weight_map: Any) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"\w"):
        build(tmp_path)


def test_loading_accepts_the_unchanged_checkpoint_folder(folder: Path) -> None:
    assert build(folder) is None


HALF_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
HYBRID_CASES: dict[str, tuple[dict[str, Any], str]] = {
    "only recurrent layers": ({"layer_types": ["linear_attention"] * 4}, "all layers are recurrent"),
    "nine taps": ({"linear_conv_kernel_dim": 9}, "has 9 taps; at most 8"),
    "no rotation": ({"rope_parameters": HALF_ROTATED | {"partial_rotary_factor": 0.0}}, "its rotated part 0"),
    "more rotation than the head": ({"rope_parameters": HALF_ROTATED | {"partial_rotary_factor": 1.5}}, "its rotated part 48"),
    "windows without a size": (
        {"layer_types": ["linear_attention", "sliding_attention"] * 2},
        "need sliding_window, which is not",
    ),
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    MODELS["qwen3.5"].build(path)
    return path


@pytest.mark.parametrize("name", HYBRID_CASES)
def test_loading_refuses_unsupported_configs_of_models_with_recurrent_layers(hybrid: Path, tmp_path: Path, name: str) -> None:
    values, message = HYBRID_CASES[name]
    (tmp_path / "model.safetensors").symlink_to(hybrid / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((hybrid / "config.json").read_text()) | values))
    with pytest.raises(ValueError, match=message):
        build(tmp_path)
