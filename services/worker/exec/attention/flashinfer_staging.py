"""Host memory from which a plan's columns and schedules are copied to the device while the host goes on.

A slot's copies are in flight until the stream has passed its event. A slot is taken again only when its event has passed; if none
has, there is one slot more. So the host never waits, and no copy reads what a later plan has written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from services.worker.exec.attention.backend import I32

SLOTS = 4  # two steps in flight and one being planned, and one to spare


class Passed(Protocol):
    """torch.cuda.Event, as far as it is used."""

    def record(self) -> None: ...

    def query(self) -> bool: ...


@dataclass(slots=True)
class Slot:
    """columns: int32[n]; schedules: one uint8 buffer per plan of a step. Pinned where the device is CUDA."""

    columns: Tensor
    schedules: tuple[Tensor, ...]
    copied: Passed | None


class StagingRing:
    """One owner, one stream at a time."""

    def __init__(self, make: Callable[[], Slot]) -> None:
        self._make = make
        self._slots = [make() for _ in range(SLOTS)]
        self._next = 0

    def __len__(self) -> int:
        return len(self._slots)

    def take(self) -> Slot:
        """The slot of the plan that follows, oldest first."""
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
    """[count], from which copies to the device do not hold up the host."""
    return torch.empty(count, dtype=dtype, pin_memory=device.type == "cuda")


def make_slot(columns: int, schedules: int, schedule_bytes: int, device: torch.device) -> Slot:
    return Slot(
        host_memory(columns, torch.int32, device),
        tuple(host_memory(schedule_bytes, torch.uint8, device) for _ in range(schedules)),
        torch.cuda.Event() if device.type == "cuda" else None,
    )


@dataclass(frozen=True, slots=True)
class StagedColumns:
    """A step's columns as FlashInfer wants them, views of one host buffer in this order. R rows.

    kv_indptr: int32[R + 1], pages before each row. last_page_len: int32[R], tokens in each row's last page, 1 .. page size.
    qo_indptr: int32[R + 1], tokens of the step before each row. kv_lens: int32[R], tokens each row attends to.
    """

    kv_indptr: Tensor
    last_page_len: Tensor
    qo_indptr: Tensor
    kv_lens: Tensor
    num_pages: int

    def head(self, rows: int) -> StagedColumns:
        """Of the first `rows` rows."""
        return StagedColumns(
            self.kv_indptr[: rows + 1], self.last_page_len[:rows], self.qo_indptr[: rows + 1], self.kv_lens[:rows], self.num_pages
        )

    def tail(self, rows: int, counting: Tensor) -> StagedColumns:
        """Of all but the first `rows` rows, which have one token each. counting: int32[R + 1] on the host, 0 .. R. Pages are
        counted from the step's first on: kernels and planners take differences of kv_indptr, and it as a place in the indices."""
        last_page_len = self.last_page_len[rows:]
        qo_indptr = counting[: len(last_page_len) + 1]
        assert len(qo_indptr) == len(last_page_len) + 1, "more rows than were counted"
        return StagedColumns(self.kv_indptr[rows:], last_page_len, qo_indptr, self.kv_lens[rows:], self.num_pages)


def columns_size(rows: int) -> int:
    return 4 * rows + 2


def fill(columns: Tensor, starts: I32, num_tokens: I32, page_size: int) -> StagedColumns:
    """Writes the columns of rows that compute num_tokens positions from starts on into host memory int32[columns_size(R)]."""
    rows = len(starts)
    assert rows == len(num_tokens) and columns_size(rows) <= len(columns), "host memory for the columns of every row"
    views = columns[: columns_size(rows)].split([rows + 1, rows, rows + 1, rows])
    kv_indptr, last_page_len, qo_indptr, kv_lens = (view.numpy() for view in views)
    np.add(starts, num_tokens, out=kv_lens)
    pages = (kv_lens + (page_size - 1)) // page_size
    kv_indptr[0] = qo_indptr[0] = 0
    np.cumsum(pages, out=kv_indptr[1:], dtype=np.int32)
    np.cumsum(num_tokens, out=qo_indptr[1:], dtype=np.int32)
    np.subtract(kv_lens, (pages - 1) * page_size, out=last_page_len)
    return StagedColumns(views[0], views[1], views[2], views[3], int(kv_indptr[-1]))
