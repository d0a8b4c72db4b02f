"""Mixtures whose experts have weights of 8 and 4 bits give the logprobs of the elements that their codes stand for."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.services.worker.exec.loading import load_model
from rootstock_llm.services.worker.exec.models.decoder import DecoderModel
from rootstock_llm.services.worker.exec.models.registry import ARCHITECTURES, config_of
from rootstock_llm.services.worker.exec.weights.checkpoint import Checkpoint, CheckpointError, read_config
from rootstock_llm.services.worker.exec.weights.layouts.choose import quantization_for, read_quantization
from rootstock_llm.services.worker.exec.weights.load_progress import LoadPhases
from rootstock_llm.services.worker.exec.weights.quantization import QuantizationOptions
from rootstock_llm.services.worker.exec.weights.source import CheckpointSource, WeightReader
from rootstock_llm.services.worker.exec.weights.weight_stream import StreamOptions, stream_weights
from tests.exec.host_executors import load_request
from tests.exec.published_forms import FORMS, mxfp4_tensors
from tests.exec.quantized_folders import outputs, rewrite
from tests.exec.test_quantized import assert_close, encoded
from tests.exec.tiny_models import MODELS, TinyModel

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "mlp_only_layers": [],
}
LAYERS, EXPERTS = 2, 8
ATTENTION = LAYERS * (128 * 128 * 2 + 128 * 64 * 2)  # elements of Qwen3's projections
MIXTURE = LAYERS * EXPERTS * 3 * 128 * 128  # elements of all experts


def in_one_tensor(source: Path, target: Path) -> Path:
    """Writes a model with separate experts as transformers' modules store it: two tensors [E, ...] for the experts of a layer."""
    parts: dict[str, dict[int, Tensor]] = {}

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        prefix, _, rest = name.partition(".experts.")
        if not rest:
            return {name: tensor}
        number, projection, _ = rest.split(".")
        parts.setdefault(f"{prefix}.experts.{projection}", {})[int(number)] = tensor
        if len(parts[f"{prefix}.experts.{projection}"]) < EXPERTS:
            return {}
        whole = {
            each: torch.stack([tensors[n] for n in range(EXPERTS)]) for each, tensors in parts.items() if len(tensors) == EXPERTS
        }
        names = [f"{prefix}.experts.{each}" for each in ("gate_proj", "up_proj", "down_proj")]
        if not all(each in whole for each in names):
            return {}
        gate, up, down = (whole[each] for each in names)
        return {f"{prefix}.experts.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.experts.down_proj": down}

    return rewrite(source, target, change)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of mixtures in float32."""
    base = tmp_path_factory.mktemp("mixtures")
    for name, options in (("qwen3-moe", {}), ("gpt-oss", {"head_dim": 32, "initializer_range": 0.1}), ("mixtral", {})):
        family = MODELS[name]
        TinyModel(family.family, {**family.options, **SIZES, **options}).build(base / name)
    in_one_tensor(base / "qwen3-moe", base / "qwen3-moe in one tensor")
    return {path.name: path for path in base.iterdir()}


@pytest.mark.parametrize("option", ["int8", "int4"])
def test_experts_in_one_tensor_get_the_codes_of_separate_ones(folders: dict[str, Path], option: str) -> None:
    found, expected = (
        outputs(folders[name], "bfloat16", quantization=option) for name in ("qwen3-moe in one tensor", "qwen3-moe")
    )
    assert found[0] == expected[0] and bool((found[1] == expected[1]).all())
    assert found[2].weight_bytes == expected[2].weight_bytes


def test_description_of_a_mixture_has_the_size_of_its_codes(folders: dict[str, Path]) -> None:
    sizes = {
        each: outputs(folders["qwen3-moe"], "bfloat16", quantization=each)[2].weight_bytes for each in ("auto", "int8", "int4")
    }
    elements = ATTENTION + MIXTURE
    channels = ATTENTION // 128 + MIXTURE // 128  # all weights have a depth of 128
    assert sizes["auto"] - sizes["int8"] == elements - 4 * channels
    assert sizes["auto"] - sizes["int4"] == elements * 3 // 2 - 2 * channels


@pytest.mark.by_day(one_in=2, seed=1)
@pytest.mark.parametrize("form", ["packed 4 by 128", "int8 by channel", "float8 by block", "gptq 4 by 128", "gptq 4 symmetric"])
def test_published_form_of_experts_stays_packed_or_becomes_bfloat16(folders: dict[str, Path], form: str, tmp_path: Path) -> None:
    coded, elements = encoded(folders["qwen3-moe"], tmp_path, FORMS[form])
    assert_close(coded, elements)
    _, _, info = outputs(coded, "bfloat16")
    _, _, plain = outputs(folders["qwen3-moe"], "bfloat16")
    assert info.quantization == FORMS[form].scheme
    least = (ATTENTION + MIXTURE) * (0.9 if "8" in form.split(" by ")[0] else 1.1)
    assert plain.weight_bytes - info.weight_bytes > (-1 if FORMS[form].becomes_float else least)
    if FORMS[form].becomes_float:
        assert plain.weight_bytes - outputs(coded, "bfloat16", quantization="int8")[2].weight_bytes > 0.9 * (ATTENTION + MIXTURE)


def test_layers_may_have_experts_with_and_without_codes(folders: dict[str, Path], tmp_path: Path) -> None:
    assert_close(*encoded(folders["qwen3-moe"], tmp_path, FORMS["awq by 64"], only="layers.1."))


# gpt-oss


def published_gpt_oss(source: Path, target: Path) -> Path:
    """Writes a gpt-oss model as it is published, with experts in MXFP4."""

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: tensor}
        blocks, exponents, _ = mxfp4_tensors(tensor.transpose(1, 2))
        return {f"{name}_blocks": blocks, f"{name}_scales": exponents}

    rest = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return rewrite(source, target, change, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": rest})


def test_published_gpt_oss_equals_the_elements_that_transformers_reads(folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import GptOssForCausalLM, Mxfp4Config

    coded = published_gpt_oss(folders["gpt-oss"], tmp_path / "coded")
    model = GptOssForCausalLM.from_pretrained(coded, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32)
    read = model.state_dict()
    elements = rewrite(folders["gpt-oss"], tmp_path / "elements", lambda name, tensor: {name: read[name].contiguous()})
    assert_close(coded, elements)


# The weight stream

STREAMED: dict[str, tuple[str, str, str]] = {
    "quantized at load": ("qwen3-moe", "", "int8"),
    "one tensor, quantized at load": ("qwen3-moe in one tensor", "", "int4"),
    "interleaved, quantized at load": ("gpt-oss", "", "int8"),
    "awq": ("qwen3-moe", "awq by 64", "auto"),
    "fp8": ("qwen3-moe", "fp8 by block", "int8"),
    "published gpt-oss": ("gpt-oss", "published", "auto"),
}


@pytest.mark.parametrize("case", STREAMED)
def test_stream_of_experts_to_a_device_gives_the_weights_of_the_reader(
    folders: dict[str, Path], case: str, tmp_path: Path
) -> None:
    name, form, option = STREAMED[case]
    folder = folders[name]
    if form == "published":
        folder = published_gpt_oss(folder, tmp_path / "coded")
    elif form:
        folder, _ = encoded(folder, tmp_path, FORMS[form])
    options, config = QuantizationOptions(option), config_of(read_config(folder))
    given = read_quantization(folder, options)
    with closing(Checkpoint(folder, has_codes=given is not None)) as checkpoint:
        form_of = quantization_for(given, options, checkpoint)
        config = config.resolved(checkpoint, torch.float32)
        read, phases = partial(ARCHITECTURES[config.architecture].read, config=config), LoadPhases()
        arguments = (torch.float32, torch.device("cpu"), reference, StreamOptions(2, 1 << 16), lambda _: None, phases)
        found = stream_weights(checkpoint, read, *arguments, quantization=form_of)
        expected = read(WeightReader(CheckpointSource(checkpoint, torch.float32, quantization=form_of), reference))
    assert isinstance(found, DecoderModel) and found.expert_bytes() == expected.expert_bytes()
    pairs = list(zip(found.tensors(), expected.tensors(), strict=True))
    assert len(pairs) > 10 and all(torch.equal(one, other) for one, other in pairs)


# Refused folders


def test_act_order_of_experts_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    coded, _ = encoded(folders["qwen3-moe"], tmp_path, FORMS["gptq 4 act-order"], only="experts")
    fault = r"model\.layers\.0\.mlp\.experts cannot be loaded: an order of the inputs \(act-order\) is not supported"
    with pytest.raises(CheckpointError, match=fault):
        load_model(load_request(coded, "auto", 16, None))


def test_experts_with_and_without_codes_in_one_layer_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    coded, _ = encoded(folders["qwen3-moe"], tmp_path, FORMS["awq by 64"], only="experts.3.")
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.mlp\.experts cannot be loaded: either all matrices of experts have codes"
    ):
        load_model(load_request(coded, "auto", 16, None))


@pytest.mark.parametrize("suffix", ["", "_packed"], ids=["codes", "packed codes"])
def test_fused_experts_with_codes_are_refused(folders: dict[str, Path], suffix: str, tmp_path: Path) -> None:
    """Tools do not agree on the names and the meaning of such tensors (llm-compressor, issue 2939)."""

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: tensor}
        codes = torch.zeros(tensor.shape, dtype=torch.int8)
        return {f"{name}{suffix}": codes, f"{name}_scale": torch.ones(*tensor.shape[:2], 1)}

    config = FORMS["int8 by channel"].config
    folder = rewrite(folders["qwen3-moe in one tensor"], tmp_path / "fused", change, quantization_config=config)
    with pytest.raises(CheckpointError, match=r"gate_up_proj_(scale|packed) belongs to one tensor with codes of all experts"):
        load_model(load_request(folder, "auto", 16, None))


@pytest.mark.parametrize("option", ["int8", "int4"])
def test_quantization_of_published_gpt_oss_is_refused(folders: dict[str, Path], option: str, tmp_path: Path) -> None:
    coded = published_gpt_oss(folders["gpt-oss"], tmp_path / "coded")
    with pytest.raises(CheckpointError, match=f"--quantization is {option}, but .* is quantized by mxfp4"):
        outputs(coded, quantization=option)


def test_broken_scales_of_published_gpt_oss_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    coded = published_gpt_oss(folders["gpt-oss"], tmp_path / "coded")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors = load_file(coded / "model.safetensors")
    faults = {"has scales that are not finite": tensors[name] * 0 + 255, r"down_proj_scales .* has shape": tensors[name][:, :-1]}
    for number, (fault, scales) in enumerate(faults.items()):
        broken = rewrite(coded, tmp_path / str(number), lambda n, t, scales=scales: {n: scales if n == name else t})
        with pytest.raises(CheckpointError, match=fault):
            load_model(load_request(broken, "auto", 16, None))
