"""Makes random attention steps, and calls of kernels for a step: FlashInfer's FA2, FA3 and decode kernels, and Triton's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rootstock_llm.kernels.bench.gpu_timing import Work
from rootstock_llm.kernels.contracts.ops import RaggedRows, ScoreRule
from rootstock_llm.kernels.reference import layers
from rootstock_llm.services.worker.exec.attention import flashinfer_limits as limits
from rootstock_llm.services.worker.exec.attention import flashinfer_wrappers as wrappers
from rootstock_llm.services.worker.exec.attention.backend import AttentionShape
from rootstock_llm.services.worker.exec.attention.flashinfer_staging import columns_size, fill, host_memory

MULTIPROCESSORS = 132  # assumed if there is no GPU
TRITON, FLASHINFER = "triton", "flashinfer"
GRAPH_KINDS = {f"{FLASHINFER} fa2, graph": True, f"{FLASHINFER} decode, graph": False}  # by kind: whether it uses tensor cores
EAGER_KINDS = {f"{FLASHINFER} fa2": "fa2", f"{FLASHINFER} fa3": "fa3"}  # by kind: FlashInfer's name of the backend


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The rows of an attention step. Row i computes `count` tokens after a context of starts[i] tokens."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    starts: tuple[int, ...]
    count: int = 1

    @property
    def tokens(self) -> int:
        return len(self.starts) * self.count

    @property
    def lengths(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.array(self.starts, dtype=np.int32) + np.int32(self.count)

    def bytes_moved(self, itemsize: int) -> int:
        """Returns the bytes of all keys and values, of the queries and of the outputs, each once."""
        return 2 * itemsize * self.head_dim * (int(self.lengths.sum()) * self.kv_heads + self.tokens * self.heads)

    def shape(self) -> AttentionShape:
        pages = -(-self.lengths // self.page_size)
        sizes = (self.heads, self.kv_heads, self.head_dim, self.head_dim, self.page_size, (0,))
        return AttentionShape(*sizes, len(self.starts), self.tokens, int(self.lengths.max()), int(pages.sum()))


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Input and output tensors of a step. T: computed tokens; H, H_kv: heads; D: head dimension; N: pages of all rows."""

    batch: StepBatch
    out: Tensor  # [T, H D]
    qkv: Tensor  # [T, (H + 2 H_kv) D]
    k_pool: Tensor  # [pages, H_kv, page, D]
    v_pool: Tensor  # like k_pool
    rows: RaggedRows
    indices: Tensor  # int32[N], page numbers, row by row

    @property
    def scale(self) -> float:
        return self.batch.head_dim**-0.5

    def as_heads(self) -> tuple[Tensor, Tensor]:
        """Returns outputs and queries as views of shape [T, H, D]."""
        batch = self.batch
        out = self.out.view(-1, batch.heads, batch.head_dim)
        return out, self.qkv[:, : self.out.shape[1]].view(out.shape)


