"""Copies pages between the pools and rows of bytes, for tiers that store or send pages.

A row has the KV of all layers of one page. PageCopier copies on the streams of the executor. PoolReader copies pages out of the
pool on threads outside the executor, for the server of KV reservations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rootstock_llm.kernels.contracts.step_ops import BringPieces
from rootstock_llm.services.worker.core.contracts.transfers import I32
from rootstock_llm.services.worker.exec.pools.kv_pool import Arrivals, KVPool, LayerGroups
from rootstock_llm.services.worker.exec.streams.cuda_streams import Streams

STAGED_BYTES = 16 << 20  # device memory for pages that are being copied between a device's pools and the host
WORD_BYTES = 8  # a device copies multiples of this size; see kernels/triton/page_pieces.py
Bytes = NDArray[np.uint8]
Addresses = NDArray[np.int64]


class PieceCopies(Protocol):
    """Copies many pieces of host memory in one call."""

    def copy_pieces(self, to: Addresses, source: Addresses, sizes: Addresses, streamed: bool) -> None: ...


class PageCopier:
    """Copies pages of pools with equal numbers of pages, on the current stream of the pools' device."""

    def __init__(self, pools: Sequence[KVPool], copies: PieceCopies | None = None, bring: BringPieces | None = None) -> None:
        """Computes the addresses of the parts of a page.

        Args:
            pools: the pools, in a fixed order.
            copies: copies pieces if the pools are on the host, None to copy them one by one with numpy.
            bring: lets the pools' device read rows in place in host memory, None if it cannot.
        """
        tensors = [each for pool in pools for pair in zip(pool.keys, pool.values, strict=True) for each in pair]
        assert len({len(each) for each in tensors}) == 1, "all layers have the same number of pages"
        self._parts = [each.view(len(each), -1).view(torch.uint8) for each in tensors]
        self.page_bytes = sum(part.shape[1] for part in self._parts)  # bytes of a row
        self._num_layers = [len(pool.keys) for pool in pools]
        self._device = tensors[0].device
        self._host_parts = [part.numpy() for part in self._parts] if self._on_host else []
        assert copies is None or self._on_host, "`copies` works on host memory only"
        assert all(part.is_contiguous() for part in self._parts), "the pages of a layer are contiguous"
        self._copies, self._bring = copies, bring
        self._addresses = np.array([part.data_ptr() for part in self._parts], dtype=np.int64)
        self._sizes = np.array([part.shape[1] for part in self._parts], dtype=np.int64)
        self._offsets = self._sizes.cumsum() - self._sizes
        self._all = np.arange(len(self._parts))

    @cached_property
    def groups(self) -> LayerGroups:
        """Groups of layers, in the order in which pages are loaded layer by layer."""
        return LayerGroups.for_pools(self._num_layers)

    @property
    def can_bring(self) -> bool:
        """Whether pages can be loaded group by group of layers."""
        whole_words = not (self._sizes % WORD_BYTES).any() and not (self._addresses % WORD_BYTES).any()
        return self._on_host or (self._bring is not None and whole_words)

    def bringing(self, memory: Tensor, rows: I32, pages: I32) -> Callable[[int], None]:
        """Returns a function that loads one group of layers of the pages.

        Args:
            memory: uint8[n, page_bytes] of the host, which the device can read in place.
            rows: int32[pages], rows of `memory`.
            pages: int32[pages], pages of the pools.

        Raises:
            IndexError: a page or row does not exist.
            ValueError: a row has another size.
        """
        assert self.can_bring, "pages can be loaded layer by layer"
        assert len(rows) == len(pages), "there is one row per page"
        self._check_pages(pages)
        self._check_rows([memory[0]])
        if not 0 <= rows.min() <= rows.max() < len(memory):
            raise IndexError(f"there are rows 0 to {len(memory) - 1}")
        addresses = memory.data_ptr() + rows.astype(np.int64) * memory.stride(0)
        if self._on_host:
            return partial(self._bring_on_host, memory, rows, addresses, pages)
        assert self._bring is not None, "the device can read rows in place"
        assert not (addresses % WORD_BYTES).any(), "rows are aligned to words"
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
        """Returns the indices of the keys and values of a group's layers."""
        layers = np.array(self.groups.layers[group], dtype=np.int64)
        return np.stack((2 * layers, 2 * layers + 1), axis=1).ravel()

    def save(self, pages: I32, rows: Sequence[Tensor], streamed: bool = False) -> None:
        """Copies pages to rows.

        If the pools are on the host, the rows are complete on return. Otherwise they are complete when the device has done all
        work of this thread.

        Args:
            pages: int32[n].
            rows: n tensors uint8[page_bytes] on the host.
            streamed: bypass the CPU caches for the rows, so that other data stays cached.

        Raises:
            IndexError: a page does not exist.
            ValueError: a row has another size.
        """
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
        """Copies rows to pages.

        The rows are read until the device has done all work of this thread. Arguments and errors are those of save().
        """
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
        """Blocks until the pools' device has finished all work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _check_pages(self, pages: I32) -> None:
        if len(pages) and not 0 <= pages.min() <= pages.max() < len(self._parts[0]):
            raise IndexError(f"there are pages 0 to {len(self._parts[0]) - 1}")

    def _check_rows(self, rows: Sequence[Tensor]) -> None:
        if not all(row.is_contiguous() and row.nbytes == self.page_bytes for row in rows):
            raise ValueError(f"a row must be contiguous and have {self.page_bytes} bytes")

    @staticmethod
    def _addresses_of(rows: Sequence[Tensor]) -> Addresses:
        return np.array([row.data_ptr() for row in rows], dtype=np.int64)

    def _found(self, pages: I32, rows: Addresses, parts: Addresses) -> tuple[Addresses, Addresses, Addresses]:
        """Returns for each piece its address in the pool, its address in the row, and its size, page by page."""
        sizes = self._sizes[parts]
        places = self._addresses[parts] + pages.astype(np.int64)[:, None] * sizes
        pieces = rows[:, None] + self._offsets[parts]
        return places.ravel(), pieces.ravel(), np.broadcast_to(sizes, places.shape).ravel()

    def _pieces(self, pages: I32, rows: Sequence[Tensor], parts: Addresses) -> Iterator[tuple[Bytes, Bytes]]:
        """Yields each layer's part of each page in its pool and in the page's row.

        One numpy copy of contiguous bytes is many times as fast as a copy by index.
        """
        arrays = [row.numpy() for row in rows]
        for number in parts.tolist():
            part, at = self._host_parts[number], int(self._offsets[number])
            for page, row in zip(pages.tolist(), arrays, strict=True):
                yield part[page], row[at : at + part.shape[1]]

    @property
    def _on_host(self) -> bool:
        return self._device.type == "cpu"

    def _on_device(self, pages: I32, rows: Sequence[Tensor]) -> Iterator[tuple[Sequence[Tensor], Tensor]]:
        """Yields rows and their page ids on the device, in batches that fit into STAGED_BYTES."""
        at_once = max(1, STAGED_BYTES // self.page_bytes)
        for at in range(0, len(pages), at_once):
            some = pages[at : at + at_once].astype(np.int64)
            yield rows[at : at + at_once], torch.from_numpy(some).to(self._device)

    def _places(self) -> Iterator[tuple[Tensor, int]]:
        """Returns pairs of a layer's part and the offset of its bytes in a row."""
        return zip(self._parts, self._offsets.tolist(), strict=True)


