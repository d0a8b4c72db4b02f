"""Pages of all layers' KV as one row of bytes each (page-first), for tiers that keep or send whole pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.core.contracts.transfers import I32
from services.worker.exec.pools.kv_pool import KVPool

Bytes = NDArray[np.uint8]


class PageCopier:
    """pools: of one number of pages, in an order that stays. page_bytes: of a row. Works on their device's
    current stream."""

    def __init__(self, pools: Sequence[KVPool]) -> None:
        tensors = [each for pool in pools for pair in zip(pool.keys, pool.values, strict=True) for each in pair]
        assert len({len(each) for each in tensors}) == 1, "a page is one of every layer"
        self._parts = [each.view(len(each), -1).view(torch.uint8) for each in tensors]
        self.page_bytes = sum(part.shape[1] for part in self._parts)
        self._device = tensors[0].device
        self._host_parts = [part.numpy() for part in self._parts] if self._on_host else []

    def save(self, pages: I32, rows: Sequence[Tensor]) -> None:
        """pages: int32[n]. rows: n of uint8[page_bytes] on the host, which have the pages' bytes once all is done that this
        thread has put on the device; at once where the pools are on the host themselves."""
        assert len(rows) == len(pages), "a row for every page"
        if self._on_host:
            for place, piece in self._pieces(pages, rows):
                piece[:] = place
            return
        gathered, ids = self._on_device(len(pages)), self._ids(pages)
        for part, at in self._places():
            gathered[:, at : at + part.shape[1]].copy_(part.index_select(0, ids))
        for row, found in zip(rows, gathered, strict=True):
            row.copy_(found, non_blocking=True)

    def restore(self, rows: Sequence[Tensor], pages: I32) -> None:
        """The other way: rows are read until all is done that this thread has put on the device."""
        assert len(rows) == len(pages), "a row for every page"
        if self._on_host:
            for place, piece in self._pieces(pages, rows):
                place[:] = piece
            return
        gathered, ids = self._on_device(len(pages)), self._ids(pages)
        for row, there in zip(rows, gathered, strict=True):
            there.copy_(row, non_blocking=True)
        for part, at in self._places():
            part.index_copy_(0, ids, gathered[:, at : at + part.shape[1]])

    def _pieces(self, pages: I32, rows: Sequence[Tensor]) -> Iterator[tuple[Bytes, Bytes]]:
        """Where each layer's part of each page lies in its pool, and in the page's row: one copy of bytes that lie together, and
        by numpy, is many times as fast as by index."""
        arrays, at = [row.numpy() for row in rows], 0
        for part in self._host_parts:
            end = at + part.shape[1]
            for page, row in zip(pages.tolist(), arrays, strict=True):
                yield part[page], row[at:end]
            at = end

    @property
    def _on_host(self) -> bool:
        return self._device.type == "cpu"

    def _on_device(self, pages: int) -> Tensor:
        return torch.empty((pages, self.page_bytes), dtype=torch.uint8, device=self._device)

    def _ids(self, pages: I32) -> Tensor:
        return torch.from_numpy(pages.astype(np.int64)).to(self._device)

    def _places(self) -> Iterator[tuple[Tensor, int]]:
        """Each layer's part, and where its bytes begin in a row."""
        at = 0
        for part in self._parts:
            yield part, at
            at += part.shape[1]
