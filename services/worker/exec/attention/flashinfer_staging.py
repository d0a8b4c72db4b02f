"""Host memory from which a plan's columns and schedules are copied to the device while the host continues.

Each step fills one slot of a ring. A slot is reused only after the stream has passed the event that follows its copies. If no
slot is free, the ring gets another slot. The host therefore never waits, and no copy reads the data of a later plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rootstock_llm.services.worker.exec.attention.backend import I32

SLOTS = 4  # initial number of slots: two for steps in flight, one for the step that is being planned, and a spare slot


class CopyEvent(Protocol):
    """The methods of torch.cuda.Event that are used here."""

    def record(self) -> None: ...

    def query(self) -> bool: ...


@dataclass(slots=True)
class StagingSlot:
    """Host memory for one step, pinned if the device is a GPU."""

    columns: Tensor  # int32[columns_size(max_rows)], memory of StagedColumns
    schedules: tuple[Tensor, ...]  # one uint8 buffer per plan of a step
    copied: CopyEvent | None  # event after the slot's copies, or None on a CPU, whose copies are done on return


class StagingRing:
    """A ring of slots for the steps of one stream."""

    def __init__(self, make: Callable[[], StagingSlot]) -> None:
        self._make = make
        self._slots = [make() for _ in range(SLOTS)]
        self._next = 0

    def __len__(self) -> int:
        return len(self._slots)

    def take(self) -> StagingSlot:
        """Returns the oldest free slot for the next plan. Adds a slot if all slots are in use."""
        for step in range(len(self._slots)):
            index = (self._next + step) % len(self._slots)
            slot = self._slots[index]
            if slot.copied is None or slot.copied.query():
                self._next = index + 1
                return slot
        assert all(slot.copied is not None for slot in self._slots), "a slot without an event is always free"
        self._slots.append(self._make())
        self._next = 0
        return self._slots[-1]


def host_memory(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns host memory [count], pinned if the device is a GPU, so that copies from it do not block the host."""
    return torch.empty(count, dtype=dtype, pin_memory=device.type == "cuda")


def make_slot(columns: int, schedules: int, schedule_bytes: int, device: torch.device) -> StagingSlot:
    return StagingSlot(
        host_memory(columns, torch.int32, device),
        tuple(host_memory(schedule_bytes, torch.uint8, device) for _ in range(schedules)),
        torch.cuda.Event() if device.type == "cuda" else None,
    )


@dataclass(frozen=True, slots=True)
class StagedColumns:
    """The columns of R rows in FlashInfer's form. The tensors are consecutive views of one int32 host buffer."""

    kv_indptr: Tensor  # [R + 1], pages before each row
    last_page_len: Tensor  # [R], tokens in each row's last page, 1 to page size
    qo_indptr: Tensor  # [R + 1], tokens of the step before each row
    kv_lens: Tensor  # [R], tokens that each row attends to
    num_pages: int  # pages of the whole step

    def head(self, rows: int) -> StagedColumns:
        """Returns the columns of the first `rows` rows."""
        return StagedColumns(
            self.kv_indptr[: rows + 1], self.last_page_len[:rows], self.qo_indptr[: rows + 1], self.kv_lens[:rows], self.num_pages
        )

    def tail(self, rows: int, counting: Tensor) -> StagedColumns:
        """Returns the columns of all rows after the first `rows` rows. The returned rows must have one token each.

        kv_indptr still counts from the step's first page, because kernels use it as an index into the page ids of the whole step.

        Args:
            counting: the numbers 0 to R, int32[R + 1] on the host.
        """
        last_page_len = self.last_page_len[rows:]
        qo_indptr = counting[: len(last_page_len) + 1]
        assert len(qo_indptr) == len(last_page_len) + 1, "`counting` has a number for each row and one more"
        return StagedColumns(self.kv_indptr[rows:], last_page_len, qo_indptr, self.kv_lens[rows:], self.num_pages)


def columns_size(rows: int) -> int:
    return 4 * rows + 2


def fill(columns: Tensor, starts: I32, num_tokens: I32, page_size: int) -> StagedColumns:
    """Writes the columns of a step's rows into host memory.

    Args:
        columns: int32[columns_size(R)] or larger; filled here.
        starts: position of each row's first token.
        num_tokens: number of tokens that each row computes.
    """
    rows = len(starts)
    assert rows == len(num_tokens) and columns_size(rows) <= len(columns), "the buffer holds the columns of all rows"
    views = columns[: columns_size(rows)].split([rows + 1, rows, rows + 1, rows])
    kv_indptr, last_page_len, qo_indptr, kv_lens = (view.numpy() for view in views)
    np.add(starts, num_tokens, out=kv_lens)
    pages = (kv_lens + (page_size - 1)) // page_size
    kv_indptr[0] = qo_indptr[0] = 0
    np.cumsum(pages, out=kv_indptr[1:], dtype=np.int32)
    np.cumsum(num_tokens, out=qo_indptr[1:], dtype=np.int32)
    np.subtract(kv_lens, (pages - 1) * page_size, out=last_page_len)
    return StagedColumns(views[0], views[1], views[2], views[3], int(kv_indptr[-1]))
