"""Pages of all layers' KV as one row of bytes each (page-first), for tiers that keep or send whole pages."""

from __future__ import annotations

from collections.abc import Sequence

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
        """pages: int64[n]. Returns uint8[n, page_bytes]; both on the pools' device."""
        rows = torch.empty((len(pages), self.page_bytes), dtype=torch.uint8, device=pages.device)
        at = 0
        for part in self._parts:
            rows[:, at : at + part.shape[1]] = part.index_select(0, pages)
            at += part.shape[1]
        return rows

    def restore(self, rows: Tensor, pages: Tensor) -> None:
        """The other way."""
        assert rows.shape == (len(pages), self.page_bytes), "a row for every page"
        at = 0
        for part in self._parts:
            part.index_copy_(0, pages, rows[:, at : at + part.shape[1]])
            at += part.shape[1]