class PoolReader:
    """A ReadPages of an executor's pools.

    The pages must have been computed by committed steps. The copy is consistent only if no step writes the pages during the copy.
    Each thread has a buffer of its own.
    """

    def __init__(self, streams: Streams, copier: Callable[[], PageCopier], arrivals: Arrivals) -> None:
        """Starts without buffers.

        Args:
            streams: streams of the executor.
            copier: returns a copier of the present pools.
            arrivals: layer-wise loads into the pools.
        """
        self._streams, self._copier, self._arrivals = streams, copier, arrivals
        self._own = threading.local()  # pinned memory of each thread

    def __call__(self, pages: I32, out: memoryview) -> None:
        torch.set_num_threads(1)  # per thread, hence here
        device = self._streams.device
        with torch.inference_mode(), self._streams.beside():
            copier = self._copier()
            self._arrivals.settle()
            rows = torch.frombuffer(out, dtype=torch.uint8).view(len(pages), copier.page_bytes)
            if device.type == "cuda":
                pinned = self._pinned(len(pages), copier.page_bytes)
                copier.save(pages, pinned.unbind())
                torch.cuda.current_stream(device).synchronize()
                rows.copy_(pinned)
            else:
                copier.save(pages, rows.unbind())

    def _pinned(self, pages: int, page_bytes: int) -> Tensor:
        """Returns uint8[pages, page_bytes] of pinned memory of this thread."""
        buffer: Tensor | None = getattr(self._own, "pinned", None)
        if buffer is None or buffer.shape[0] < pages or buffer.shape[1] != page_bytes:
            buffer = self._own.pinned = torch.empty((pages, page_bytes), dtype=torch.uint8, pin_memory=True)
        return buffer[:pages]
