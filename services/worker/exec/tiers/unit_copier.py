"""Copies units of a cache group between the pools and rows of bytes in host memory, for tiers and remote workers.

The bytes of a unit are those of all its tensors, one after another. Below the device, a unit takes num_parts rows of the size of
a page. The end of its last row is filled with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rootstock_llm.services.worker.core.contracts.transfers import I32

STAGED_BYTES = 16 << 20  # bytes of GPU memory for units that are copied between the pools and the host; at least one unit
Addresses = NDArray[np.int64]


class PieceCopies(Protocol):
    """Copies many pieces of host memory in one call. CpuCopies implements it with the C++ library."""

    def copy_pieces(self, to: Addresses, source: Addresses, sizes: Addresses, streamed: bool) -> None: ...


class UnitCopier:
    """Copies the units of one group on the current stream of their device.

    Row r of a group is part r % num_parts of the unit r // num_parts. A piece is the part of a tensor that is in one row.
    """

    def __init__(self, tensors: Sequence[Tensor], num_units: int, page_bytes: int, copies: PieceCopies | None) -> None:
        """Computes the addresses and sizes of the pieces.

        Args:
            tensors: tensors of the group's layers. The first dimension is the unit.
            num_units: number of units that may be copied.
            page_bytes: bytes of a row.
            copies: copies pieces if the pools are in host memory; None to copy them one by one.
        """
        self._tensors = [each.view(len(each), -1).view(torch.uint8) for each in tensors]
        assert all(each.is_contiguous() for each in self._tensors), "the units of a layer are contiguous"
        self.num_units, self._page_bytes, self._copies = num_units, page_bytes, copies
        self._device = tensors[0].device
        sizes = [each.shape[1] for each in self._tensors]
        self._ends: list[int] = np.cumsum(sizes).tolist()
        self.unit_bytes = self._ends[-1]
        self.num_parts: int = -(-self.unit_bytes // page_bytes)
        cuts = sorted({0, *self._ends, *range(page_bytes, self.unit_bytes, page_bytes)})
        begins = np.array(cuts[:-1], dtype=np.int64)
        # Per piece, in the order of a unit's bytes: tensor, offset in the tensor's unit, size, part, and offset in the row.
        self._of_tensor = np.searchsorted(self._ends, begins, side="right")
        self._in_tensor = begins - (np.array(self._ends) - sizes)[self._of_tensor]
        self._sizes = np.diff(cuts)
        self._in_row = begins % page_bytes
        self._counts = np.bincount(begins // page_bytes, minlength=self.num_parts)  # pieces of each part
        self._firsts = np.cumsum(self._counts) - self._counts  # first piece of each part

    def rows_of(self, units: I32) -> Addresses:
        """Returns the rows of whole units, int64[n * num_parts]."""
        rows: Addresses = (units.astype(np.int64)[:, None] * self.num_parts + np.arange(self.num_parts)).ravel()
        return rows

    def save(self, row_ids: Addresses, rows: Sequence[Tensor], streamed: bool = False) -> None:
        """Copies rows of the group to host memory. PageCopier.save() has the rules for completion.

        Args:
            row_ids: int64[n].
            rows: n tensors uint8[page_bytes].
            streamed: see PageCopier.save().

        Raises:
            IndexError: a unit does not exist.
            ValueError: a row does not have page_bytes bytes.
        """
        self._check(row_ids, rows)
        for row, part in zip(rows, (row_ids % self.num_parts).tolist(), strict=True):
            if part == self.num_parts - 1:
                row[self.unit_bytes - part * self._page_bytes :] = 0
        if self._on_host:
            self._copy_on_host(row_ids, rows, True, streamed)
            return
        at_once = self._rows_at_once
        for at in range(0, len(row_ids), at_once):
            some, parts = row_ids[at : at + at_once] // self.num_parts, row_ids[at : at + at_once] % self.num_parts
            units, inverse = np.unique(some, return_inverse=True)
            ids = torch.from_numpy(units).to(self._device)
            gathered = torch.cat([tensor.index_select(0, ids) for tensor in self._tensors], dim=1)
            for row, unit, part in zip(rows[at : at + at_once], inverse.tolist(), parts.tolist(), strict=True):
                found = gathered[unit, part * self._page_bytes : (part + 1) * self._page_bytes]
                row[: len(found)].copy_(found, non_blocking=True)

    def restore(self, rows: Sequence[Tensor], units: I32) -> None:
        """Copies rows to whole units. There are num_parts rows per unit. Errors are those of save()."""
        row_ids = self.rows_of(units)
        self._check(row_ids, rows)
        if self._on_host:
            self._copy_on_host(row_ids, rows, False, False)
            return
        at_once = self._rows_at_once // self.num_parts
        for at in range(0, len(units), at_once):
            some = units[at : at + at_once].astype(np.int64)
            target = torch.empty((len(some), self.num_parts, self._page_bytes), dtype=torch.uint8, device=self._device)
            for row, part in zip(rows[at * self.num_parts :], target.view(-1, self._page_bytes), strict=False):
                part.copy_(row, non_blocking=True)
            ids, flat = torch.from_numpy(some).to(self._device), target.view(len(some), -1)
            for tensor, end in zip(self._tensors, self._ends, strict=True):
                tensor.index_copy_(0, ids, flat[:, end - tensor.shape[1] : end])

    @property
    def _on_host(self) -> bool:
        return self._device.type == "cpu"

    @property
    def _rows_at_once(self) -> int:
        return max(1, STAGED_BYTES // (self.num_parts * self._page_bytes)) * self.num_parts

    def _check(self, row_ids: Addresses, rows: Sequence[Tensor]) -> None:
        assert len(row_ids) == len(rows), "each row of the group has a row in host memory"
        if len(row_ids) and not 0 <= row_ids.min() <= row_ids.max() < self.num_units * self.num_parts:
            first, last = row_ids.min() // self.num_parts, row_ids.max() // self.num_parts
            raise IndexError(f"units {first} to {last} are requested; the pool has units 0 to {self.num_units - 1}")
        if not all(row.is_contiguous() and row.nbytes == self._page_bytes for row in rows):
            raise ValueError(f"each row must be contiguous and have {self._page_bytes} bytes")

    def _copy_on_host(self, row_ids: Addresses, rows: Sequence[Tensor], saves: bool, streamed: bool) -> None:
        units, counts = row_ids // self.num_parts, self._counts[row_ids % self.num_parts]
        of_row = np.repeat(np.arange(len(rows)), counts)
        begins = self._firsts[row_ids % self.num_parts] - (np.cumsum(counts) - counts)
        pieces = np.arange(counts.sum()) + np.repeat(begins, counts)
        tensors, offsets, sizes = self._of_tensor[pieces], self._in_tensor[pieces], self._sizes[pieces]
        if self._copies is None:
            columns = (of_row, tensors, units[of_row], offsets, self._in_row[pieces], sizes)
            for row, tensor, unit, at, in_row, size in zip(*(each.tolist() for each in columns), strict=True):
                in_pool, in_host = self._tensors[tensor][unit, at : at + size], rows[row][in_row : in_row + size]
                to, source = (in_host, in_pool) if saves else (in_pool, in_host)
                to.copy_(source)
            return
        addresses = np.array([each.data_ptr() for each in self._tensors], dtype=np.int64)
        unit_sizes = np.array([each.shape[1] for each in self._tensors], dtype=np.int64)
        in_pool = addresses[tensors] + units[of_row] * unit_sizes[tensors] + offsets
        in_rows = np.array([row.data_ptr() for row in rows], dtype=np.int64)[of_row] + self._in_row[pieces]
        to, source = (in_rows, in_pool) if saves else (in_pool, in_rows)
        self._copies.copy_pieces(to, source, sizes.astype(np.int64), streamed)
