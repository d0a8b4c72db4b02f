"""Pages of all layers' KV as one row of bytes each (page-first), for tiers that keep or send whole pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.contracts.step_ops import BringPieces
from services.worker.core.contracts.transfers import I32
from services.worker.exec.pools.arrivals import LayerGroups
from services.worker.exec.pools.kv_pool import KVPool

STAGED_BYTES = 16 << 20  # of pages on their way between a device's pools and the host, beside the pools
WORD_BYTES = 8  # that a device's pieces are multiples of: see kernels/triton/page_pieces.py
Bytes = NDArray[np.uint8]
Addresses = NDArray[np.int64]


class PieceCopies(Protocol):
    def copy_pieces(self, to: Addresses, source: Addresses, sizes: Addresses, streamed: bool) -> None: ...


class PageCopier:
    """pools: of one number of pages, in an order that stays. page_bytes: of a row. copies: by one call for many pieces, where the
    pools are on the host; None: by numpy, piece by piece. bring: the pools' device reads rows where they lie; None: it cannot.
    Works on their device's current stream."""

    def __init__(self, pools: Sequence[KVPool], copies: PieceCopies | None = None, bring: BringPieces | None = None) -> None:
        tensors = [each for pool in pools for pair in zip(pool.keys, pool.values, strict=True) for each in pair]
        assert len({len(each) for each in tensors}) == 1, "a page is one of every layer"
        self._parts = [each.view(len(each), -1).view(torch.uint8) for each in tensors]
        self.page_bytes = sum(part.shape[1] for part in self._parts)
        self._num_layers = [len(pool.keys) for pool in pools]
        self._device = tensors[0].device
        self._host_parts = [part.numpy() for part in self._parts] if self._on_host else []
        assert copies is None or self._on_host, "addresses of a device are none of the host's"
        assert all(part.is_contiguous() for part in self._parts), "a page of a layer lies behind the one before"
        self._copies, self._bring = copies, bring
        self._addresses = np.array([part.data_ptr() for part in self._parts], dtype=np.int64)
        self._sizes = np.array([part.shape[1] for part in self._parts], dtype=np.int64)
        self._offsets = self._sizes.cumsum() - self._sizes
        self._all = np.arange(len(self._parts))

    @cached_property
    def groups(self) -> LayerGroups:
        """In the order in which they are brought one by one."""
        return LayerGroups.for_pools(self._num_layers)

    @property
    def can_bring(self) -> bool:
        """Pages group by group of layers."""
        whole_words = not (self._sizes % WORD_BYTES).any() and not (self._addresses % WORD_BYTES).any()
        return self._on_host or (self._bring is not None and whole_words)

    def bringing(self, memory: Tensor, rows: I32, pages: I32) -> Callable[[int], None]:
        """What restores one group of layers. memory: uint8[n, page_bytes] of the host, which a device can read where it lies;
        rows: int32[pages] of it. Raises as save()."""
        assert self.can_bring, "groups of layers are brought where they can be"
        assert len(rows) == len(pages), "a row for every page"
        self._check_pages(pages)
        self._check_rows([memory[0]])
        if not 0 <= rows.min() <= rows.max() < len(memory):
            raise IndexError(f"there are rows 0 to {len(memory) - 1}")
        addresses = memory.data_ptr() + rows.astype(np.int64) * memory.stride(0)
        if self._on_host:
            return partial(self._bring_on_host, memory, rows, addresses, pages)
        assert self._bring is not None, "a device reads rows where they lie"
        assert not (addresses % WORD_BYTES).any(), "rows begin with a word"
        of_rows, places = torch.from_numpy(np.stack((addresses, pages))).to(self._device).unbind()
        groups = [self._parts_of(group) for group in range(len(self.groups.layers))]
        parts = np.concatenate(groups)
        table = np.stack((self._addresses[parts], self._sizes[parts], self._offsets[parts]), axis=1)
        tables = torch.from_numpy(table).to(self._device).split([len(group) for group in groups])
        bring = self._bring
        return lambda group: bring(of_rows, places, tables[group])

    def _bring_on_host(self, memory: Tensor, rows: I32, addresses: Addresses, pages: I32, group: int) -> None:
        parts = self._parts_of(group)
        if self._copies is not None:
            places, pieces, sizes = self._found(pages, addresses, parts)
            self._copies.copy_pieces(places, pieces, sizes, streamed=False)
            return
        for place, piece in self._pieces(pages, [memory[row] for row in rows.tolist()], parts):
            place[:] = piece

    def _parts_of(self, group: int) -> Addresses:
        """Keys and values of its layers."""
        layers = np.array(self.groups.layers[group], dtype=np.int64)
        return np.stack((2 * layers, 2 * layers + 1), axis=1).ravel()

    def save(self, pages: I32, rows: Sequence[Tensor], streamed: bool = False) -> None:
        """pages: int32[n]. rows: n of uint8[page_bytes] on the host, which have the pages' bytes once all is done that this
        thread has put on the device; at once where the pools are on the host themselves. streamed: nothing else is to leave the
        host's caches for them. Raises IndexError for a page that there is not, ValueError for a row of another size."""
        assert len(rows) == len(pages), "a row for every page"
        self._check_pages(pages)
        self._check_rows(rows)
        if self._copies is not None:
            places, pieces, sizes = self._found(pages, self._addresses_of(rows), self._all)
            self._copies.copy_pieces(pieces, places, sizes, streamed)
            return
        if self._on_host:
            for place, piece in self._pieces(pages, rows, self._all):
                piece[:] = place
            return
        for some, ids in self._on_device(pages, rows):
            gathered = torch.empty((len(some), self.page_bytes), dtype=torch.uint8, device=self._device)
            for part, at in self._places():
                gathered[:, at : at + part.shape[1]].copy_(part.index_select(0, ids))
            for row, found in zip(some, gathered, strict=True):
                row.copy_(found, non_blocking=True)

    def restore(self, rows: Sequence[Tensor], pages: I32) -> None:
        """The other way: rows are read until all is done that this thread has put on the device."""
        assert len(rows) == len(pages), "a row for every page"
        self._check_pages(pages)
        self._check_rows(rows)
        if self._copies is not None:
            places, pieces, sizes = self._found(pages, self._addresses_of(rows), self._all)
            self._copies.copy_pieces(places, pieces, sizes, streamed=False)
            return
        if self._on_host:
            for place, piece in self._pieces(pages, rows, self._all):
                place[:] = piece
            return
        for some, ids in self._on_device(pages, rows):
            gathered = torch.empty((len(some), self.page_bytes), dtype=torch.uint8, device=self._device)
            for row, there in zip(some, gathered, strict=True):
                there.copy_(row, non_blocking=True)
            for part, at in self._places():
                part.index_copy_(0, ids, gathered[:, at : at + part.shape[1]])

    def synchronize(self) -> None:
        """Blocks until the pools' device has done everything."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _check_pages(self, pages: I32) -> None:
        if len(pages) and not 0 <= pages.min() <= pages.max() < len(self._parts[0]):
            raise IndexError(f"there are pages 0 to {len(self._parts[0]) - 1}")

    def _check_rows(self, rows: Sequence[Tensor]) -> None:
        if not all(row.is_contiguous() and row.nbytes == self.page_bytes for row in rows):
            raise ValueError(f"a row is {self.page_bytes} bytes, one behind the other")

    @staticmethod
    def _addresses_of(rows: Sequence[Tensor]) -> Addresses:
        return np.array([row.data_ptr() for row in rows], dtype=np.int64)

    def _found(self, pages: I32, rows: Addresses, parts: Addresses) -> tuple[Addresses, Addresses, Addresses]:
        """What _pieces() says, as addresses and bytes, page by page."""
        sizes = self._sizes[parts]
        places = self._addresses[parts] + pages.astype(np.int64)[:, None] * sizes
        pieces = rows[:, None] + self._offsets[parts]
        return places.ravel(), pieces.ravel(), np.broadcast_to(sizes, places.shape).ravel()

    def _pieces(self, pages: I32, rows: Sequence[Tensor], parts: Addresses) -> Iterator[tuple[Bytes, Bytes]]:
        """Where each layer's part of each page lies in its pool, and in the page's row: one copy of bytes that lie together, and
        by numpy, is many times as fast as by index."""
        arrays = [row.numpy() for row in rows]
        for number in parts.tolist():
            part, at = self._host_parts[number], int(self._offsets[number])
            for page, row in zip(pages.tolist(), arrays, strict=True):
                yield part[page], row[at : at + part.shape[1]]

    @property
    def _on_host(self) -> bool:
        return self._device.type == "cpu"

    def _on_device(self, pages: I32, rows: Sequence[Tensor]) -> Iterator[tuple[Sequence[Tensor], Tensor]]:
        """Rows, and their pages' ids on the device: so many at once as there is room for beside the pools."""
        at_once = max(1, STAGED_BYTES // self.page_bytes)
        for at in range(0, len(pages), at_once):
            some = pages[at : at + at_once].astype(np.int64)
            yield rows[at : at + at_once], torch.from_numpy(some).to(self._device)

    def _places(self) -> Iterator[tuple[Tensor, int]]:
        """Each layer's part, and where its bytes begin in a row."""
        return zip(self._parts, self._offsets.tolist(), strict=True)
