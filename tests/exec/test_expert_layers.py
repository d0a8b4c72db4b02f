"""A layer of experts equals transformers' module for each way to store experts, and its loading needs little memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from rootstock_llm.kernels.contracts.ops import Activation, Kernels, RaggedRows, Routing
from rootstock_llm.kernels.cpu.build import built_library
from rootstock_llm.kernels.cpu.library import CpuKernels
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.services.worker.exec.models.experts import Experts, ExpertSizes
from rootstock_llm.services.worker.exec.models.layers import ForwardContext, Workspace
from rootstock_llm.services.worker.exec.weights.checkpoint import Checkpoint
from rootstock_llm.services.worker.exec.weights.source import CheckpointSource, RandomSource, WeightReader

HIDDEN, INNER, COUNT, CHOSEN = 64, 40, 6, 3
CONFIG = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "num_local_experts": COUNT,
    "num_experts": COUNT,
    "num_experts_per_tok": CHOSEN,
}
ROUTING = Routing(CHOSEN, renormalize=True)
SIZES = ExpertSizes(COUNT, INNER, ROUTING)


def gpt_oss() -> tuple[Any, ExpertSizes]:
    module = modeling_gpt_oss.GptOssMLP(transformers.GptOssConfig(**CONFIG, swiglu_limit=1.5))
    activation = Activation(module.experts.alpha, module.experts.limit, 1.0)
    return module, ExpertSizes(COUNT, INNER, ROUTING, activation, router="router", router_bias=True, interleaved=True)


def mixtral() -> tuple[Any, ExpertSizes]:
    return modeling_mixtral.MixtralSparseMoeBlock(transformers.MixtralConfig(**CONFIG)), SIZES


def shared() -> tuple[Any, ExpertSizes]:
    config = transformers.Qwen3_5MoeTextConfig(**CONFIG, shared_expert_intermediate_size=56)
    sizes = ExpertSizes(COUNT, INNER, ROUTING, shared_size=56, shared_gate=True)
    return modeling_qwen3_5_moe.Qwen3_5MoeSparseMoeBlock(config), sizes


@pytest.fixture(params=["cpp", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return CpuKernels(built_library(), 1) if request.param == "cpp" else reference  # type: ignore[return-value]


def computed(layer: Experts, x: Tensor) -> Tensor:
    """Returns the output of a layer for x [T, N]."""
    empty = torch.empty(len(x), dtype=torch.int32)
    rows = RaggedRows(empty[:, None], empty, empty, empty, empty, empty, empty.long(), 1)
    context = ForwardContext(Workspace(x.dtype, x.device), HIDDEN, rows, (), reference.paged_attention)
    out = torch.empty_like(x)
    layer.reserve(context.take)
    layer.forward(out, x, context)
    return out


@pytest.mark.parametrize("made", [gpt_oss, mixtral, shared])
def test_layer_of_experts_equals_the_module_of_transformers(
    made: Callable[[], tuple[Any, ExpertSizes]], kernels: Kernels, tmp_path: Path
) -> None:
    module, sizes = made()
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    module.experts.config._experts_implementation = "eager"
    tensors = {f"layers.0.mlp.{name}": tensor.contiguous() for name, tensor in module.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    x = torch.randn((17, HIDDEN), generator=generator)
    with torch.inference_mode(), closing(Checkpoint(tmp_path)) as checkpoint:
        weights = WeightReader(CheckpointSource(checkpoint, torch.float32), kernels).at("layers.0")
        layer = Experts.read(weights, HIDDEN, sizes.named_as(checkpoint, "layers.0."), 0, 1)
        found, expected = computed(layer, x), module(x[None])
        torch.testing.assert_close(found, (expected[0] if isinstance(expected, tuple) else expected)[0], atol=5e-5, rtol=5e-5)
    assert sum(tensor.numel() for tensor in layer.tensors()) >= sum(tensor.numel() for tensor in tensors.values())


def test_loading_has_few_unpacked_experts_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts, after each read of a matrix from the checkpoint, the matrices read so far that are still in memory."""
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    tensors = {
        f"mlp.experts.{expert}.{name}.weight": torch.randn(shape) for expert in range(COUNT) for name, shape in shapes.items()
    }
    save_file({**tensors, "mlp.gate.weight": torch.randn(COUNT, HIDDEN)}, tmp_path / "model.safetensors", {"format": "pt"})
    read, made, most = CheckpointSource.matrix, list[weakref.ref[Any]](), [0]

    def matrix(source: CheckpointSource, parts: Any, is_head: bool) -> Any:
        found = read(source, parts, is_head)
        made.append(weakref.ref(found))
        most[0] = max(most[0], sum(each() is not None for each in made))
        return found

    monkeypatch.setattr(CheckpointSource, "matrix", matrix)
    with closing(Checkpoint(tmp_path)) as checkpoint:
        Experts.read(
            WeightReader(CheckpointSource(checkpoint, torch.bfloat16), CpuKernels(built_library(), 1)), HIDDEN, SIZES, 0, 1
        )
    assert len(made) == 2 * COUNT and most[0] <= 4, "the matrices of two experts at most"


def test_random_experts_differ() -> None:
    source = RandomSource(torch.float32, "cpu", seed=1)
    layer = Experts.read(WeightReader(source, reference), HIDDEN, SIZES, 0, 1)  # type: ignore[arg-type]
    data = layer.packed.gate_up.data
    assert data.shape == (COUNT, 2 * INNER, HIDDEN) and not torch.equal(data[0], data[1])
