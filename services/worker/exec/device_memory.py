"""Gives the KV pool and the weights of a model runner back to the system, and takes them again."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from kernels.contracts.ops import RaggedRows
from services.worker.exec.contracts.causal_model import CausalModel
from services.worker.exec.contracts.operations import OperationRefused, ReleaseMemory, ResumeMemory
from services.worker.exec.pools.pools import KVPool
from services.worker.exec.runner import ModelRunner

NO_POOL = KVPool((), ())


class NoModel:
    """Stands where a model was whose weights are released."""

    def forward(self, input_ids: Tensor, rows: RaggedRows, pool: KVPool) -> NoReturn:
        raise RuntimeError("the weights are released")

    def states(self, wanted: Tensor) -> NoReturn:
        raise RuntimeError("the weights are released")

    def logits(self, wanted: Tensor) -> NoReturn:
        raise RuntimeError("the weights are released")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """load_model: reads the checkpoint's folder as it is at that time; allocate_pool: of the size of the first one.

    Belongs to the thread that runs the steps; no step runs between release and resume.
    """

    runner: ModelRunner
    load_model: Callable[[], CausalModel]
    allocate_pool: Callable[[], KVPool]

    def release(self, parts: ReleaseMemory) -> None:
        self.runner.hold(model=NoModel() if parts.weights else None, pool=NO_POOL if parts.kv else None)
        _return_to_system()

    def resume(self, parts: ResumeMemory) -> None:
        """Raises OperationRefused where the folder or the memory does not allow it; what was released then stays so."""
        try:
            model = self.load_model() if parts.weights else None
            pool = self.allocate_pool() if parts.kv else None
        except Exception as error:  # of any kind: loaders raise many, and nothing has changed so far
            raise OperationRefused(f"cannot resume: {error}") from error
        self.runner.hold(model=model, pool=pool)
        _return_to_system()


def _return_to_system() -> None:
    """What is free inside the process becomes free outside of it. The C library keeps small and middle-sized blocks otherwise."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, other C libraries may not
    if trim is not None:
        trim(0)
