"""Pages of all layers' KV as one row of bytes each (page-first), for tiers that keep or send whole pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from services.worker.exec.pools.kv_pool import KVPool


class PageCopier:
    """pools: of one number of pages, in an order that stays. page_bytes: of a row. Works on their device's
    current stream."""

    def __init__(self, pools: Sequence[KVPool]) -> None:
        tensors = [each for pool in pools for pair in zip(pool.keys, pool.values, strict=True) for each in pair]
        assert len({len(each) for each in tensors}) == 1, "a page is one of every layer"
        self._parts = [each.view(len(each), -1).view(torch.uint8) for each in tensors]
        self.page_bytes = sum(part.shape[1] for part in self._parts)

    def save(self, pages: Tensor) -> Tensor:
        """pages: int64[n], on the pools' device. Returns uint8[n, page_bytes] there."""
        rows = torch.empty((len(pages), self.page_bytes), dtype=torch.uint8, device=pages.device)
        for part, columns in self._columns(rows):
            if part.device.type == "cpu":
                for column, page in zip(columns, pages.tolist(), strict=True):
                    column.copy_(part[page])  # one copy of bytes that lie together: many times as fast as by index
            else:
                columns.copy_(part.index_select(0, pages))
        return rows

    def restore(self, rows: Tensor, pages: Tensor) -> None:
        """The other way."""
        assert rows.shape == (len(pages), self.page_bytes), "a row for every page"
        for part, columns in self._columns(rows):
            if part.device.type == "cpu":
                for column, page in zip(columns, pages.tolist(), strict=True):
                    part[page].copy_(column)
            else:
                part.index_copy_(0, pages, columns)

    def _columns(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each layer's part, and its bytes of the rows."""
        at = 0
        for part in self._parts:
            yield part, rows[:, at : at + part.shape[1]]
            at += part.shape[1]