def tensors_of(batch: StepBatch, device: torch.device, dtype: torch.dtype) -> StepTensors:
    """Returns random tensors, equal for equal batches. The pages are shuffled, as after a while of serving."""
    made = torch.Generator(device).manual_seed(0)
    random = {"device": device, "dtype": dtype, "generator": made}
    pages = -(-batch.lengths // batch.page_size)
    indices = torch.empty(int(pages.sum()), dtype=torch.int32, device=device)
    indices.copy_(torch.randperm(len(indices), generator=made, device=device))
    table = torch.zeros(len(pages), int(pages.max()), dtype=torch.int32, device=device)
    for row, (first, count) in enumerate(zip(np.cumsum(pages) - pages, pages, strict=True)):
        table[row, : int(count)] = indices[int(first) : int(first + count)]
    pool = (len(indices), batch.kv_heads, batch.page_size, batch.head_dim)
    numbers = torch.arange(len(pages), dtype=torch.int32, device=device)
    starts = torch.tensor(batch.starts, dtype=torch.int32, device=device)
    positions = (starts[:, None] + torch.arange(batch.count, device=device)).flatten()
    return StepTensors(
        batch=batch,
        out=torch.zeros(batch.tokens, batch.heads * batch.head_dim, device=device, dtype=dtype),
        qkv=torch.randn(batch.tokens, (batch.heads + 2 * batch.kv_heads) * batch.head_dim, **random),  # type: ignore[arg-type]
        k_pool=torch.randn(pool, **random),  # type: ignore[arg-type]
        v_pool=torch.randn(pool, **random),  # type: ignore[arg-type]
        rows=RaggedRows(
            page_table=table,
            slots=numbers,
            starts=starts,
            num_tokens=torch.full_like(numbers, batch.count),
            offsets=numbers * batch.count,
            positions=positions.int(),
            locations=torch.zeros_like(positions, dtype=torch.int64),
            max_context=int(batch.lengths.max()),
        ),
        indices=indices,
    )


def torch_work(step: StepTensors) -> Work:
    return lambda: layers.paged_attention(step.out, step.qkv, step.k_pool, step.v_pool, step.rows, ScoreRule(step.scale))


def triton_work(step: StepTensors, splits: int = 0) -> Work:
    """Returns a call of Triton's attention with `splits` splits per row; 0: with the number that the plan chooses."""
    from rootstock_llm.kernels.triton.attention import attention, attention_plan

    out, queries = step.as_heads()
    call = attention.AttentionCall(out, queries, step.k_pool, step.v_pool, step.rows, ScoreRule(step.scale))
    shape = attention.head_shape(queries, step.k_pool, step.v_pool)
    launch = attention.plan_call(shape, step.rows, len(queries), 0, queries.device)
    if splits:
        launch = attention_plan.retiled(shape, launch, launch.blocks, splits, len(queries))
    scratch = attention.allocate_scratch(launch.scratch_lanes, launch.counters, shape.value_dim, queries.device)
    return lambda: attention.run_attention(call, shape, launch, scratch)


def flashinfer_work(step: StepTensors, kind: str, module: Any) -> Work:
    """Returns a call of a FlashInfer wrapper.

    Args:
        kind: name in GRAPH_KINDS or EAGER_KINDS. A graph kind is planned from the number of rows only, like a captured step; an
            eager kind is planned from the lengths too.
        module: the package flashinfer.

    Raises:
        Exception: any error of FlashInfer if it does not support the step.
    """
    batch, device = step.batch, step.out.device
    shape, rows = batch.shape(), len(batch.starts)
    limits.check(shape, step.qkv.dtype)
    planner = wrappers.WrapperPlanner(module, shape, step.qkv.dtype)
    counts = np.full(rows, batch.count, dtype=np.int32)
    host = host_memory(columns_size(rows), torch.int32, device)
    columns = fill(host, np.array(batch.starts, dtype=np.int32), counts, batch.page_size)
    pages = wrappers.PageMemory(torch.zeros(2 * rows + 1, dtype=torch.int32, device=device), step.indices)
    pages.columns.copy_(host[: 2 * rows + 1])
    places = pages.step(rows, columns.num_pages)
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else MULTIPROCESSORS
    workspace = torch.zeros(limits.float_bytes(shape, processors, rows), dtype=torch.uint8, device=device)
    schedule = limits.int_bytes(shape, processors)
    if kind in GRAPH_KINDS:
        wrapper = wrappers.graph_wrapper(module, workspace, pages, rows, GRAPH_KINDS[kind])
    else:
        wrapper = wrappers.prefill_wrapper(module, workspace, EAGER_KINDS[kind])
    host_schedule = host_memory(schedule, torch.uint8, device)
    wrappers.set_schedule_buffers(wrapper, host_schedule, torch.zeros(schedule, dtype=torch.uint8, device=device))
    if kind in GRAPH_KINDS:
        planner.first_decode(wrapper, columns, places, 0)
    else:
        planner.prefill(wrapper, columns, places, 0, causal=batch.count > 1)
    out, queries = step.as_heads()
    return lambda: wrapper.run(queries, (step.k_pool, step.v_pool), q_scale=step.scale, out=out)


def distance(found: Tensor, expected: Tensor) -> float:
    """Returns the largest absolute difference; NaN if any difference is not finite."""
    worst = float((found.float() - expected.float()).abs().max())
    return worst if math.isfinite(worst) else math.nan
