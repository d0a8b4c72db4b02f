"""Creates FlashInfer's wrappers for our pools and plans them without blocking the host.

The inputs of a plan are in host memory, and the inputs of its kernels are already on the device. The library therefore copies
nothing to the host, and nothing from pageable memory. It copies a plan's schedule to the device from a host buffer, which the
next plan would overwrite although the copy may be pending. lend_schedule() replaces this buffer by a buffer of the present step.
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
    """The page columns that kernels read, at addresses that never change. R is the largest number of rows."""

    columns: Tensor  # int32[2 R + 1], kv_indptr and last_page_len of StagedColumns
    indices: Tensor  # int32[N], page ids of all rows, row by row

    def kv_indptr(self, rows: int) -> Tensor:
        return self.columns[: rows + 1]

    def last_page_len(self, rows: int) -> Tensor:
        return self.columns[rows + 1 : 2 * rows + 1]

    def step(self, rows: int, num_pages: int) -> StepPages:
        assert 2 * rows + 1 <= len(self.columns) and num_pages <= len(self.indices), "the step exceeds the largest step"
        return StepPages(self.kv_indptr(rows), self.last_page_len(rows), self.indices[:num_pages])


@dataclass(frozen=True, slots=True)
class StepPages:
    """Views of PageMemory for the rows of one step, or for some of them."""

    kv_indptr: Tensor  # int32[R + 1]
    last_page_len: Tensor  # int32[R]
    indices: Tensor  # int32[N], page ids of all rows of the step, even if the other fields are those of some rows

    def tail(self, rows: int) -> StepPages:
        assert rows <= len(self.last_page_len), "more rows than there are"
        return StepPages(self.kv_indptr[rows:], self.last_page_len[rows:], self.indices)


def prefill_wrapper(module: Any, workspace: Tensor, backend: str) -> Any:
    return module.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=backend)


def decode_wrapper(module: Any, workspace: Tensor) -> Any:
    """Returns a decode wrapper for CUDA cores. On tensor cores, prefill kernels compute decode rows as rows of one token."""
    return module.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", backend="fa2")


def graph_wrapper(module: Any, workspace: Tensor, pages: PageMemory, rows: int, tensor_cores: bool) -> Any:
    """Returns a decode wrapper for a graph of `rows` rows, which reads `pages` in every replay.

    The kernels are named explicitly, because the library's own choice could change between capture and replay.
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


def lend_schedule(wrapper: Any, host: Tensor, device: Tensor) -> None:
    """Sets the buffers for the schedule of the wrapper's next plan. The library has no public name for the host buffer.

    Args:
        host: uint8; the plan writes the schedule here.
        device: uint8; the plan's kernels read the schedule here.
    """
    wrapper._pin_memory_int_workspace_buffer = host
    wrapper._int_workspace_buffer = device


@dataclass(frozen=True, slots=True)
class WrapperPlanner:
    """Plans a part of a step with a wrapper. The scale is an argument of run(), because layers may have different ones."""

    module: Any
    shape: AttentionShape
    dtype: torch.dtype

    def prefill(self, wrapper: Any, columns: StagedColumns, pages: StepPages, window: int, causal: bool) -> None:
        """Plans a prefill wrapper. The library copies the columns from the host to the device."""
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
        """Plans a decode wrapper for the first time, which loads its kernels, and compiles them if no earlier process did.

        The library copies the columns from the host to the device.
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
        """Plans a decode wrapper again, after first_decode(). Its kernels read `pages` in place."""
        self._fast(wrapper, columns, pages, pages.last_page_len, window)

    def graph_decode(self, wrapper: Any, columns: StagedColumns, pages: StepPages, window: int) -> None:
        """Plans a graph's wrapper again, after first_decode(). Its kernels read the buffers of graph_wrapper().

        On tensor cores, the library's planner reads last_page_len on the host, so it gets the host's column.
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
