"""Copies pages out of the pool on threads of others than the executor's: for who serves them to other workers."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.core.contracts.transfers import I32
from services.worker.exec.pools.arrivals import Arrivals
from services.worker.exec.streams.cuda_streams import Streams
from services.worker.exec.tiers.page_copier import PageCopier


class PoolReader:
    """A ReadPages. copier: of the pools as they are at that time. arrivals: what comes into them layer by layer. Pages that are
    read must have been computed by steps that have been committed; they are whole as long as nobody may write them. One caller at
    a time for each thread."""

    def __init__(self, streams: Streams, copier: Callable[[], PageCopier], arrivals: Arrivals) -> None:
        self._streams, self._copier, self._arrivals = streams, copier, arrivals
        self._own = threading.local()  # memory of each thread

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
        """uint8[pages, page_bytes], of this thread."""
        kept: Tensor | None = getattr(self._own, "pinned", None)
        if kept is None or kept.shape[0] < pages or kept.shape[1] != page_bytes:
            kept = self._own.pinned = torch.empty((pages, page_bytes), dtype=torch.uint8, pin_memory=True)
        return kept[:pages]
