"""Calls of FlashInfer's wrappers: how one is made for our pools, and how each is planned without holding up the host.

What a plan reads on the host is given in host memory, what its kernels read is on the device already: then the library copies
nothing back and nothing from pageable memory. A plan's schedule is copied from host memory that the library takes to be its own;
lend_schedule() lends it ours, because the library's would be written again while its last copy may still be waiting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.worker.exec.attention.backend import AttentionShape
from services.worker.exec.attention.flashinfer_staging import StagedColumns


@dataclass(frozen=True, slots=True)
class PageMemory:
    """What kernels read of the step's pages, at addresses that never change.

    columns: int32[2 R + 1], the first two of StagedColumns. indices: int32[N], page ids of all rows, row by row.
    """

    columns: Tensor
    indices: Tensor

    def kv_indptr(self, rows: int) -> Tensor:
        return self.columns[: rows + 1]

    def last_page_len(self, rows: int) -> Tensor:
        return self.columns[rows + 1 : 2 * rows + 1]

    def step(self, rows: int, num_pages: int) -> StepPages:
        assert 2 * rows + 1 <= len(self.columns) and num_pages <= len(self.indices), "more than the largest step has"
        return StepPages(self.kv_indptr(rows), self.last_page_len(rows), self.indices[:num_pages])


@dataclass(frozen=True, slots=True)
class StepPages:
    """One step's views of PageMemory, or of some rows of it: kv_indptr int32[R + 1], last_page_len int32[R]; indices: int32[N],
    always of the whole step."""

    kv_indptr: Tensor
    last_page_len: Tensor
    indices: Tensor

    def tail(self, rows: int) -> StepPages:
        assert rows <= len(self.last_page_len), "more rows than there are"
        return StepPages(self.kv_indptr[rows:], self.last_page_len[rows:], self.indices)


def prefill_wrapper(module: Any, workspace: Tensor, backend: str) -> Any:
    return module.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=backend)


def decode_wrapper(module: Any, workspace: Tensor) -> Any:
    """Of kernels for CUDA cores. On tensor cores decode is prefill of one token a row, by the same kernels."""
    return module.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", backend="fa2")


def graph_wrapper(module: Any, workspace: Tensor, pages: PageMemory, rows: int, tensor_cores: bool) -> Any:
    """Reads pages in every replay. The kernels are named: a choice by the library could change between capture and replay."""
    return module.BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        "HND",
        use_cuda_graph=True,
        use_tensor_cores=tensor_cores,
        paged_kv_indptr_buffer=pages.kv_indptr(rows),
        paged_kv_indices_buffer=pages.indices,
        paged_kv_last_page_len_buffer=pages.last_page_len(rows),
        backend="fa2",
    )


def lend_schedule(wrapper: Any, host: Tensor, device: Tensor) -> None:
    """Where the next plan writes its schedule, and where its kernels read it. There is no public name for the host's part."""
    wrapper._pin_memory_int_workspace_buffer = host
    wrapper._int_workspace_buffer = device


@dataclass(frozen=True, slots=True)
class WrapperPlanner:
    """Plans one step's part with any wrapper. The scale is given to run(): layers may differ in it."""

    module: Any
    shape: AttentionShape
    dtype: torch.dtype

    def prefill(self, wrapper: Any, columns: StagedColumns, pages: StepPages, window: int, causal: bool) -> None:
        """columns: on the host; the library makes its own copies of them on the device."""
        wrapper.plan(
            columns.qo_indptr,
            columns.kv_indptr,
            pages.indices,
            columns.last_page_len,
            *self._sizes(),
            causal=causal,
            seq_lens=columns.kv_lens,
            **self._options(window),
        )

    def first_decode(self, wrapper: Any, columns: StagedColumns, pages: StepPages, window: int) -> None:
        """The plan that makes the wrapper's kernels known; compiles them if no earlier process did. See prefill()."""
        wrapper.plan(
            columns.kv_indptr,
            pages.indices,
            columns.last_page_len,
            *self._sizes(),
            seq_lens=columns.kv_lens,
            **self._options(window),
        )

    def decode(self, wrapper: Any, columns: StagedColumns, pages: StepPages, window: int) -> None:
        """After first_decode(). The wrapper's kernels read the pages where they are."""
        self._fast(wrapper, columns, pages, pages.last_page_len, window)

    def graph_decode(self, wrapper: Any, columns: StagedColumns, pages: StepPages, window: int) -> None:
        """After first_decode(). The kernels read the buffers the wrapper was made with; on tensor cores the planner reads the
        lengths of last pages, so it is given the host's."""
        self._fast(wrapper, columns, pages, columns.last_page_len, window)

    def _fast(self, wrapper: Any, columns: StagedColumns, pages: StepPages, last_page_len: Tensor, window: int) -> None:
        self.module.fast_decode_plan(
            wrapper,
            pages.kv_indptr,
            pages.indices,
            last_page_len,
            *self._sizes(),
            global_override_indptr_cpu=columns.kv_indptr,
            **self._options(window),
        )

    def _sizes(self) -> tuple[int, int, int, int]:
        shape = self.shape
        return shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.page_size

    def _options(self, window: int) -> dict[str, Any]:
        return {
            "window_left": window - 1 if window else -1,
            "sm_scale": 1.0,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }
