"""Copies pages between the KV pools and rows of bytes in host memory, for tiers that store pages and for remote workers.

A row has the KV of one page in all layers whose KV is in pages. UnitCopier copies the other layers. A piece is the keys or the
values of one layer in a page. PageCopier copies on the current stream of the calling thread. PoolReader copies pages and units
out of the pools for the threads of the KV server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rootstock_llm.kernels.contracts.step_ops import BringPieces
from rootstock_llm.services.worker.core.contracts.cache_groups import CacheKind
from rootstock_llm.services.worker.core.contracts.transfers import I32
from rootstock_llm.services.worker.exec.pools.kv_pool import Arrivals, KVPool, LayerGroups
from rootstock_llm.services.worker.exec.streams.cuda_streams import Streams
from rootstock_llm.services.worker.exec.tiers.unit_copier import Addresses, PieceCopies, UnitCopier

STAGED_BYTES = 16 << 20  # bytes of GPU memory for pages that are copied between the pools and the host
WORD_BYTES = 8  # a GPU copies multiples of this size from host memory, see kernels/triton/page_pieces.py
Bytes = NDArray[np.uint8]


class PageCopier:
    """Copies pages of pools on the current stream of their device. All pools have the same number of pages."""

    def __init__(self, pools: Sequence[KVPool], copies: PieceCopies | None = None, bring: BringPieces | None = None) -> None:
        """Computes the addresses and sizes of the pieces.

        Args:
            pools: pools of the model and of the draft model, always in this order, which determines the bytes of a row.
            copies: copies pieces if the pools are in host memory; None to copy them one by one with numpy.
            bring: kernel with which a GPU reads rows in host memory; None if there is no such kernel.
        """
        numbered = [(pool, at) for pool in pools for at in range(len(pool.keys))]
        layers = [number for number, (pool, at) in enumerate(numbered) if pool.kind(at) is None]
        tensors = [each for number in layers for each in _tensors(*numbered[number])]
        self._part_of = {layer: 2 * place for place, layer in enumerate(layers)}  # index of the keys of a layer in `_parts`
        self._without_pages = set(range(len(numbered))) - set(layers)
        assert len({len(each) for each in tensors}) == 1, "all pools have the same number of pages"
        self._parts = [each.view(len(each), -1).view(torch.uint8) for each in tensors]
        self.page_bytes = sum(part.shape[1] for part in self._parts)  # bytes of a page over all pools, which is the size of a row
        self._num_layers = [len(pool.keys) for pool in pools]
        self._device = tensors[0].device
        self._host_parts = [part.numpy() for part in self._parts] if self._on_host else []
        assert copies is None or self._on_host, "only pools in host memory can be copied by `copies`"
        assert all(part.is_contiguous() for part in self._parts), "the pages of a layer are contiguous"
        self._copies, self._bring = copies, bring
        self._addresses = np.array([part.data_ptr() for part in self._parts], dtype=np.int64)
        self._sizes = np.array([part.shape[1] for part in self._parts], dtype=np.int64)
        self._offsets = self._sizes.cumsum() - self._sizes
        self._all = np.arange(len(self._parts))
        self._numbered = numbered

    @cached_property
    def units(self) -> list[UnitCopier]:
        """Copiers of the units of each cache group, in the order of PoolSizes.groups()."""
        found = []
        for kind in CacheKind:
            layers = [(pool, at) for pool, at in self._numbered if pool.kind(at) is kind]
            if layers:
                tensors = [each for layer in layers for each in _tensors(*layer)]
                count = layers[0][0].num_states if kind is CacheKind.STATE else len(tensors[0])
                found.append(UnitCopier(tensors, count, self.page_bytes, self._copies))
        return found

    @cached_property
    def groups(self) -> LayerGroups:
        """Groups of layers, in the order in which pages are loaded layer by layer."""
        return LayerGroups.for_pools(self._num_layers, self._without_pages)

    @property
    def can_load_groups(self) -> bool:
        """Whether pages can be loaded group by group of layers, see group_loader()."""
        whole_words = not (self._sizes % WORD_BYTES).any() and not (self._addresses % WORD_BYTES).any()
        return self._on_host or (self._bring is not None and whole_words)

    def group_loader(self, memory: Tensor, rows: I32, pages: I32) -> Callable[[int], None]:
        """Returns a function that copies one group of layers of rows to pages. Its argument is the number of the group.

        Args:
            memory: uint8[n, page_bytes] in host memory, pinned for a GPU.
            rows: int32[number of pages], the row in `memory` for each page.
            pages: int32[number of pages], pages of the pools.

        Raises:
            IndexError: a page or row does not exist.
            ValueError: rows do not have page_bytes bytes.
        """
        assert self.can_load_groups, "pages can be loaded layer by layer"
        assert len(rows) == len(pages), "there is one row per page"
        self._check_pages(pages)
        self._check_rows([memory[0]])
        if not 0 <= rows.min() <= rows.max() < len(memory):
            raise IndexError(f"rows {rows.min()} to {rows.max()} are requested; the host tier has rows 0 to {len(memory) - 1}")
        addresses = memory.data_ptr() + rows.astype(np.int64) * memory.stride(0)
        if self._on_host:
            return partial(self._load_group_on_host, memory, rows, addresses, pages)
        assert self._bring is not None, "a GPU that can load groups has the kernel"
        assert not (addresses % WORD_BYTES).any(), "rows begin at multiples of WORD_BYTES"
        row_addresses, page_ids = torch.from_numpy(np.stack((addresses, pages))).to(self._device).unbind()
        groups = [self._parts_of(group) for group in range(len(self.groups.layers))]
        parts = np.concatenate(groups)
        table = np.stack((self._addresses[parts], self._sizes[parts], self._offsets[parts]), axis=1)
        tables = torch.from_numpy(table).to(self._device).split([len(group) for group in groups])
        bring = self._bring
        return lambda group: bring(row_addresses, page_ids, tables[group])

    def _load_group_on_host(self, memory: Tensor, rows: I32, addresses: Addresses, pages: I32, group: int) -> None:
        parts = self._parts_of(group)
        if self._copies is not None:
            in_pool, in_rows, sizes = self._piece_addresses(pages, addresses, parts)
            self._copies.copy_pieces(in_pool, in_rows, sizes, streamed=False)
            return
        for in_page, in_row in self._pieces(pages, [memory[row] for row in rows.tolist()], parts):
            in_page[:] = in_row

    def _parts_of(self, group: int) -> Addresses:
        """Returns the indices in self._parts of the keys and values of a group's layers."""
        parts = np.array([self._part_of[layer] for layer in self.groups.layers[group]], dtype=np.int64)
        return np.stack((parts, parts + 1), axis=1).ravel()

    def save(self, pages: I32, rows: Sequence[Tensor], streamed: bool = False) -> None:
        """Copies pages to rows.

        If the pools are in host memory, the rows are complete on return. Otherwise, they are complete when the GPU has done the
        work that this thread has launched.

        Args:
            pages: int32[n], pages of the pools.
            rows: n tensors uint8[page_bytes] in host memory.
            streamed: whether the rows are written past the CPU caches, so that other data stays cached.

        Raises:
            IndexError: a page does not exist.
            ValueError: a row does not have page_bytes bytes.
        """
        assert len(rows) == len(pages), "there is one row per page"
        self._check_pages(pages)
        self._check_rows(rows)
        if self._copies is not None:
            in_pool, in_rows, sizes = self._piece_addresses(pages, self._addresses_of(rows), self._all)
            self._copies.copy_pieces(in_rows, in_pool, sizes, streamed)
            return
        if self._on_host:
            for in_page, in_row in self._pieces(pages, rows, self._all):
                in_row[:] = in_page
            return
        for some, ids in self._on_device(pages, rows):
            gathered = torch.empty((len(some), self.page_bytes), dtype=torch.uint8, device=self._device)
            for part, at in self._parts_with_offsets():
                gathered[:, at : at + part.shape[1]].copy_(part.index_select(0, ids))
            for row, found in zip(some, gathered, strict=True):
                row.copy_(found, non_blocking=True)

    def restore(self, rows: Sequence[Tensor], pages: I32) -> None:
        """Copies rows to pages. Arguments and errors are those of save().

        The rows must not change until the GPU has done the work that this thread has launched.
        """
        assert len(rows) == len(pages), "there is one row per page"
        self._check_pages(pages)
        self._check_rows(rows)
        if self._copies is not None:
            in_pool, in_rows, sizes = self._piece_addresses(pages, self._addresses_of(rows), self._all)
            self._copies.copy_pieces(in_pool, in_rows, sizes, streamed=False)
            return
        if self._on_host:
            for in_page, in_row in self._pieces(pages, rows, self._all):
                in_page[:] = in_row
            return
        for some, ids in self._on_device(pages, rows):
            gathered = torch.empty((len(some), self.page_bytes), dtype=torch.uint8, device=self._device)
            for row, target in zip(some, gathered, strict=True):
                target.copy_(row, non_blocking=True)
            for part, at in self._parts_with_offsets():
                part.index_copy_(0, ids, gathered[:, at : at + part.shape[1]])

    def synchronize(self) -> None:
        """Blocks until a GPU has done all work. Does nothing if the pools are in host memory."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _check_pages(self, pages: I32) -> None:
        if len(pages) and not 0 <= pages.min() <= pages.max() < len(self._parts[0]):
            raise IndexError(
                f"pages {pages.min()} to {pages.max()} are requested; the pool has pages 0 to {len(self._parts[0]) - 1}"
            )

    def _check_rows(self, rows: Sequence[Tensor]) -> None:
        if not all(row.is_contiguous() and row.nbytes == self.page_bytes for row in rows):
            raise ValueError(f"each row must be contiguous and have {self.page_bytes} bytes")

    @staticmethod
    def _addresses_of(rows: Sequence[Tensor]) -> Addresses:
        return np.array([row.data_ptr() for row in rows], dtype=np.int64)

    def _piece_addresses(self, pages: I32, rows: Addresses, parts: Addresses) -> tuple[Addresses, Addresses, Addresses]:
        """Returns for each piece of each page its address in the pool, its address in the page's row, and its size."""
        sizes = self._sizes[parts]
        in_pool = self._addresses[parts] + pages.astype(np.int64)[:, None] * sizes
        in_rows = rows[:, None] + self._offsets[parts]
        return in_pool.ravel(), in_rows.ravel(), np.broadcast_to(sizes, in_pool.shape).ravel()

    def _pieces(self, pages: I32, rows: Sequence[Tensor], parts: Addresses) -> Iterator[tuple[Bytes, Bytes]]:
        """Yields for each piece of each page its bytes in the pool and its bytes in the page's row.

        Copying contiguous pieces one by one with numpy is many times as fast as one copy by index.
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
        """Yields (rows, page ids on the GPU) in batches of at most STAGED_BYTES."""
        at_once = max(1, STAGED_BYTES // self.page_bytes)
        for at in range(0, len(pages), at_once):
            some = pages[at : at + at_once].astype(np.int64)
            yield rows[at : at + at_once], torch.from_numpy(some).to(self._device)

    def _parts_with_offsets(self) -> Iterator[tuple[Tensor, int]]:
        """Returns (keys or values of a layer, offset of their bytes in a row) for all layers."""
        return zip(self._parts, self._offsets.tolist(), strict=True)


def _tensors(pool: KVPool, layer: int) -> tuple[Tensor, Tensor]:
    return pool.keys[layer], pool.values[layer]


class PoolReader:
    """Implements ReadPages for an executor's pools. Any thread may call it.

    The pages must have been computed by committed steps. The copy is consistent only if no step writes the pages during the copy.
    For a GPU, each thread has its own pinned buffer.
    """

    def __init__(self, streams: Streams, copier: Callable[[], PageCopier], arrivals: Arrivals) -> None:
        """Starts without buffers.

        Args:
            streams: streams of the executor.
            copier: returns a copier of the present pools.
            arrivals: layer-wise loads into the pools.
        """
        self._streams, self._copier, self._arrivals = streams, copier, arrivals
        self._per_thread = threading.local()  # per thread: pinned memory

    def __call__(self, pages: I32, out: memoryview, group: int = 0) -> None:
        torch.set_num_threads(1)  # applies to the calling thread only
        device = self._streams.device
        with torch.inference_mode(), self._streams.on_spare():
            copier = self._copier()
            self._arrivals.settle()
            rows = torch.frombuffer(out, dtype=torch.uint8).view(len(pages), copier.page_bytes)
            to = self._pinned(len(pages), copier.page_bytes) if device.type == "cuda" else rows
            if group:
                copier.units[group - 1].save(pages.astype(np.int64), to.unbind())
            else:
                copier.save(pages, to.unbind())
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
                rows.copy_(to)

    def _pinned(self, pages: int, page_bytes: int) -> Tensor:
        """Returns uint8[pages, page_bytes] of this thread's pinned memory."""
        buffer: Tensor | None = getattr(self._per_thread, "pinned", None)
        if buffer is None or buffer.shape[0] < pages or buffer.shape[1] != page_bytes:
            buffer = self._per_thread.pinned = torch.empty((pages, page_bytes), dtype=torch.uint8, pin_memory=True)
        return buffer[:pages]
