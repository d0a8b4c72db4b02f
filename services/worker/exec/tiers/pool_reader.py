"""Copies pages out of the pool on threads of others than the executor's: for who serves them to other workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.worker.core.contracts.transfers import I32
from services.worker.exec.tiers.page_copier import PageCopier


class PoolReader:
    """A ReadPages. copier: of the pools as they are at that time. Pages that are read must have been computed by steps that have
    been committed; they are whole as long as nobody may write them. One caller at a time for each thread."""

    def __init__(self, device: torch.device, copier: Callable[[], PageCopier]) -> None:
        self._device, self._copier = device, copier
        self._own = threading.local()  # a stream for each thread: one after the other they would share those of the steps

    def __call__(self, pages: I32) -> memoryview:
        torch.set_num_threads(1)  # per thread, hence here
        with torch.inference_mode(), self._own_stream():
            ids = torch.from_numpy(pages.astype(np.int64)).to(self._device)
            rows = self._on_host(self._copier().save(ids))
        return rows.reshape(-1).numpy().data

    def _own_stream(self) -> AbstractContextManager[Any]:
        if self._device.type != "cuda":
            return nullcontext()
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self._device)
        return torch.cuda.stream(self._own.stream)

    def _on_host(self, rows: Tensor) -> Tensor:
        if rows.device.type == "cpu":
            return rows
        there = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=True)
        there.copy_(rows, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return there
