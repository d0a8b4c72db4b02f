"""A download refuses an unsupported model by its config.json, with the worker's error message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from rootstock_llm.services.local import models_reference
from rootstock_llm.services.shared.served_config import TABLE, refusal
from rootstock_llm.services.worker.exec.loading import load_model
from rootstock_llm.services.worker.exec.models.registry import ARCHITECTURES, FAMILIES, WRAPPER
from rootstock_llm.services.worker.exec.weights.checkpoint import CheckpointError, UnsupportedModel
from tests.exec.host_executors import load_request
from tests.exec.tiny_models import MODELS
from tests.night import NIGHTLY

FP8 = {"quant_method": "fp8", "weight_block_size": [64, 64]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemv"}
GPTQ = {"quant_method": "gptq", "bits": 3, "group_size": 128}
SERVED_AWQ = AWQ | {"version": "gemm"}


def of(model_type: str, architecture: str, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture], **more}


REFUSED: dict[str, dict[str, Any]] = {
    "FP8": of("qwen3", "Qwen3ForCausalLM", quantization_config=FP8),
    "AWQ": of("qwen2", "Qwen2ForCausalLM", quantization_config=AWQ),
    "GPTQ": of("llama", "LlamaForCausalLM", quantization_config=GPTQ),
    "compressed tensors": of("llama", "LlamaForCausalLM", compression_config={"quant_method": "compressed-tensors"}),
    "weights of 4 bits in another architecture": of("gpt2", "GPT2LMHeadModel", quantization_config=SERVED_AWQ),
    "weights of 4 bits in a longer name": of("qwen2_moe", "Qwen2MoeForCausalLM", quantization_config=GPTQ | {"bits": 4}),
    "unknown type": of("nobodys_model", "NobodysModelForCausalLM"),
    "unknown architecture": of("llama", "LlamaForNothing"),
    "encoder with decoder": of("bart", "BartModel"),
    "generating encoder with decoder": of("t5", "T5ForConditionalGeneration"),
    "several models": of("clip", "CLIPModel"),
    "images and text": of("llava", "LlavaForConditionalGeneration"),
    "attention that cannot be replaced": of("bloom", "BloomForCausalLM"),
    "unsupported layers by layer_types": of(
        "qwen3", "Qwen3ForCausalLM", num_hidden_layers=2, layer_types=["full_attention", "linear_attention"]
    ),
    "unsupported layers by the class": of("qwen3_next", "Qwen3NextForCausalLM"),
    "state spaces": of("mamba", "MambaForCausalLM"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusal_message_equals_the_error_of_the_worker(tmp_path: Path, case: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REFUSED[case]))
    save_file({"model.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((CheckpointError, UnsupportedModel)) as raised:
        load_model(load_request(tmp_path, "auto", 16, None))
    assert refusal(REFUSED[case], {"config.json"}, str(tmp_path)) == str(raised.value)


def test_refusal_message_covers_quantization_in_a_separate_file() -> None:
    served = of("llama", "LlamaForCausalLM")
    assert refusal(served, {"config.json", "hf_quant_config.json"}, "org/a") == (
        "org/a is quantized in a layout that is not supported: hf_quant_config.json of ModelOpt is not supported"
    )


@pytest.mark.parametrize("name", MODELS)
def test_refusal_message_is_empty_for_served_models(tmp_path: Path, name: str) -> None:
    MODELS[name].build(tmp_path)
    assert refusal(json.loads((tmp_path / "config.json").read_text()), {"config.json"}, "org/a") == ""


@pytest.mark.parametrize(
    "config", [{}, [], None, 1, {"architectures": 3}, {"model_type": "llama", "architectures": []}, {"layer_types": 5}]
)
def test_refusal_message_is_empty_when_fields_are_missing_or_malformed(config: Any) -> None:
    assert refusal(config, set(), "org/a") == ""


def test_table_of_families_matches_the_installed_transformers_and_the_registry() -> None:
    table = json.loads(TABLE.read_text())
    assert (table["transformers"], table["families"]) == (transformers.__version__, sorted(FAMILIES)), "run `make docs`"
    assert table["wrappers"] == sorted(name for name in ARCHITECTURES if name.endswith(WRAPPER)), "run `make docs`"
    assert table["model_types"] == sorted(transformers.CONFIG_MAPPING)
    if NIGHTLY:
        assert TABLE.read_text() == models_reference.table(), "run `make docs`"
