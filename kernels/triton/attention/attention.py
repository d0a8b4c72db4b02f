"""Launches paged attention in Triton, with the signatures of rootstock_llm.kernels.contracts.ops.Kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import RaggedRows, ScoreRule
from rootstock_llm.kernels.triton.attention.attention_kernel import attention_kernel
from rootstock_llm.kernels.triton.attention.attention_merge import merge_kernel
from rootstock_llm.kernels.triton.attention.attention_plan import (
    MAX_SPLITS,
    MIN_DOT,
    HeadShape,
    Launch,
    num_multiprocessors,
    plan_decode,
    plan_extend,
    reach,
    shared_memory_of,
)
from rootstock_llm.kernels.triton.launch import chained


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """Memory for the partial results of splits. Only one launch at a time may use it.

    Captured graphs contain its addresses, so it must not be moved.
    """

    partials: Tensor  # float32[lanes, E]: weighted mean of the values, per split and query lane
    levels: Tensor  # float32[lanes]: log2 of the softmax sum, per split and query lane
    arrivals: Tensor  # int32[counters]: number of ended programs per tile; 0 between launches

    def holds(self, launch: Launch, value_dim: int) -> bool:
        """Whether the scratch is large enough for the launch."""
        return self.partials.numel() >= launch.scratch_lanes * value_dim and self.arrivals.numel() >= launch.counters


def allocate_scratch(lanes: int, counters: int, value_dim: int, device: torch.device) -> AttentionScratch:
    """Allocates scratch for launches whose scratch_lanes and counters are at most `lanes` and `counters`. value_dim is E."""
    return AttentionScratch(
        partials=torch.empty(max(lanes, 1), value_dim, dtype=torch.float32, device=device),
        levels=torch.empty(max(lanes, 1), dtype=torch.float32, device=device),
        arrivals=torch.zeros(max(counters, 1), dtype=torch.int32, device=device),
    )


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Arguments of one layer's attention; see Kernels.paged_attention."""

    out: Tensor  # [T, H, E]
    q: Tensor  # [T, H, D], strided except in its last dimension
    k_pool: Tensor  # [P, G, S, D]
    v_pool: Tensor  # [P, G, S, E]
    rows: RaggedRows
    rule: ScoreRule

    @classmethod
    def of(cls, out: Tensor, q: Tensor, k_pool: Tensor, v_pool: Tensor, rows: RaggedRows, rule: ScoreRule) -> AttentionCall:
        """Returns the call with views of out [T, H E] and of the first H D columns of q [T, C]."""
        tokens, head_dim, value_dim = len(q), k_pool.shape[3], v_pool.shape[3]
        heads = out.shape[1] // value_dim
        queries = q[:, : heads * head_dim].view(tokens, heads, head_dim)
        return cls(out.view(tokens, heads, value_dim), queries, k_pool, v_pool, rows, rule)


def head_shape(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> HeadShape:
    """Returns the sizes of q [T, H, D] and the pools [P, G, S, D] and [P, G, S, E]. Raises ValueError if they do not fit."""
    kv_heads, head_dim = k_pool.shape[1], k_pool.shape[3]
    if v_pool.shape[:3] != k_pool.shape[:3] or q.shape[2] != head_dim or q.shape[1] % kv_heads:
        raise ValueError(f"q {tuple(q.shape)} does not fit pools {tuple(k_pool.shape)} and {tuple(v_pool.shape)}")
    shared = shared_memory_of(k_pool.device)
    return HeadShape(kv_heads, q.shape[1] // kv_heads, head_dim, v_pool.shape[3], k_pool.element_size(), shared)


def plan_call(shape: HeadShape, rows: RaggedRows, num_tokens: int, window: int, device: torch.device) -> Launch:
    """Plans a launch. If num_tokens equals the number of rows, each row is assumed to have one token."""
    num_rows, multiprocessors = rows.slots.shape[0], num_multiprocessors(device)
    seen = reach(rows.max_context, window)
    if num_tokens == num_rows:
        return plan_decode(shape, 0, num_rows, seen, multiprocessors)
    return plan_extend(shape, num_rows, num_tokens, seen, multiprocessors)


def paged_attention(out: Tensor, q: Tensor, k_pool: Tensor, v_pool: Tensor, rows: RaggedRows, rule: ScoreRule) -> None:
    """Implements Kernels.paged_attention(). If T equals R, each row is assumed to have one token.

    The rows of q may be strided. Allocates scratch if the plan splits keys.
    """
    if q.shape[0] == 0:
        return
    call = AttentionCall.of(out, q, k_pool, v_pool, rows, rule)
    shape = head_shape(call.q, k_pool, v_pool)
    launch = plan_call(shape, rows, q.shape[0], rule.window, q.device)
    scratch = allocate_scratch(launch.scratch_lanes, launch.counters, shape.value_dim, q.device) if launch.splits else None
    run_attention(call, shape, launch, scratch)


def run_attention(
    call: AttentionCall, shape: HeadShape, launch: Launch, scratch: AttentionScratch | None, merge_apart: bool = False
) -> None:
    """Launches the kernels of a plan. Allocates nothing and reads no device value on the host.

    Args:
        call: the tensors.
        shape: the result of head_shape() for these tensors.
        launch: the plan.
        scratch: memory for splits; None if the plan does not split.
        merge_apart: whether a second launch merges the splits. If False, the program that ends last for a tile merges the tile's
            splits. Plans with dealt or fixed splits do not support a second launch.

    Raises:
        ValueError: the tensors do not fit, or the scratch is too small.
    """
    _check(call, shape, launch, scratch, merge_apart)
    out, rows, rule, blocks, splits = call.out, call.rows, call.rule, launch.blocks, launch.splits
    unused = call.out
    partials, levels, arrivals = (scratch.partials, scratch.levels, scratch.arrivals) if scratch else (unused, unused, unused)
    sinks = unused if rule.sinks is None else rule.sinks
    log2e = math.log2(math.e)
    sizes = {
        "NUM_KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.group,
        "HEADS": launch.heads,
        "VALUE_DIM": shape.value_dim,
        "BLOCK_M": blocks.m,
        "BLOCK_N": blocks.n,
        "BLOCK_E": max(triton.next_power_of_2(shape.value_dim), MIN_DOT),
        "MIN_BLOCKS": launch.min_blocks,
        "ONE_TOKEN": launch.one_token,
        "HAS_WINDOW": rule.window > 0,
        "HAS_SINKS": rule.sinks is not None,
    }
    columns = (rows.slots, rows.starts, rows.num_tokens, rows.offsets, sinks)
    attention_kernel[launch.programs, max(splits, 1)](
        out,
        call.q,
        call.k_pool,
        call.v_pool,
        rows.page_table,
        *columns,
        partials,
        levels,
        arrivals,
        out.stride(0),
        call.q.stride(0),
        call.q.stride(1),
        rows.page_table.stride(0),
        launch.first_row,
        launch.num_rows,
        rule.window,
        launch.split_capacity or splits,
        rule.scale / rule.softcap if rule.softcap else rule.scale * log2e,
        rule.softcap * log2e,
        **sizes,
        HEAD_DIM=shape.head_dim,
        PAGE_SIZE=call.k_pool.shape[2],
        BLOCK_D=max(triton.next_power_of_2(shape.head_dim), MIN_DOT),
        MAX_SPLITS=MAX_SPLITS,
        SPLIT=splits > 0,
        DEAL=launch.extra > 0,
        FIXED=launch.fixed,
        MERGE=not merge_apart,
        HAS_SOFTCAP=rule.softcap != 0,
        LANES=int(triton.next_power_of_2(launch.heads)) if launch.one_token else blocks.m,
        UPCAST=out.device.type == "cpu" and out.dtype == torch.bfloat16,  # the interpreter cannot multiply bfloat16
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        enable_fp_fusion=not launch.fixed,  # fusion changes bits, and it differs between the variants that Triton compiles
        **chained(out.device),
    )
    if merge_apart and splits > 1:
        merge_kernel[launch.programs,](
            out, *columns, partials, levels, out.stride(0), launch.first_row, launch.num_rows, rule.window, splits, **sizes
        )


def _check(call: AttentionCall, shape: HeadShape, launch: Launch, scratch: AttentionScratch | None, merge_apart: bool) -> None:
    out, q = call.out, call.q
    if out.shape != (q.shape[0], q.shape[1], shape.value_dim) or q.stride(2) != 1:
        raise ValueError(f"out {tuple(out.shape)} does not fit q {tuple(q.shape)} and values of {shape.value_dim}")
    if not (out.is_contiguous() and call.k_pool.is_contiguous() and call.v_pool.is_contiguous()):
        raise ValueError("out and the pools must be contiguous")
    if not out.dtype == q.dtype == call.k_pool.dtype == call.v_pool.dtype:
        dtypes = f"{out.dtype}, {q.dtype}, {call.k_pool.dtype} and {call.v_pool.dtype}"
        raise ValueError(f"out, q and the pools must have one dtype; they have {dtypes}")
    sinks = call.rule.sinks
    if sinks is not None and (sinks.shape != (q.shape[1],) or sinks.dtype != torch.float32):
        raise ValueError(f"sinks {tuple(sinks.shape)} {sinks.dtype} are not float32 numbers of {q.shape[1]} heads")
    if merge_apart and (launch.extra or launch.fixed):
        raise ValueError("a launch with dealt or fixed splits does not support merge_apart")
    if launch.splits and (scratch is None or not scratch.holds(launch, shape.value_dim)):
        raise ValueError("the scratch is missing or too small for the launch's splits")
