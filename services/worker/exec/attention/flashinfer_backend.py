"""Attention by the library FlashInfer over paged keys and values.

Uses one thread and one stream. See docs/design/flashinfer.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import RaggedRows, ScoreRule
from rootstock_llm.kernels.contracts.step_ops import StepKernels
from rootstock_llm.services.worker.exec.attention import flashinfer_limits as limits
from rootstock_llm.services.worker.exec.attention import flashinfer_wrappers as wrappers
from rootstock_llm.services.worker.exec.attention.backend import AttentionBackend, AttentionBatch, AttentionShape
from rootstock_llm.services.worker.exec.attention.flashinfer_staging import (
    StagedColumns,
    StagingRing,
    StagingSlot,
    columns_size,
    fill,
    host_memory,
    make_slot,
)

_PagesOf = dict[int, wrappers.StepPages]  # by window
EXTEND, MIXED, DECODE = "extend", "mixed", "decode"
SMS_WITHOUT_DEVICE = 132  # multiprocessors that are assumed without a GPU, in tests and prebuilds; an H100 has 132


class FlashInferAttention:
    """An AttentionBackend that owns FlashInfer's wrappers, their page indices and their scratch memory.

    A wrapper is the library's object for one kind of step and one sliding window. All wrappers share the scratch memory. This is
    safe, because the stream runs the kernels of a plan before the copies of the next plan.
    """

    name = "flashinfer"
    captures = True

    def __init__(
        self,
        shape: AttentionShape,
        device: torch.device,
        dtype: torch.dtype,
        kernels: StepKernels,
        module: Any = None,
        *,
        split_mixed: bool = False,
        extend_backend: str = "auto",
        graph_rows: int = 0,
    ) -> None:
        """Allocates the scratch memory and the staging buffers.

        Args:
            module: the library's module, or None to import it.
            split_mixed: whether the decode rows of a mixed step are computed in a separate launch, by the kernels of a decode
                step.
            extend_backend: the library's kernels for steps that have only extend rows: auto, fa2 or fa3.
            graph_rows: rows of the largest graph for which scratch memory is allocated now. The capture of a larger graph
                allocates larger scratch memory.

        Raises:
            Unsupported: FlashInfer cannot serve the shape.
            Exception: any error of the library's import.
        """
        limits.check(shape, dtype)
        self._shape, self._dtype, self._kernels = shape, dtype, kernels
        self._device = torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device
        self._module = _installed() if module is None else module
        self._planner = wrappers.WrapperPlanner(self._module, shape, dtype)
        self._split_mixed, self._extend_backend = split_mixed, extend_backend
        self._tensor_cores = limits.tensor_cores(shape)
        self._num_sms = _num_sms(self._device)
        self._workspace = self._zeros(limits.float_bytes(shape, self._num_sms, graph_rows), torch.uint8)
        schedule_bytes, plans = limits.int_bytes(shape, self._num_sms), len(shape.windows) * (2 if split_mixed else 1)
        self._schedules = [self._zeros(schedule_bytes, torch.uint8) for _ in range(plans)]
        self._ring = StagingRing(lambda: make_slot(columns_size(shape.max_rows), plans, schedule_bytes, self._device))
        self._counting = host_memory(shape.max_rows + 1, torch.int32, self._device)
        self._counting.copy_(torch.arange(shape.max_rows + 1))
        num_indices = shape.max_pages + shape.max_rows  # max_rows more, because each padding row also has a page
        self._pages = wrappers.PageMemory(self._zeros(2 * shape.max_rows + 1, torch.int32), self._zeros(num_indices, torch.int32))
        # Page memory by window. A row has the same number of pages in both page tables, so all windows share the columns of
        # self._pages. Windowed layers with a page table of their own have separate page indices.
        self._pages_of = dict.fromkeys(shape.windows, self._pages)
        if shape.separate_windows:
            in_windows = replace(self._pages, indices=self._zeros(num_indices, torch.int32))
            self._pages_of |= {window: in_windows for window in shape.windows if window}
        self._eager: dict[tuple[str, int], Any] = {}
        self._graphs: dict[tuple[int, int], Any] = {}
        self._parts: tuple[_Part, ...] = ()

    def prepare(self, log: Callable[[str], None]) -> None:
        """Runs a step of each kind that the limits of the shape allow, so that the library loads its kernels.

        The library first compiles kernels that are missing, which takes minutes. Waits for the device. Must be called before the
        first step.
        """
        for kind, num_tokens, num_extend in ((EXTEND, [2], 1), (MIXED, [2, 1], 1), (DECODE, [1], 0)):
            if len(num_tokens) <= self._shape.max_rows and sum(num_tokens) <= self._shape.max_tokens:
                log(f"attention: loading flashinfer's kernels for {kind} steps (takes minutes if they must be compiled)")
                began = time.monotonic()
                rehearse(self, self._shape, self._device, self._dtype, num_tokens, num_extend)
                log(f"attention: flashinfer's kernels for {kind} steps took {time.monotonic() - began:.1f} s")
        self._parts = ()

    def plan(self, batch: AttentionBatch) -> None:
        rows, slot = len(batch.starts), self._ring.take()
        assert rows <= self._shape.max_rows, "a step has at most max_rows rows"
        columns = fill(slot.columns, batch.starts, batch.num_tokens, self._shape.page_size)
        self._pages.columns[: 2 * rows + 1].copy_(slot.columns[: 2 * rows + 1], non_blocking=True)
        pages = {window: memory.step(rows, columns.num_pages) for window, memory in self._pages_of.items()}
        for window in {id(memory): window for window, memory in self._pages_of.items()}.values():
            table = batch.rows.in_windows() if window else batch.rows
            self._kernels.page_indices(pages[window].indices, pages[window].kv_indptr, table)
        if batch.graph:
            self._parts = (self._graph_part(columns, pages, slot),)
        else:
            self._parts = self._eager_parts(batch.num_extend, columns, pages, slot)
        if slot.copied is not None:
            slot.copied.record()

    def attend(self, out: Tensor, q: Tensor, k_pool: Tensor, v_pool: Tensor, rows: RaggedRows, rule: ScoreRule) -> None:
        if not self._parts or len(q) != self._parts[-1].end:
            raise RuntimeError(f"no plan for a pass over {len(q)} tokens: plan() must be called for each pass")
        mixed = out.view(len(out), -1, self._shape.head_dim)
        queries = q[:, : out.shape[1]].view(mixed.shape)
        for part in self._parts:
            span = slice(part.first, part.end)
            part.wrappers[rule.window].run(queries[span], (k_pool, v_pool), q_scale=rule.scale, out=mixed[span])

    def release_graphs(self) -> None:
        self._graphs.clear()
        self._parts = ()

    def _eager_parts(self, extend: int, columns: StagedColumns, pages: _PagesOf, slot: StagingSlot) -> tuple[_Part, ...]:
        rows, tokens = len(columns.kv_lens), int(columns.qo_indptr[-1])
        if extend == 0:
            return (_Part(0, tokens, self._decoders(columns, pages, slot, 0)),)
        if extend == rows or not self._split_mixed:
            return (_Part(0, tokens, self._prefillers(EXTEND if extend == rows else MIXED, columns, pages, slot, 0)),)
        head, tail = columns.head(extend), columns.tail(extend, self._counting)
        first = int(head.qo_indptr[-1])
        assert tokens - first == rows - extend, "each decode row has one token"
        extending = self._prefillers(EXTEND, head, pages, slot, 0)
        tails = {window: each.tail(extend) for window, each in pages.items()}
        decoding = self._decoders(tail, tails, slot, len(self._shape.windows))
        return _Part(0, first, extending), _Part(first, tokens, decoding)

    def _prefillers(self, kind: str, columns: StagedColumns, pages: _PagesOf, slot: StagingSlot, schedule: int) -> dict[int, Any]:
        """Plans a prefill wrapper for each window and returns the wrappers by window.

        Args:
            kind: EXTEND, MIXED, or DECODE for decode rows on tensor cores.
            schedule: index of the first window's schedule buffer. The next windows use the buffers after it.
        """
        planned = {}
        for index, window in enumerate(self._shape.windows, schedule):
            wrapper = planned[window] = self._wrapper(kind, window)
            wrappers.set_schedule_buffers(wrapper, slot.schedules[index], self._schedules[index])
            self._planner.prefill(wrapper, columns, pages[window], window, causal=kind != DECODE)
        return planned

    def _decoders(self, columns: StagedColumns, pages: _PagesOf, slot: StagingSlot, schedule: int) -> dict[int, Any]:
        # On tensor cores, a prefill wrapper computes decode rows. It runs the same kernels as a decode wrapper, whose plan would
        # copy from pageable memory and so block the host.
        if self._tensor_cores:
            return self._prefillers(DECODE, columns, pages, slot, schedule)
        planned = {}
        for index, window in enumerate(self._shape.windows, schedule):
            planned_before = (DECODE, window) in self._eager
            wrapper = planned[window] = self._wrapper(DECODE, window)
            wrappers.set_schedule_buffers(wrapper, slot.schedules[index], self._schedules[index])
            (self._planner.decode if planned_before else self._planner.first_decode)(wrapper, columns, pages[window], window)
        return planned

    def _graph_part(self, columns: StagedColumns, pages: _PagesOf, slot: StagingSlot) -> _Part:
        rows, planned = len(columns.kv_lens), {}
        for index, window in enumerate(self._shape.windows):
            planned_before = (rows, window) in self._graphs
            wrapper = planned[window] = self._graphs[(rows, window)] if planned_before else self._graph_wrapper(rows, window)
            wrappers.set_schedule_buffers(wrapper, slot.schedules[index], self._schedules[index])
            (self._planner.graph_decode if planned_before else self._planner.first_decode)(
                wrapper, columns, pages[window], window
            )
            self._graphs[(rows, window)] = wrapper
        return _Part(0, rows, planned)

    def _graph_wrapper(self, rows: int, window: int) -> Any:
        wanted = limits.float_bytes(self._shape, self._num_sms, rows)
        if wanted > len(self._workspace):  # earlier captured graphs keep using the old, smaller workspace
            self._workspace = self._zeros(wanted, torch.uint8)
        return wrappers.graph_wrapper(self._module, self._workspace, self._pages_of[window], rows, self._tensor_cores)

    def _wrapper(self, kind: str, window: int) -> Any:
        wrapper = self._eager.get((kind, window))
        if wrapper is None:
            if kind == DECODE and not self._tensor_cores:
                wrapper = wrappers.decode_wrapper(self._module, self._workspace)
            else:
                # Decode rows always use fa2, because fa3 uses a whole tile for each query head of a decode row.
                backend = self._extend_backend if kind == EXTEND else "fa2"
                wrapper = wrappers.prefill_wrapper(self._module, self._workspace, backend)
            self._eager[(kind, window)] = wrapper
        return wrapper

    def _zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=self._device)


@dataclass(frozen=True, slots=True)
class _Part:
    """A range of the step's tokens and the wrappers that compute it."""

    first: int  # index of the first token
    end: int  # index after the last token
    wrappers: dict[int, Any]  # planned wrapper by sliding window


