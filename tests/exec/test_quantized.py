"""Models with weights of 8 and 4 bits give the logprobs of the elements that their codes stand for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.utils.match import match_targets
from safetensors.torch import load_file, save_file
from torch import Tensor

from rootstock_llm.kernels.contracts.coded_weight import CodedWeight, Scheme
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.services.worker.exec.loading import load_model
from rootstock_llm.services.worker.exec.models.registry import ARCHITECTURES, config_of
from rootstock_llm.services.worker.exec.weights.checkpoint import Checkpoint, CheckpointError, UnsupportedModel, read_config
from rootstock_llm.services.worker.exec.weights.layouts.choose import LAYOUTS, quantization_for, read_quantization
from rootstock_llm.services.worker.exec.weights.layouts.compressed_tensors import CompressedTensors
from rootstock_llm.services.worker.exec.weights.layouts.float8 import scaled
from rootstock_llm.services.worker.exec.weights.layouts.gptq import Gptq
from rootstock_llm.services.worker.exec.weights.layouts.mxfp4 import Mxfp4
from rootstock_llm.services.worker.exec.weights.layouts.words import unpacked
from rootstock_llm.services.worker.exec.weights.load_progress import LoadPhases
from rootstock_llm.services.worker.exec.weights.quantization import FROM_CHECKPOINT, Quantization, quantized
from rootstock_llm.services.worker.exec.weights.source import CheckpointSource, WeightReader
from rootstock_llm.services.worker.exec.weights.weight_stream import StreamOptions, stream_weights
from tests.exec.host_executors import load_request
from tests.exec.published_forms import FORMS, Form, gptq, mxfp4_tensors, words
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
    monkeypatch.setattr("rootstock_llm.services.worker.exec.weights.quantization.CONVERTED_AT_ONCE", 2 * shape[1])
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight[1] = 0.0
    found = quantized("w", weight, scheme)
    steps = found.scales.abs().repeat_interleave(shape[1] // found.scales.shape[1], 1)
    # With 4 bits, an element whose sign is opposite to that of the largest element may exceed the largest code, 7, by up to one
    # step. Rounding of the scale adds a little.
    allowed = 0.501 if scheme.bits == 8 else 1.04
    assert bool(((found.dequantized() - weight).abs() <= steps * allowed + 1e-9).all())
    assert torch.equal(found.dequantized()[1], weight[1])


@pytest.mark.parametrize("option", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "tied", "qwen3.5"])
def test_model_quantized_at_load_equals_its_elements(folders: dict[str, Path], name: str, option: str, tmp_path: Path) -> None:
    def change(tensor: str, weight: Tensor) -> dict[str, Tensor]:
        if not (is_linear(tensor) or "in_proj" in tensor or tensor.endswith("out_proj.weight")):
            return {tensor: weight}
        scheme = Scheme(8) if option == "int8" else Scheme(4, 128 if weight.shape[1] % 128 == 0 else 64)
        return {tensor: quantized(tensor, weight, scheme).dequantized()}

    assert_close(folders[name], rewrite(folders[name], tmp_path / "dequantized", change), quantization=option)


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_quantized_head_equals_its_elements(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    heads = ("lm_head.weight", "model.embed_tokens.weight") if name == "tied" else ("lm_head.weight",)

    def change(tensor: str, weight: Tensor) -> dict[str, Tensor]:
        return {tensor: quantized(tensor, weight, Scheme(8)).dequantized() if tensor in heads else weight}

    assert_close(folders[name], rewrite(folders[name], tmp_path / "dequantized", change), quantize_head=True)


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
    TinyModel("Granite", SIZES).build(tmp_path / "granite")
    with pytest.raises(UnsupportedModel, match=r"cannot be served with weights of int8: transformers' code would compute it"):
        outputs(tmp_path / "granite", quantization="int8")


def test_depth_that_no_group_divides_is_refused(tmp_path: Path) -> None:
    TinyModel("Llama", SIZES | {"intermediate_size": 72}).build(tmp_path / "odd")
    with pytest.raises(CheckpointError, match=r"down_proj\.weight has a depth of 72, which no group of int4 divides"):
        outputs(tmp_path / "odd", quantization="int4")


def test_element_that_is_not_finite_is_refused() -> None:
    weight = torch.ones(4, 64)
    weight[2, 3] = torch.inf
    with pytest.raises(CheckpointError, match="w cannot be quantized: it has elements that are not finite"):
        quantized("w", weight, Scheme(8))


# Published forms


def encoded(source: Path, target: Path, form: Form, only: str = "") -> tuple[Path, Path]:
    """Writes a model with a layout, and the model of its elements. Returns both folders.

    Args:
        only: if not empty, part of the names of the modules that are quantized.
    """
    stored, elements = {}, {}
    for file in source.glob("*.safetensors"):
        for name, weight in load_file(file).items():
            if is_linear(name) and only in name:
                stored[name], elements[name] = form.encode(name.removesuffix(".weight"), weight)
    coded = rewrite(source, target / "coded", lambda n, t: stored.get(n, {n: t}), quantization_config=form.config)
    return coded, rewrite(source, target / "elements", lambda n, t: {n: elements.get(n, t)})


@pytest.mark.by_day(one_in=2, seed=4)
@pytest.mark.parametrize("form", FORMS)
def test_published_form_equals_its_elements(folders: dict[str, Path], form: str, tmp_path: Path) -> None:
    coded, elements = encoded(folders["llama"], tmp_path, FORMS[form])
    assert_close(coded, elements)


@pytest.mark.parametrize("form", ["packed 4 by 128", "awq by 128", "gptq 4 act-order", "fp8 by block"])
def test_published_form_in_some_layers_equals_its_elements(folders: dict[str, Path], form: str, tmp_path: Path) -> None:
    assert_close(*encoded(folders["tied"], tmp_path, FORMS[form], only="layers.1."))


@pytest.mark.by_day(one_in=3, seed=1)
@pytest.mark.parametrize("form", FORMS)
def test_codes_stay_packed_and_float8_becomes_bfloat16(folders: dict[str, Path], form: str, tmp_path: Path) -> None:
    coded, _ = encoded(folders["llama"], tmp_path, FORMS[form])
    _, _, info = outputs(coded, "bfloat16")
    _, _, plain = outputs(folders["llama"], "bfloat16")
    assert info.quantization == FORMS[form].scheme
    linear = 2 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 384)
    smallest = 0 if FORMS[form].becomes_float else 2 * linear - linear * (1.2 if "8" in form.split(" by ")[0] else 0.8)
    assert plain.weight_bytes - info.weight_bytes >= smallest
    if FORMS[form].becomes_float:
        assert plain.weight_bytes == info.weight_bytes
        assert outputs(coded, "bfloat16", quantization="int8")[2].weight_bytes < plain.weight_bytes - 0.9 * linear


def test_schemes_may_differ_between_the_matrices_of_a_layer(folders: dict[str, Path], tmp_path: Path) -> None:
    four, eight = FORMS["packed 4 by 128"], FORMS["packed 8 by channel"]
    parts = {"self_attn": eight, "mlp": four}
    stored, elements = {}, {}
    for name, weight in load_file(folders["llama"] / "model.safetensors").items():
        if is_linear(name):
            form = next(form for part, form in parts.items() if part in name)
            stored[name], elements[name] = form.encode(name.removesuffix(".weight"), weight)
    groups = {part: form.config["config_groups"]["group_0"] | {"targets": [f"re:.*{part}.*"]} for part, form in parts.items()}
    config = four.config | {"config_groups": groups}
    coded = rewrite(folders["llama"], tmp_path / "coded", lambda n, t: stored.get(n, {n: t}), quantization_config=config)
    assert_close(coded, rewrite(folders["llama"], tmp_path / "elements", lambda n, t: {n: elements.get(n, t)}))


TARGETS = {  # bits of the config groups by their target
    "a name of one word before a class": {"lm_head": 8, "Linear": 4},
    "a class of other modules before Linear": {"Embedding": 8, "Linear": 4},
    "a pattern before a name": {"re:.*up_proj": 4, "layers.1.up_proj": 8},
    "a general pattern before a special one": {"re:.*up.*": 4, "re:.*1.up.*": 8},
    "a class before a pattern": {"Linear": 4, "re:.*up_proj": 8},
}


@pytest.mark.parametrize("case", TARGETS)
def test_config_groups_of_compressed_tensors_apply_to_the_modules_that_the_library_chooses(case: str, tmp_path: Path) -> None:
    bits, modules = TARGETS[case], ("layers.0.up_proj", "layers.1.up_proj", "layers.1.down_proj", "lm_head")
    save_file({f"{module}.weight_scale": torch.ones(8, 1) for module in modules}, tmp_path / "model.safetensors")
    config = FORMS["packed 4 by 32 with zero points"].config
    base = config["config_groups"]["group_0"]
    groups = {
        target: base | {"targets": [target], "weights": base["weights"] | {"num_bits": count}} for target, count in bits.items()
    }
    with closing(Checkpoint(tmp_path, has_codes=True)) as checkpoint:
        layout = CompressedTensors(config | {"config_groups": groups}, checkpoint)
        for module in modules:
            if not (chosen := match_targets(module, torch.nn.Linear(1, 1), bits)):
                continue
            packed = layout.tensors(f"{module}.weight", (8, 32))[0]
            assert packed.shape == (8, bits[chosen[0]]), "32 codes of n bits are n words"


def test_reader_of_mxfp4_agrees_with_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, exponents, elements = mxfp4_tensors(torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(1)))
    save_file({"w_blocks": blocks, "w_scales": exponents}, tmp_path / "model.safetensors", {"format": "pt"})
    with closing(Checkpoint(tmp_path, has_codes=True)) as checkpoint:
        layout = Mxfp4({}, checkpoint)
        tensors = [checkpoint.tensor(each.name, each.shape, torch.uint8, exact=True) for each in layout.tensors("w", (3, 8, 64))]
        matrix = layout.matrix("w", (3, 8, 64), tensors)
    assert isinstance(matrix, CodedWeight)
    found = matrix.dequantized().view(3, 8, 64)
    assert torch.equal(found, elements)
    assert torch.equal(found, convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32).transpose(1, 2))


def test_reader_of_float8_agrees_with_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    tensors, elements = FORMS["fp8 by block"].encode("m", torch.randn(256, 384, generator=torch.Generator().manual_seed(2)))
    weight, scales = tensors["m.weight"], tensors["m.weight_scale_inv"]
    found = scaled("m", weight, scales)
    assert torch.equal(found, elements)
    assert torch.equal(found, _dequantize_fp8_weight(weight, scales, [128, 128], torch.float32))


def test_fp8_with_a_scalar_scale_equals_its_elements(folders: dict[str, Path], tmp_path: Path) -> None:
    assert_close(*encoded(folders["tied"], tmp_path, FORMS["fp8 with a scalar"], only="layers.1."))


@pytest.mark.parametrize("order", ["groups", "none"])
def test_reader_of_compressed_tensors_applies_weight_g_idx(order: str, tmp_path: Path) -> None:
    form = FORMS["packed 4 by 32 with zero points"]
    shuffled = torch.randperm(128, generator=torch.Generator().manual_seed(3)) if order == "groups" else torch.arange(128)
    back, weight = torch.argsort(shuffled), torch.randn(32, 128, generator=torch.Generator().manual_seed(4))
    tensors, elements = form.encode("w", weight[:, shuffled])
    codes = unpacked(tensors["w.weight_packed"], 4)[:, back].contiguous()
    tensors["w.weight_packed"] = words(codes.long(), 4)
    tensors["w.weight_g_idx"] = (back // 32 if order == "groups" else torch.full((128,), -1)).int()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with closing(Checkpoint(tmp_path, has_codes=True)) as checkpoint:
        source = CheckpointSource(
            checkpoint, torch.float32, quantization=Quantization(layout=CompressedTensors(form.config, checkpoint))
        )
        matrix = source.matrix([("w.weight", (32, 128))], is_head=False)
    assert isinstance(matrix, CodedWeight) and (matrix.order is None) == (order == "none")
    torch.testing.assert_close(matrix.dequantized(), elements[:, back])


@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
def test_scheme_of_gptq_does_not_depend_on_the_zero_points_of_a_matrix(symmetric: bool, tmp_path: Path) -> None:
    form = gptq(4, 32, symmetric=True)
    tensors, _ = form.encode("w", torch.randn(32, 64, generator=torch.Generator().manual_seed(5)))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    with closing(Checkpoint(tmp_path, has_codes=True)) as checkpoint:
        layout = Gptq(form.config | {"sym": symmetric}, checkpoint)
        source = CheckpointSource(checkpoint, torch.float32, quantization=Quantization(layout=layout))
        matrix = source.matrix([("w.weight", (32, 64))], is_head=False)
    assert isinstance(matrix, CodedWeight) and matrix.scheme.zero_points != symmetric


@pytest.mark.parametrize(
    ("form", "tensor"),
    [
        ("awq by 64", "qweight"),
        ("gptq 4 by 128", "qweight"),
        ("packed 4 by 128", "weight_scale"),
        ("fp8 by block", "weight_scale_inv"),
    ],
)
def test_tensor_with_all_experts_is_refused_by_name(form: str, tensor: str, tmp_path: Path) -> None:
    save_file({f"experts.up.{tensor}": torch.zeros(4, 64, 64)}, tmp_path / "model.safetensors", {"format": "pt"})
    config = FORMS[form].config
    with closing(Checkpoint(tmp_path, has_codes=True)) as checkpoint:
        layout = LAYOUTS[config["quant_method"]](config, checkpoint)
        with pytest.raises(CheckpointError, match=r"experts\.up\.weight\S* has the experts of a layer in one tensor"):
            layout.tensors("experts.up.weight", (4, 64, 64))


def test_block_scales_of_integer_codes_are_refused(tmp_path: Path) -> None:
    save_file({"w.weight_scale": torch.ones(2, 2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with closing(Checkpoint(tmp_path, has_codes=True)) as checkpoint:
        layout = CompressedTensors(FORMS["int8 by channel"].config, checkpoint)
        with pytest.raises(CheckpointError, match=r"w\.weight_scale has shape \(2, 2\); a weight of 256 x 256 needs one of"):
            layout.tensors("w.weight", (256, 256))


def with_codes(source: Path, target: Path, name: str) -> Path:
    """Writes a model in which one tensor has codes of 4 bits."""
    form = FORMS["packed 4 by 128"]

    def change(tensor: str, weight: Tensor) -> dict[str, Tensor]:
        return form.encode(name.removesuffix(".weight"), weight)[0] if tensor == name else {tensor: weight}

    return rewrite(source, target, change, quantization_config=form.config)


def test_quantize_head_is_refused_when_the_head_has_codes(folders: dict[str, Path], tmp_path: Path) -> None:
    coded = with_codes(folders["llama"], tmp_path / "coded", "lm_head.weight")
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight has int4 by 128 in the checkpoint already. Unset --quantize-head"
    ):
        outputs(coded, quantize_head=True)


def test_quantize_head_is_refused_when_the_model_has_no_head(tmp_path: Path) -> None:
    TinyModel("Qwen3", SIZES | {"head_dim": 32}, class_name="Qwen3Model").build(tmp_path / "model")
    with pytest.raises(UnsupportedModel, match=r"has no vocabulary projection to quantize\. Unset --quantize-head"):
        outputs(tmp_path / "model", quantize_head=True)


def test_embedding_of_4_bits_is_refused_at_load(folders: dict[str, Path], tmp_path: Path) -> None:
    coded = with_codes(folders["tied"], tmp_path / "coded", "model.embed_tokens.weight")
    with pytest.raises(
        CheckpointError, match=r"model\.embed_tokens\.weight is the embedding .* has int4 by 128; supported: int8 by"
    ):
        outputs(coded)


# Experts

SPARSE = SIZES | {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 128}
EXPERT_MODELS = {
    "qwen3-moe": TinyModel("Qwen3Moe", SPARSE | {"head_dim": 32, "norm_topk_prob": True}),
    "mixtral": TinyModel("Mixtral", SPARSE | {"intermediate_size": 128}),
    "gpt-oss": TinyModel("GptOss", SPARSE | {"head_dim": 32, "intermediate_size": 128, "sliding_window": 24}),
}


def is_expert(name: str) -> bool:
    return ".experts." in name and not name.endswith("bias") and "norm" not in name


def of_experts(name: str, weight: Tensor, change: Callable[[str, Tensor], Tensor]) -> Tensor:
    """Changes the matrices [N, K] of a tensor of experts, which gpt-oss stores as [E, K, N]."""
    if weight.dim() == 2:
        return change(name, weight)
    return torch.stack([change(name, each.t()).t() for each in weight])


@pytest.mark.parametrize("option", ["int8", "int4"])
@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_experts_quantized_at_load_equal_their_elements(name: str, option: str, tmp_path: Path) -> None:
    EXPERT_MODELS[name].build(tmp_path / "model")

    def change(tensor: str, weight: Tensor) -> Tensor:
        return quantized(tensor, weight, Scheme(8) if option == "int8" else Scheme(4, 128)).dequantized()

    def dequantized(tensor: str, weight: Tensor) -> dict[str, Tensor]:
        if is_expert(tensor):
            return {tensor: of_experts(tensor, weight, change)}
        return {tensor: change(tensor, weight) if is_linear(tensor) else weight}

    assert_close(tmp_path / "model", rewrite(tmp_path / "model", tmp_path / "dequantized", dequantized), quantization=option)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
@pytest.mark.parametrize("form", ["awq by 128", "packed 4 by 32 with zero points", "fp8 by block"])
def test_published_form_of_experts_equals_its_elements(name: str, form: str, tmp_path: Path) -> None:
    EXPERT_MODELS[name].build(tmp_path / "model")
    stored, elements = {}, {}
    for tensor, weight in load_file(tmp_path / "model" / "model.safetensors").items():
        if is_linear(tensor) or is_expert(tensor):
            assert weight.dim() == 2, "transformers saves these experts separately"
            stored[tensor], elements[tensor] = FORMS[form].encode(tensor.removesuffix(".weight"), weight)
    coded = rewrite(
        tmp_path / "model", tmp_path / "coded", lambda n, t: stored.get(n, {n: t}), quantization_config=FORMS[form].config
    )
    assert_close(coded, rewrite(tmp_path / "model", tmp_path / "elements", lambda n, t: {n: elements.get(n, t)}))


def test_gpt_oss_in_mxfp4_equals_its_elements_and_stays_packed(tmp_path: Path) -> None:
    EXPERT_MODELS["gpt-oss"].build(tmp_path / "model")

    def coded(tensor: str, weight: Tensor) -> dict[str, Tensor]:
        if not is_expert(tensor):
            return {tensor: weight}
        blocks, exponents, _ = mxfp4_tensors(weight.transpose(1, 2))
        return {f"{tensor}_blocks": blocks, f"{tensor}_scales": exponents}

    def elements(tensor: str, weight: Tensor) -> dict[str, Tensor]:
        return {tensor: mxfp4_tensors(weight.transpose(1, 2))[2].transpose(1, 2) if is_expert(tensor) else weight}

    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    folder = rewrite(tmp_path / "model", tmp_path / "coded", coded, quantization_config=config)
    plain = rewrite(tmp_path / "model", tmp_path / "elements", elements)
    assert_close(folder, plain)
    (_, _, small), (_, _, large) = outputs(folder, "bfloat16"), outputs(plain, "bfloat16")
    assert small.quantization == "mxfp4"
    numbers, biases = 2 * 8 * 3 * 128 * 128, 2 * 8 * 3 * 128  # biases of experts with codes are float32
    assert large.weight_bytes - small.weight_bytes == 2 * numbers - numbers // 2 - 2 * numbers // 32 - 2 * biases


# Refused folders

REFUSED = {
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "method bitsandbytes is not supported; supported: awq",
    ),
    "torchao": ({"quant_method": "torchao"}, "method torchao is not supported"),
    "AQLM": ({"quant_method": "aqlm"}, "method aqlm is not supported"),
    "HQQ": ({"quant_method": "hqq"}, "method hqq is not supported"),
    "EXL2": ({"quant_method": "exl2"}, "method exl2 is not supported"),
    "ModelOpt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "method modelopt is not supported"),
    "NVFP4": (
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}},
        },
        "format nvfp4-pack-quantized is not supported; supported: pack-quantized, int-quantized, float-quantized",
    ),
    "sparse": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity format sparse-24-bitmask is not supported",
    ),
    "AWQ gemv": (FORMS["awq by 128"].config | {"version": "gemv"}, "awq: version gemv is not supported; supported: gemm"),
    "GPTQ of 3 bits": (FORMS["gptq 4 by 128"].config | {"bits": 3}, "gptq: weights of 3 bits are not supported; supported: 4, 8"),
    "GPTQ by 1024": (FORMS["gptq 4 by 128"].config | {"group_size": 1024}, "gptq: groups of 1024 weights are not supported"),
    "Marlin": (FORMS["gptq 4 by 128"].config | {"is_marlin_format": True}, "checkpoint format marlin is not supported"),
    "fp8 by 64": ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"fp8: blocks of \[64, 64\] weights are not supported"),
    "malformed": ({"quant_method": "compressed-tensors", "config_groups": 3}, "compressed-tensors: the config is malformed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_form_is_refused_with_its_name(folders: dict[str, Path], case: str, tmp_path: Path) -> None:
    config, fault = REFUSED[case]
    folder = rewrite(folders["llama"], tmp_path / "model", lambda n, t: {n: t}, quantization_config=config)
    with pytest.raises(CheckpointError, match=f"is quantized in a layout that is not supported: .*{fault}"):
        load_model(load_request(folder, "auto", 16, None))


def changed(tensors: dict[str, Tensor], suffix: str, change: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
    """Returns the tensors of a module, in which the tensor with a suffix is changed, or removed if `change` returns None."""
    new = {name: change(tensor) if name.endswith(suffix) else tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in new.items() if tensor is not None}


BROKEN: dict[str, tuple[str, str, Callable[[Tensor], Tensor | None], str]] = {
    "cut codes": ("packed 4 by 128", "weight_packed", lambda t: t[:, :-1], r"up_proj\.weight_packed .* has shape \(384, 15\)"),
    "cut scales": ("awq by 128", "scales", lambda t: t[:, :-1], r"up_proj\.scales .* has shape \(1, 383\)"),
    "missing scales": (
        "int8 by channel",
        "weight_scale",
        lambda t: None,
        r"up_proj\.weight .* int8, and its scales are missing",
    ),
    "missing codes": ("gptq 4 by 128", "qweight", lambda t: None, r"lacks 1 tensors: .*up_proj\.weight"),
    "missing zero points": ("gptq 4 by 128", "qzeros", lambda t: None, r"lacks 1 tensors: .*up_proj\.qzeros"),
    "wrong type": (
        "awq by 128",
        "qweight",
        lambda t: t.long(),
        r"up_proj\.qweight .* dtype int64; the config requires int32",
    ),
    "scales that are not finite": ("fp8 by block", "weight_scale_inv", lambda t: t * torch.nan, "has scales that are not finite"),
    "wrong block": ("fp8 by block", "weight_scale_inv", lambda t: t[:1], r"up_proj\.weight_scale_inv has shape \(1, 1\)"),
    "exponents that are not finite": ("mxfp4", "_scales", lambda t: t * 0 + 255, "up_proj.weight has scales that are not finite"),
    "uneven groups": ("gptq 4 act-order", "g_idx", lambda t: t * 0, "does not have 32 elements in each group"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_tensor_is_refused_with_its_name(folders: dict[str, Path], case: str, tmp_path: Path) -> None:
    name, suffix, change, fault = BROKEN[case]

    def write(tensor: str, weight: Tensor) -> dict[str, Tensor]:
        if not is_linear(tensor):
            return {tensor: weight}
        found, _ = FORMS[name].encode(tensor.removesuffix(".weight"), weight)
        return changed(found, suffix, change) if tensor.endswith("layers.1.mlp.up_proj.weight") else found

    folder = rewrite(folders["llama"], tmp_path / "model", write, quantization_config=FORMS[name].config)
    with pytest.raises(CheckpointError, match=fault):
        load_model(load_request(folder, "auto", 16, None))


def test_quantization_of_a_folder_with_codes_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    coded, _ = encoded(folders["llama"], tmp_path, FORMS["awq by 128"])
    with pytest.raises(CheckpointError, match=r"--quantization is int8, but .* is quantized by awq\. Set --quantization to"):
        outputs(coded, quantization="int8")


def test_parts_of_one_matrix_with_different_schemes_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    coded, _ = encoded(folders["llama"], tmp_path, FORMS["awq by 128"], only="q_proj")
    with pytest.raises(CheckpointError, match=r"q_proj\.weight and .*k_proj.* are one matrix, but only 1 of them have codes"):
        load_model(load_request(coded, "auto", 16, None))


def test_folder_with_codes_that_transformers_computes_is_refused(tmp_path: Path) -> None:
    TinyModel("Granite", SIZES).build(tmp_path / "granite")
    coded, _ = encoded(tmp_path / "granite", tmp_path, FORMS["awq by 128"])
    with pytest.raises(UnsupportedModel, match="cannot be served with weights of awq: transformers' code would compute it"):
        load_model(load_request(coded, "auto", 16, None))


@pytest.mark.parametrize("form", ["packed 4 by 32 with zero points", "gptq 4 act-order", "fp8 with a scalar", "awq by 64"])
def test_stream_to_a_device_gives_the_weights_of_the_reader(folders: dict[str, Path], form: str, tmp_path: Path) -> None:
    coded, _ = encoded(folders["llama"], tmp_path, FORMS[form])
    config, options = config_of(read_config(coded)), StreamOptions(2, 1 << 16)
    given = read_quantization(coded, FROM_CHECKPOINT)
    with closing(Checkpoint(coded, has_codes=True)) as checkpoint:
        form_of = quantization_for(given, FROM_CHECKPOINT, checkpoint)
        read, phases = partial(ARCHITECTURES[config.architecture].read, config=config), LoadPhases()
        arguments = (torch.float32, torch.device("cpu"), reference, options, lambda _: None, phases)
        found = stream_weights(checkpoint, read, *arguments, quantization=form_of)
        expected = read(WeightReader(CheckpointSource(checkpoint, torch.float32, quantization=form_of), reference))
    pairs = list(zip(found.tensors(), expected.tensors(), strict=True))
    assert len(pairs) > 10 and all(torch.equal(one, other) for one, other in pairs)
