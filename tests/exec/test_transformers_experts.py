"""Our kernels compute the experts of transformers' models if the results agree. Other modules keep transformers' code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rootstock_llm.kernels.cpu.build import built_library
from rootstock_llm.kernels.cpu.library import CpuKernels
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.services.worker.exec.loading import load_model
from rootstock_llm.services.worker.exec.models.transformers_experts import pack_experts, packed_modules
from rootstock_llm.services.worker.exec.models.transformers_model import TransformersModel
from tests.exec.host_executors import load_request
from tests.exec.tiny_models import TinyModel
from tests.exec.transformers_families import SERVED

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
PACKED = {  # number of packed modules by family
    **dict.fromkeys(("qwen2-moe", "olmoe", "granite-moe", "deepseek-v2", "minimax-m2", "dots1", "hunyuan-moe"), 3),
    **dict.fromkeys(("deepseek-v3", "glm4-moe", "ernie4.5-moe"), 2),  # the first layer has no experts
    "jetmoe": 0,  # its experts do not use transformers' exchangeable implementations
    "interleaved": 3,
    "gelu": 0,
}
MODELS = SERVED | {
    "interleaved": TinyModel("GptOss", {**EXPERTS, "head_dim": 16, "swiglu_limit": 1.0}),
    "gelu": TinyModel("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 48, "hidden_act": "gelu"}),
}


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return CpuKernels(built_library(), 1)


def logits_of(model: Any) -> Tensor:
    ids = torch.randint(0, 257, (1, 30), generator=torch.Generator().manual_seed(1))
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def weight_bytes(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.by_day(one_in=3, seed=1)
@pytest.mark.parametrize("name", PACKED)
def test_packed_experts_give_the_results_of_transformers_code(name: str, kernels: CpuKernels, tmp_path: Path) -> None:
    with torch.inference_mode():
        model = MODELS[name].build(tmp_path)
        expected, before = logits_of(model), weight_bytes(model)
        more = pack_experts(model, kernels)
        torch.testing.assert_close(logits_of(model), expected, atol=2e-3, rtol=1e-3)
    packed = packed_modules(model)
    assert len(packed) == PACKED[name]
    assert not any(parameter.numel() for module in packed for parameter in module.parameters())
    assert more == weight_bytes(model) + sum(map(packed_bytes, packed)) - before


class LimitedSilu(nn.SiLU):
    def forward(self, gate: Tensor) -> Tensor:
        return super().forward(gate.clamp(max=50.0))


def packed_bytes(module: Any) -> int:
    packed = module.rootstock_experts.packed
    return sum(tensor.nbytes for part in (packed.gate_up, packed.down) for tensor in part.tensors)


def test_experts_keep_transformers_code_when_the_kernels_are_the_torch_twins(tmp_path: Path) -> None:
    model = SERVED["olmoe"].build(tmp_path)
    assert pack_experts(model, reference) == 0 and not packed_modules(model)  # type: ignore[arg-type]


def test_experts_keep_transformers_code_when_only_small_inputs_agree(kernels: CpuKernels, tmp_path: Path) -> None:
    """The module limits its gate, without attributes that show the limit."""
    model = SERVED["olmoe"].build(tmp_path)
    module = model.model.layers[1].mlp.experts
    module.act_fn = LimitedSilu()
    with torch.inference_mode():
        expected = logits_of(model)
        pack_experts(model, kernels)
        torch.testing.assert_close(logits_of(model), expected, atol=2e-3, rtol=1e-3)
    assert len(packed_modules(model)) == 2 and module not in packed_modules(model)


def test_worker_packs_experts_of_a_transformers_model(tmp_path: Path) -> None:
    SERVED["olmoe"].build(tmp_path)
    loaded = load_model(load_request(tmp_path, "bfloat16", 16, None))
    model = loaded.model
    assert isinstance(model, TransformersModel) and len(packed_modules(model._model)) == 3