def rehearse(
    backend: AttentionBackend,
    shape: AttentionShape,
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: Sequence[int],
    num_extend: int,
) -> None:
    """Plans a step of padding rows, and runs its attention once per sliding window. Waits for the device.

    Args:
        num_tokens: tokens of each row.
        num_extend: number of extend rows, which come first.
    """
    rows, tokens = len(num_tokens), sum(num_tokens)
    zeros = torch.zeros(rows, dtype=torch.int32, device=device)
    columns = RaggedRows(zeros.view(rows, 1), zeros - 1, zeros, zeros, zeros, zeros, zeros.long(), max(num_tokens))
    width, heads = shape.head_dim, shape.num_heads + 2 * shape.num_kv_heads
    pool = torch.zeros((1, shape.num_kv_heads, shape.page_size, width), dtype=dtype, device=device)
    qkv = torch.zeros((tokens, heads * width), dtype=dtype, device=device)
    out = torch.empty((tokens, shape.num_heads * width), dtype=dtype, device=device)
    starts, counts = np.zeros(rows, np.int32), np.array(num_tokens, np.int32)
    backend.plan(AttentionBatch(starts, counts, num_extend, columns))
    for window in shape.windows:
        backend.attend(out, qkv, pool, pool, columns, ScoreRule(1.0, window))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _installed() -> Any:
    import flashinfer

    return flashinfer


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else SMS_WITHOUT_DEVICE
