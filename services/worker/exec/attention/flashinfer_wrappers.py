"""Creates FlashInfer's wrappers for our pools and plans them without blocking the host.

The inputs of a plan are in pinned host memory, and the inputs of its kernels are already on the device. The library therefore
makes no copy that blocks the host. It copies a plan's schedule to the device from one host buffer per wrapper. The next plan
would overwrite this buffer while the copy may still run. set_schedule_buffers() therefore sets a buffer of the present step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rootstock_llm.services.worker.exec.attention.backend import AttentionShape
from rootstock_llm.services.worker.exec.attention.flashinfer_staging import StagedColumns


@dataclass(frozen=True, slots=True)
class PageMemory:
    """The page columns that kernels read, at constant addresses for graphs. R is the largest number of rows of a step."""

    columns: Tensor  # int32[2 R + 1], kv_indptr and last_page_len of StagedColumns
    indices: Tensor  # int32[N], page ids of all rows, row by row

    def kv_indptr(self, rows: int) -> Tensor:
        return self.columns[: rows + 1]

    def last_page_len(self, rows: int) -> Tensor:
        return self.columns[rows + 1 : 2 * rows + 1]

    def step(self, rows: int, num_pages: int) -> StepPages:
        assert 2 * rows + 1 <= len(self.columns) and num_pages <= len(self.indices), (
            "a step has at most as many rows and pages as the memory was allocated for"
        )
        return StepPages(self.kv_indptr(rows), self.last_page_len(rows), self.indices[:num_pages])


@dataclass(frozen=True, slots=True)
class StepPages:
    """Views of PageMemory for the rows of one step, or for its last rows."""

    kv_indptr: Tensor  # int32[R + 1]
    last_page_len: Tensor  # int32[R]
    indices: Tensor  # int32[N], page ids of all rows of the step, even if the other fields have only its last rows

    def tail(self, rows: int) -> StepPages:
        assert rows <= len(self.last_page_len), "the step has at least this number of rows"
        return StepPages(self.kv_indptr[rows:], self.last_page_len[rows:], self.indices)


def prefill_wrapper(module: Any, workspace: Tensor, backend: str) -> Any:
    return module.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=backend)


def decode_wrapper(module: Any, workspace: Tensor) -> Any:
    """Returns a decode wrapper for CUDA cores. For decode on tensor cores, prefill_wrapper() is used with rows of one token."""
    return module.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", backend="fa2")


def graph_wrapper(module: Any, workspace: Tensor, pages: PageMemory, rows: int, tensor_cores: bool) -> Any:
    """Returns a decode wrapper for a graph of `rows` rows, which reads `pages` in every replay.

    The backend is set to fa2, because a choice by the library could change between capture and replay.
    """
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


def set_schedule_buffers(wrapper: Any, host: Tensor, device: Tensor) -> None:
    """Sets the buffers for the schedule of the wrapper's next plan. The library has only private attributes for them.

    Args:
        host: uint8; the plan writes the schedule here.
        device: uint8; the plan's kernels read the schedule here.
    """
    wrapper._pin_memory_int_workspace_buffer = host
    wrapper._int_workspace_buffer = device


@dataclass(frozen=True, slots=True)
class WrapperPlanner:
    """Plans all rows of a step, or only its extend or decode rows. The scale of attention is passed to run() instead."""

    module: Any
    shape: AttentionShape
    dtype: torch.dtype

    def prefill(self, wrapper: Any, columns: StagedColumns, pages: StepPages, window: int, causal: bool) -> None:
        """Plans a prefill wrapper. The library copies the columns to the device."""
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
        """Plans a decode wrapper for the first time. The library loads its kernels, and first compiles them if necessary.

        The library copies the columns to the device.
        """
        wrapper.plan(
            columns.kv_indptr,
            pages.indices,
            columns.last_page_len,
            *self._sizes(),
            seq_lens=columns.kv_lens,
            **self._options(window),
        )

    def decode(self, wrapper: Any, columns: StagedColumns, pages: StepPages, window: int) -> None:
        """Plans a decode wrapper after its first_decode(). The wrapper's kernels read `pages` in place."""
        self._fast(wrapper, columns, pages, pages.last_page_len, window)

    def graph_decode(self, wrapper: Any, columns: StagedColumns, pages: StepPages, window: int) -> None:
        """Plans a graph's wrapper after its first_decode(). The wrapper's kernels read the buffers that graph_wrapper() set.

        The library gets the column last_page_len on the host, because the library's planner for tensor cores reads it there.
        """
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
