"""Attention over pages in Triton, with the signatures of kernels.contracts.ops.Kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.contracts.ops import RaggedRows
from kernels.triton.attention.attention_kernel import attention_kernel
from kernels.triton.attention.attention_merge import merge_kernel
from kernels.triton.attention.attention_plan import (
    MAX_SPLITS,
    MIN_DOT,
    HeadShape,
    Launch,
    num_multiprocessors,
    plan_decode,
    plan_extend,
    reach,
)
from kernels.triton.chaining import chained


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """Where splits leave what they found. One launch at a time may use it; captured graphs keep its addresses.

    partials: float32[lanes, E]. levels: float32[lanes]. arrivals: int32[counters], 0 between launches.
    """

    partials: Tensor
    levels: Tensor
    arrivals: Tensor

    def holds(self, launch: Launch, value_dim: int) -> bool:
        return self.partials.numel() >= launch.scratch_lanes * value_dim and self.arrivals.numel() >= launch.counters


def allocate_scratch(lanes: int, counters: int, value_dim: int, device: torch.device) -> AttentionScratch:
    """For launches of at most so many scratch_lanes and counters."""
    return AttentionScratch(
        partials=torch.empty(max(lanes, 1), value_dim, dtype=torch.float32, device=device),
        levels=torch.empty(max(lanes, 1), dtype=torch.float32, device=device),
        arrivals=torch.zeros(max(counters, 1), dtype=torch.int32, device=device),
    )


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Tensors and numbers of one layer's attention; see Kernels.general_attention."""

    out: Tensor
    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    rows: RaggedRows
    scale: float
    window: int
    softcap: float = 0.0
    sinks: Tensor | None = None


def head_shape(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> HeadShape:
    """q [T, H, D], pools [P, G, S, D] and [P, G, S, E]. Raises ValueError where they do not fit."""
    kv_heads, head_dim = k_pool.shape[1], k_pool.shape[3]
    if v_pool.shape[:3] != k_pool.shape[:3] or q.shape[2] != head_dim or q.shape[1] % kv_heads:
        raise ValueError(f"q {tuple(q.shape)} does not fit pools {tuple(k_pool.shape)} and {tuple(v_pool.shape)}")
    return HeadShape(kv_heads, q.shape[1] // kv_heads, head_dim, v_pool.shape[3], k_pool.element_size())


def plan_call(shape: HeadShape, rows: RaggedRows, num_tokens: int, window: int, device: torch.device) -> Launch:
    """As many tokens as rows: taken for rows of one token each."""
    num_rows, multiprocessors = rows.slots.shape[0], num_multiprocessors(device)
    seen = reach(rows.max_context, window)
    if num_tokens == num_rows:
        return plan_decode(shape, 0, num_rows, seen, multiprocessors)
    return plan_extend(shape, num_rows, num_tokens, seen, multiprocessors)


def paged_attention(
    out: Tensor, qkv: Tensor, k_pool: Tensor, v_pool: Tensor, rows: RaggedRows, scale: float, window: int
) -> None:
    """See Kernels.paged_attention. Rows follow each other in the batch; T == R is taken for one token a row."""
    general_attention(*as_heads(out, qkv, k_pool, v_pool), k_pool, v_pool, rows, scale, window)


def as_heads(out: Tensor, qkv: Tensor, k_pool: Tensor, v_pool: Tensor) -> tuple[Tensor, Tensor]:
    """out [T, H E] as [T, H, E], and the first H D columns of qkv [T, (H + 2 G) D] as [T, H, D]."""
    tokens, head_dim, value_dim = qkv.shape[0], k_pool.shape[3], v_pool.shape[3]
    heads = out.shape[1] // value_dim
    return out.view(tokens, heads, value_dim), qkv[:, : heads * head_dim].view(tokens, heads, head_dim)


def general_attention(
    out: Tensor,
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    rows: RaggedRows,
    scale: float,
    window: int,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """See Kernels.general_attention. q may be strided but for its last dimension. Scratch is allocated where keys are split."""
    if q.shape[0] == 0:
        return
    shape = head_shape(q, k_pool, v_pool)
    launch = plan_call(shape, rows, q.shape[0], window, q.device)
    scratch = allocate_scratch(launch.scratch_lanes, launch.counters, shape.value_dim, q.device) if launch.splits else None
    run_attention(AttentionCall(out, q, k_pool, v_pool, rows, scale, window, softcap, sinks), shape, launch, scratch)


def run_attention(
    call: AttentionCall, shape: HeadShape, launch: Launch, scratch: AttentionScratch | None, merge_apart: bool = False
) -> None:
    """Launches; allocates nothing and looks at no value. merge_apart: splits are merged by a launch of their own, not by the
    last of them to end; not of a launch with `extra`. Raises ValueError for tensors that do not fit, or scratch that is too
    small."""
    _check(call, shape, launch, scratch, merge_apart)
    out, rows, blocks, splits = call.out, call.rows, launch.blocks, launch.splits
    unused = call.out
    partials, levels, arrivals = (scratch.partials, scratch.levels, scratch.arrivals) if scratch else (unused, unused, unused)
    sinks = unused if call.sinks is None else call.sinks
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
        "HAS_WINDOW": call.window > 0,
        "HAS_SINKS": call.sinks is not None,
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
        call.window,
        launch.room or splits,
        call.scale / call.softcap if call.softcap else call.scale * log2e,
        call.softcap * log2e,
        **sizes,
        HEAD_DIM=shape.head_dim,
        PAGE_SIZE=call.k_pool.shape[2],
        BLOCK_D=max(triton.next_power_of_2(shape.head_dim), MIN_DOT),
        MAX_SPLITS=MAX_SPLITS,
        SPLIT=splits > 0,
        DEAL=launch.extra > 0,
        FIXED=launch.fixed,
        MERGE=not merge_apart,
        HAS_SOFTCAP=call.softcap != 0,
        LANES=int(triton.next_power_of_2(launch.heads)) if launch.one_token else blocks.m,
        UPCAST=out.device.type == "cpu" and out.dtype == torch.bfloat16,  # the interpreter multiplies no bfloat16
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        enable_fp_fusion=not launch.fixed,  # what is fused depends on what stands beside it
        **chained(out.device),
    )
    if merge_apart and splits > 1:
        merge_kernel[launch.programs,](
            out, *columns, partials, levels, out.stride(0), launch.first_row, launch.num_rows, call.window, splits, **sizes
        )


def _check(call: AttentionCall, shape: HeadShape, launch: Launch, scratch: AttentionScratch | None, merge_apart: bool) -> None:
    out, q = call.out, call.q
    if out.shape != (q.shape[0], q.shape[1], shape.value_dim) or q.stride(2) != 1:
        raise ValueError(f"out {tuple(out.shape)} does not fit q {tuple(q.shape)} and values of {shape.value_dim}")
    if not (out.is_contiguous() and call.k_pool.is_contiguous() and call.v_pool.is_contiguous()):
        raise ValueError("out and the pools are contiguous")
    if not out.dtype == q.dtype == call.k_pool.dtype == call.v_pool.dtype:
        raise ValueError(f"one dtype for all, not {out.dtype}, {q.dtype}, {call.k_pool.dtype} and {call.v_pool.dtype}")
    if call.sinks is not None and call.sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks {tuple(call.sinks.shape)} for {q.shape[1]} heads")
    if merge_apart and (launch.extra or launch.fixed):
        raise ValueError("splits that are dealt out by length, or fixed, are merged by the last of them to end")
    if launch.splits and (scratch is None or not scratch.holds(launch, shape.value_dim)):
        raise ValueError("no scratch that holds the launch's splits")
