"""Creates the cases of routers and experts, for a mixture of 30 billion parameters. A token uses 3 billion of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rootstock_llm.kernels.bench.gpu_layers import DTYPE, SIZE
from rootstock_llm.kernels.bench.gpu_timing import GpuCase, Work
from rootstock_llm.kernels.contracts.ops import SWIGLU, Routing
from rootstock_llm.kernels.triton.layers.layers import TritonLayers


@dataclass(frozen=True, slots=True)
class MixtureShape:
    name: str
    hidden: int
    inner: int  # intermediate size of an expert
    experts: int
    chosen: int  # experts per token


SHAPE = MixtureShape("30B-A3B", 2048, 768, 128, 8)
TOKENS = (1, 16, 128, 8192)


def _route_case(shape: MixtureShape, tokens: int) -> GpuCase:
    def make(device: torch.device) -> Work:
        kernels, logits = TritonLayers(device), torch.randn(tokens, shape.experts, device=device)
        weights = torch.empty(tokens, shape.chosen, device=device)
        ids = torch.empty(tokens, shape.chosen, dtype=torch.int32, device=device)
        routing = Routing(shape.chosen, renormalize=True)
        return lambda: kernels.route(weights, ids, logits, None, routing)

    return GpuCase(f"route {shape.name} {tokens}", make, tokens * (shape.experts + 2 * shape.chosen) * 4)


def experts_case(shape: MixtureShape, tokens: int, deterministic: bool = False) -> GpuCase:
    """Creates a case in which the tokens use all experts equally often, or as many different experts as possible."""
    used = min(shape.experts, tokens * shape.chosen)
    per_expert = 3 * shape.hidden * shape.inner

    def make(device: torch.device) -> Work:
        kernels = TritonLayers(device, deterministic)
        x = torch.randn(tokens, shape.hidden, dtype=DTYPE, device=device)
        gate_up = torch.randn(shape.experts, 2 * shape.inner, shape.hidden, dtype=DTYPE, device=device)
        down = torch.randn(shape.experts, shape.hidden, shape.inner, dtype=DTYPE, device=device)
        packed = kernels.pack_experts(gate_up, None, down, None, SWIGLU)
        pairs = torch.arange(tokens * shape.chosen, dtype=torch.int32, device=device)
        ids = (pairs % shape.experts).view(tokens, shape.chosen)
        weights, out = torch.rand(tokens, shape.chosen, device=device), torch.empty_like(x)
        return lambda: kernels.experts(out, x, ids, weights, packed)

    name = f"{'deterministic ' if deterministic else ''}experts {shape.name} {tokens}"
    flops = 2 * tokens * shape.chosen * per_expert
    return GpuCase(name, make, (used * per_expert + 2 * tokens * shape.hidden) * SIZE, flops)


def cases(shape: MixtureShape = SHAPE, tokens: tuple[int, ...] = TOKENS) -> list[GpuCase]:
    return [case for count in tokens for case in (_route_case(shape, count), experts_case(shape, count))]
