"""Creates the cases of paged attention at the shapes of two dense models: decode, prompts, and a chunk after a long prefix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from rootstock_llm.kernels.bench.gpu_timing import GpuCase, Work
from rootstock_llm.kernels.contracts.ops import RaggedRows, ScoreRule
from rootstock_llm.kernels.triton.attention.attention import (
    AttentionCall,
    allocate_scratch,
    head_shape,
    plan_call,
    run_attention,
)
from rootstock_llm.kernels.triton.attention.attention_plan import Launch

DTYPE, SIZE, PAGE_SIZE, KV_HEADS, HEAD_DIM = torch.bfloat16, 2, 16, 8, 128
MODELS = {"0.6B": 16, "8B": 32}  # number of query heads by model


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """The sizes of a batch: `rows` rows of `count` tokens. Each row has `start` earlier tokens in the KV pool."""

    model: str
    rows: int
    start: int
    count: int

    @property
    def name(self) -> str:
        return f"attention {self.model} {self.rows}x{self.count} at {self.start}"

    @property
    def heads(self) -> int:
        return MODELS[self.model]

    @property
    def context(self) -> int:
        return self.start + self.count

    @property
    def bytes_moved(self) -> int:
        """Bytes of keys, values, queries and outputs, each counted once."""
        own = 2 * self.rows * self.count * self.heads
        return (own + 2 * self.rows * self.context * KV_HEADS) * HEAD_DIM * SIZE

    @property
    def flops(self) -> int:
        """Floating-point operations for all pairs of a token and a position to which it attends."""
        pairs = self.rows * (self.count * self.start + self.count * (self.count + 1) // 2)
        return 4 * pairs * self.heads * HEAD_DIM


def decode_sizes() -> list[AttentionSizes]:
    few = [AttentionSizes(model, 1, context - 1, 1) for model in MODELS for context in (1024, 16384)]
    return few + [AttentionSizes(model, rows, 1023, 1) for model in MODELS for rows in (64, 256)]


def extend_sizes() -> list[AttentionSizes]:
    return [AttentionSizes(model, *sizes) for model in MODELS for sizes in ((4, 0, 2048), (1, 8192, 512), (16, 4096, 8))]


def rows_of(sizes: AttentionSizes, device: torch.device) -> RaggedRows:
    """Returns rows on shuffled pages, as on a worker that has served for some time."""
    width = -(-sizes.context // PAGE_SIZE)
    table = torch.randperm(sizes.rows * width, device=device).view(sizes.rows, width).int()
    positions = (torch.arange(sizes.count, device=device) + sizes.start).repeat(sizes.rows)
    numbers = torch.arange(sizes.rows, dtype=torch.int32, device=device)
    return RaggedRows(
        page_table=table,
        slots=numbers,
        starts=torch.full_like(numbers, sizes.start),
        num_tokens=torch.full_like(numbers, sizes.count),
        offsets=numbers * sizes.count,
        positions=positions.int(),
        locations=torch.zeros_like(positions),
        max_context=sizes.context,
    )


def call_of(sizes: AttentionSizes, device: torch.device) -> AttentionCall:
    rows, tokens = rows_of(sizes, device), sizes.rows * sizes.count
    pool = (rows.page_table.numel(), KV_HEADS, PAGE_SIZE, HEAD_DIM)
    k_pool, v_pool = (torch.randn(pool, device=device, dtype=DTYPE) for _ in "kv")
    qkv = torch.randn(tokens, (sizes.heads + 2 * KV_HEADS) * HEAD_DIM, device=device, dtype=DTYPE)
    out = torch.empty(tokens, sizes.heads * HEAD_DIM, device=device, dtype=DTYPE)
    return AttentionCall.of(out, qkv, k_pool, v_pool, rows, ScoreRule(HEAD_DIM**-0.5))


def ours(sizes: AttentionSizes, device: torch.device, merge_apart: bool = False) -> Work:
    """Returns paged attention with the planned launch. With merge_apart, a separate kernel merges the splits."""
    call = call_of(sizes, device)
    return work_of(
        call,
        plan_call(head_shape(call.q, call.k_pool, call.v_pool), call.rows, len(call.q), call.rule.window, device),
        merge_apart,
    )


def work_of(call: AttentionCall, launch: Launch, merge_apart: bool = False) -> Work:
    shape = head_shape(call.q, call.k_pool, call.v_pool)
    scratch = allocate_scratch(launch.scratch_lanes, launch.counters, HEAD_DIM, call.out.device)
    return lambda: run_attention(call, shape, launch, scratch, merge_apart)


def plain(sizes: AttentionSizes, device: torch.device) -> Work:
    """Returns torch's attention over contiguous keys and values. For prompts, each query head has a separate copy of both."""
    q = torch.randn(sizes.rows, sizes.heads, sizes.count, HEAD_DIM, device=device, dtype=DTYPE)
    keys, values = (torch.randn(sizes.rows, KV_HEADS, sizes.context, HEAD_DIM, device=device, dtype=DTYPE) for _ in "kv")
    if sizes.count == 1:
        return lambda: functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
    group = sizes.heads // KV_HEADS
    wide_keys, wide_values = (tensor.repeat_interleave(group, dim=1) for tensor in (keys, values))
    if sizes.start == 0:
        return lambda: functional.scaled_dot_product_attention(q, wide_keys, wide_values, is_causal=True)
    mask: Tensor = causal_lower_right(sizes.count, sizes.context)
    return lambda: functional.scaled_dot_product_attention(q, wide_keys, wide_values, attn_mask=mask)


def cases() -> list[GpuCase]:
    found = []
    for sizes in decode_sizes() + extend_sizes():
        make = lambda device, sizes=sizes: ours(sizes, device)  # noqa: E731
        other = lambda device, sizes=sizes: plain(sizes, device)  # noqa: E731
        found.append(GpuCase(sizes.name, make, sizes.bytes_moved, sizes.flops, plain=other))
    for sizes in decode_sizes()[:4]:
        apart = lambda device, sizes=sizes: ours(sizes, device, merge_apart=True)  # noqa: E731
        found.append(GpuCase(f"{sizes.name}, merged apart", apart, sizes.bytes_moved, sizes.flops))
    return found
