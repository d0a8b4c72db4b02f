"""Copies pages out of the pool on threads of others than the executor's: for who serves them to other workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from services.worker.core.contracts.transfers import I32
from services.worker.exec.pools.arrivals import Arrivals
from services.worker.exec.tiers.page_copier import PageCopier


class PoolReader:
    """A ReadPages. copier: of the pools as they are at that time. arrivals: what comes into them layer by layer. Pages that are
    read must have been computed by steps that have been committed; they are whole as long as nobody may write them. One caller at
    a time for each thread."""

    def __init__(self, device: torch.device, copier: Callable[[], PageCopier], arrivals: Arrivals) -> None:
        self._device, self._copier, self._arrivals = device, copier, arrivals
        self._own = threading.local()  # a stream for each thread, one after the other they would share those of the steps; memory

    def __call__(self, pages: I32, out: memoryview) -> None:
        torch.set_num_threads(1)  # per thread, hence here
        with torch.inference_mode(), self._own_stream():
            copier = self._copier()
            self._arrivals.settle()
            rows = torch.frombuffer(out, dtype=torch.uint8).view(len(pages), copier.page_bytes)
            if self._device.type == "cuda":
                pinned = self._pinned(len(pages), copier.page_bytes)
                copier.save(pages, pinned.unbind())
                self._own.stream.synchronize()
                rows.copy_(pinned)
            else:
                copier.save(pages, rows.unbind())

    def _own_stream(self) -> AbstractContextManager[Any]:
        if self._device.type != "cuda":
            return nullcontext()
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self._device)
        return torch.cuda.stream(self._own.stream)

    def _pinned(self, pages: int, page_bytes: int) -> Tensor:
        """uint8[pages, page_bytes], of this thread."""
        kept: Tensor | None = getattr(self._own, "pinned", None)
        if kept is None or kept.shape[0] < pages or kept.shape[1] != page_bytes:
            kept = self._own.pinned = torch.empty((pages, page_bytes), dtype=torch.uint8, pin_memory=True)
        return kept[:pages]
