"""Creates the cases of deterministic kernels: linear layers, rope_write_kv, experts and attention.

Linear layers and attention are compared with the ordinary kernels, and rope_write_kv with torch. Experts have no comparison.
"""

from __future__ import annotations

import torch

from rootstock_llm.kernels.bench.gpu_attention import AttentionSizes, call_of, decode_sizes, extend_sizes, ours, work_of
from rootstock_llm.kernels.bench.gpu_experts import SHAPE, experts_case
from rootstock_llm.kernels.bench.gpu_layers import DTYPE, SHAPES, SIZE, DecoderShape, rope_case
from rootstock_llm.kernels.bench.gpu_timing import GpuCase, Make, Work
from rootstock_llm.kernels.triton.attention.attention import head_shape
from rootstock_llm.kernels.triton.attention.attention_plan import fixed_split_size, num_multiprocessors, plan_fixed
from rootstock_llm.kernels.triton.layers.layers import TritonLayers

TOKENS = (1, 64, 256, 8192)
MAX_CONTEXT = 32768  # context of the benchmarked worker, which determines the fixed splits


def _linear_case(shape: DecoderShape, layer: str, ins: int, outs: int, tokens: int) -> GpuCase:
    def make_with(deterministic: bool) -> Make:
        def make(device: torch.device) -> Work:
            kernels = TritonLayers(device, deterministic)
            x = torch.randn(tokens, ins, device=device, dtype=DTYPE)
            weight = kernels.pack_linear(torch.randn(outs, ins, device=device, dtype=DTYPE), None)
            out = torch.empty(tokens, outs, dtype=DTYPE, device=device)
            return lambda: kernels.linear(out, x, weight)

        return make

    moved = (outs * ins + tokens * (ins + outs)) * SIZE
    name = f"deterministic linear {layer} {shape.name} {tokens}"
    return GpuCase(name, make_with(True), moved, flops=2 * tokens * ins * outs, plain=make_with(False))


def _attention(sizes: AttentionSizes, device: torch.device) -> Work:
    call = call_of(sizes, device)
    shape = head_shape(call.q, call.k_pool, call.v_pool)
    split_size, multiprocessors = fixed_split_size(MAX_CONTEXT), num_multiprocessors(device)
    one_token = len(call.q) == sizes.rows
    return work_of(call, plan_fixed(shape, sizes.rows, len(call.q), sizes.context, split_size, multiprocessors, one_token))


def cases(shapes: tuple[DecoderShape, ...] = SHAPES, tokens: tuple[int, ...] = TOKENS) -> list[GpuCase]:
    found: list[GpuCase] = []
    for shape in shapes:
        layers = {"qkv": (shape.hidden, shape.qkv), "o": (shape.heads * shape.head_dim, shape.hidden)}
        layers |= {"gate_up": (shape.hidden, 2 * shape.inner), "down": (shape.inner, shape.hidden)}
        found += [_linear_case(shape, layer, *sizes, count) for count in tokens for layer, sizes in layers.items()]
        found += [rope_case(shape, count, 1024, deterministic=True) for count in tokens]
    found += [experts_case(SHAPE, count, deterministic=True) for count in tokens]
    for sizes in decode_sizes() + extend_sizes():
        make = lambda device, sizes=sizes: _attention(sizes, device)  # noqa: E731
        other = lambda device, sizes=sizes: ours(sizes, device)  # noqa: E731
        found.append(GpuCase(f"deterministic {sizes.name}", make, sizes.bytes_moved, sizes.flops, plain=other))
    return found
