"""Models with weights of 8 and 4 bits give the logprobs of the elements that their codes stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.coded_weight import Scheme
from rootstock_llm.services.worker.exec.weights.checkpoint import CheckpointError, UnsupportedModel
from rootstock_llm.services.worker.exec.weights.quantization import quantized
from tests.exec.quantized_folders import is_linear, outputs, rewrite
from tests.exec.tiny_models import TinyModel

CLOSE = 1e-3  # largest difference of logprobs
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
TIED, UNTIED = SIZES | {"tie_word_embeddings": True}, SIZES | {"tie_word_embeddings": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of models in float32."""
    base = tmp_path_factory.mktemp("models")
    families = {
        "llama": TinyModel("Llama", UNTIED),
        "tied": TinyModel("Qwen3", TIED | {"head_dim": 32}),
        "qwen3.5": TinyModel(
            "Qwen3_5",
            TIED | {"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
                    "linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention"]},
            config="Qwen3_5TextConfig",
        ),
    }  # fmt: skip
    for name, family in families.items():
        family.build(base / name)
    return {name: base / name for name in families}


def assert_close(found: Path, expected: Path, **options: object) -> None:
    """Checks that a folder, loaded with the options, has the tokens and the logprobs of another folder."""
    tokens, logprobs, _ = outputs(found, **options)  # type: ignore[arg-type]
    expected_tokens, expected_logprobs, _ = outputs(expected)
    assert tokens == expected_tokens and len(set(tokens)) > 3
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=CLOSE, rtol=0)


# Quantized while loading


@pytest.mark.parametrize("shape", [(64, 384), (3, 128)], ids=str)
@pytest.mark.parametrize("scheme", [Scheme(8), Scheme(4, 128), Scheme(4, 32)], ids=str)
def test_quantized_weight_is_close_to_its_elements(
    scheme: Scheme, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rootstock_llm.services.worker.exec.weights.quantization.ROWS_AT_ONCE", 2 * shape[1])
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight[1] = 0.0
    found = quantized("w", weight, scheme)
    steps = found.scales.abs().repeat_interleave(shape[1] // found.scales.shape[1], 1)
    # The largest element of the other sign may exceed the codes of 4 bits by half a step, and a rounded scale by a little.
    allowed = 0.501 if scheme.bits == 8 else 1.04
    assert bool(((found.unfolded() - weight).abs() <= steps * allowed + 1e-9).all())
    assert torch.equal(found.unfolded()[1], weight[1])


@pytest.mark.parametrize("option", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "tied", "qwen3.5"])
def test_model_quantized_at_load_equals_its_elements(folders: dict[str, Path], name: str, option: str, tmp_path: Path) -> None:
    def change(tensor: str, weight: Tensor) -> dict[str, Tensor]:
        if not (is_linear(tensor) or "in_proj" in tensor or tensor.endswith("out_proj.weight")):
            return {tensor: weight}
        scheme = Scheme(8) if option == "int8" else Scheme(4, 128 if weight.shape[1] % 128 == 0 else 64)
        return {tensor: quantized(tensor, weight, scheme).unfolded()}

    assert_close(folders[name], rewrite(folders[name], tmp_path / "unfolded", change), quantization=option)


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_quantized_head_equals_its_elements(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    heads = ("lm_head.weight", "model.embed_tokens.weight") if name == "tied" else ("lm_head.weight",)

    def change(tensor: str, weight: Tensor) -> dict[str, Tensor]:
        return {tensor: quantized(tensor, weight, Scheme(8)).unfolded() if tensor in heads else weight}

    assert_close(folders[name], rewrite(folders[name], tmp_path / "unfolded", change), quantize_head=True)


def test_description_of_a_model_has_the_size_and_the_scheme_of_its_codes(folders: dict[str, Path]) -> None:
    found = {
        (scheme, head): outputs(folders["tied"], "bfloat16", quantization=scheme, quantize_head=head)[2]
        for scheme, head in (("auto", False), ("int8", False), ("int8", True), ("int4", True))
    }
    assert [info.quantization for info in found.values()] == ["", "int8", "int8, int8 head", "int4, int8 head"]
    linear, norms = 2 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 384), 4 * (2 * 2 * (128 + 32) + 128)
    embedding = 320 * 128  # 257 rows in blocks of 64
    channels = 4 * 2 * (128 * 3 + 64 * 2 + 384 * 2)  # scales of 4 bytes
    groups = 2 * linear // 128  # scales of 2 bytes
    assert [info.weight_bytes for info in found.values()] == [
        2 * linear + 2 * embedding + norms,
        linear + channels + 2 * embedding + norms,
        linear + channels + embedding + 4 * 320 + norms,
        linear // 2 + groups + embedding + 4 * 320 + norms,
    ]


def test_activations_of_8_bits_change_logprobs_little(folders: dict[str, Path]) -> None:
    _, exact, _ = outputs(folders["tied"], "float32", quantization="int8")
    _, rounded, _ = outputs(folders["tied"], "bfloat16", quantization="int8")
    assert float(np.abs(np.sort(exact[0]) - np.sort(rounded[0])).max()) < 0.2


def test_model_that_transformers_computes_is_refused_with_quantization(tmp_path: Path) -> None:
    TinyModel("Gemma2", SIZES | {"head_dim": 32}).build(tmp_path / "gemma2")
    with pytest.raises(UnsupportedModel, match=r"cannot be served with weights of int8: transformers' code would compute it"):
        outputs(tmp_path / "gemma2", quantization="int8")


def test_depth_that_no_group_divides_is_refused(tmp_path: Path) -> None:
    TinyModel("Llama", SIZES | {"intermediate_size": 72}).build(tmp_path / "odd")
    with pytest.raises(CheckpointError, match=r"down_proj\.weight has a depth of 72, which no group of int4 divides"):
        outputs(tmp_path / "odd", quantization="int4")


def test_element_that_is_not_finite_is_refused() -> None:
    weight = torch.ones(4, 64)
    weight[2, 3] = torch.inf
    with pytest.raises(CheckpointError, match="w cannot be quantized: it has elements that are not finite"):
        quantized("w", weight, Scheme(8))
