"""Pages of all layers' KV as one row of bytes each (page-first), for tiers that keep or send whole pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.core.contracts.transfers import I32
from services.worker.exec.pools.kv_pool import KVPool

Bytes = NDArray[np.uint8]
Addresses = NDArray[np.int64]


class PieceCopies(Protocol):
    def copy_pieces(self, to: Addresses, source: Addresses, sizes: Addresses, streamed: bool) -> None: ...


class PageCopier:
    """pools: of one number of pages, in an order that stays. page_bytes: of a row. copies: by one call for many pieces, where the
    pools are on the host; None: by numpy, piece by piece. Works on their device's current stream."""

    def __init__(self, pools: Sequence[KVPool], copies: PieceCopies | None = None) -> None:
        tensors = [each for pool in pools for pair in zip(pool.keys, pool.values, strict=True) for each in pair]
        assert len({len(each) for each in tensors}) == 1, "a page is one of every layer"
        self._parts = [each.view(len(each), -1).view(torch.uint8) for each in tensors]
        self.page_bytes = sum(part.shape[1] for part in self._parts)
        self._device = tensors[0].device
        self._host_parts = [part.numpy() for part in self._parts] if self._on_host else []
        assert copies is None or self._on_host, "addresses of a device are none of the host's"
        assert all(part.is_contiguous() for part in self._parts), "a page of a layer lies behind the one before"
        self._copies = copies
        self._addresses = np.array([part.data_ptr() for part in self._parts], dtype=np.int64)
        self._sizes = np.array([part.shape[1] for part in self._parts], dtype=np.int64)
        self._offsets = self._sizes.cumsum() - self._sizes

    def save(self, pages: I32, rows: Sequence[Tensor], streamed: bool = False) -> None:
        """pages: int32[n]. rows: n of uint8[page_bytes] on the host, which have the pages' bytes once all is done that this
        thread has put on the device; at once where the pools are on the host themselves. streamed: nothing else is to leave the
        host's caches for them."""
        assert len(rows) == len(pages), "a row for every page"
        if self._copies is not None:
            places, pieces, sizes = self._found(pages, rows)
            self._copies.copy_pieces(pieces, places, sizes, streamed)
            return
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
        if self._copies is not None:
            places, pieces, sizes = self._found(pages, rows)
            self._copies.copy_pieces(places, pieces, sizes, streamed=False)
            return
        if self._on_host:
            for place, piece in self._pieces(pages, rows):
                place[:] = piece
            return
        gathered, ids = self._on_device(len(pages)), self._ids(pages)
        for row, there in zip(rows, gathered, strict=True):
            there.copy_(row, non_blocking=True)
        for part, at in self._places():
            part.index_copy_(0, ids, gathered[:, at : at + part.shape[1]])

    def _found(self, pages: I32, rows: Sequence[Tensor]) -> tuple[Addresses, Addresses, Addresses]:
        """What _pieces() says, as addresses and bytes, page by page. Raises IndexError for a page that there is not,
        ValueError for a row of another size."""
        if len(pages) and not 0 <= pages.min() <= pages.max() < len(self._parts[0]):
            raise IndexError(f"there are pages 0 to {len(self._parts[0]) - 1}")
        if not all(row.is_contiguous() and row.nbytes == self.page_bytes for row in rows):
            raise ValueError(f"a row is {self.page_bytes} bytes, one behind the other")
        places = self._addresses + pages.astype(np.int64)[:, None] * self._sizes
        pieces = np.array([row.data_ptr() for row in rows], dtype=np.int64)[:, None] + self._offsets
        return places.ravel(), pieces.ravel(), np.broadcast_to(self._sizes, places.shape).ravel()

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
