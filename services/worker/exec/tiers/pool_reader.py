"""Copies pages out of the pool on threads outside the executor, for the server of KV reservations."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.core.contracts.transfers import I32
from services.worker.exec.pools.kv_pool import Arrivals
from services.worker.exec.streams.cuda_streams import Streams
from services.worker.exec.tiers.page_copier import PageCopier


class PoolReader:
    """A ReadPages of an executor's pools.

    The read pages must be computed by committed steps. The copy is whole only if no step writes the pages during it. Each thread
    has a buffer of its own.
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
        kept: Tensor | None = getattr(self._own, "pinned", None)
        if kept is None or kept.shape[0] < pages or kept.shape[1] != page_bytes:
            kept = self._own.pinned = torch.empty((pages, page_bytes), dtype=torch.uint8, pin_memory=True)
        return kept[:pages]
