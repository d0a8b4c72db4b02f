"""Releases the KV pool and the weights of a device, resumes them, and then captures graphs again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from rootstock_llm.kernels.contracts.ops import RaggedRows
from rootstock_llm.services.worker.exec.contracts.causal_model import CausalModel
from rootstock_llm.services.worker.exec.contracts.operations import OperationRefused, ReleaseMemory, ResumeMemory
from rootstock_llm.services.worker.exec.pools.kv_pool import NO_POOL, KVPool
from rootstock_llm.services.worker.exec.step.model_runner import DeviceRunner
from rootstock_llm.services.worker.exec.streams.returned_memory import return_memory


class NoModel:
    """Replaces a model whose weights are released."""

    def forward(self, input_ids: Tensor, rows: RaggedRows, pool: KVPool) -> NoReturn:
        raise RuntimeError("the weights are released")

    def states(self, wanted: Tensor) -> NoReturn:
        raise RuntimeError("the weights are released")

    def logits(self, wanted: Tensor) -> NoReturn:
        raise RuntimeError("the weights are released")


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Implements Releasable for a runner. No step may run between release and resume."""

    runner: DeviceRunner
    load_model: Callable[[], CausalModel]  # reads the present contents of the checkpoint's folder
    allocate_pool: Callable[[], KVPool]  # with the size of the first pool
    capture: Callable[[], None]  # captures the graphs
    drop: Callable[[ReleaseMemory], None]  # releases the drafter's parts, which load_model and allocate_pool make again

    def release(self, parts: ReleaseMemory) -> None:
        if self.runner.graphs is not None:
            self.runner.graphs.release()
        self.drop(parts)
        passes = self.runner.passes
        passes.model = NoModel() if parts.weights else passes.model
        passes.pool = NO_POOL if parts.kv else passes.pool
        return_memory(self.runner.streams.device)

    def resume(self, parts: ResumeMemory) -> None:
        """Loads and allocates the parts again.

        Raises:
            OperationRefused: loading, allocation or capture failed. The parts are then released and can be resumed later.
        """
        refusal = ""
        try:
            self._resume(parts)
        except Exception as error:  # any exception, because loaders raise many types, and graphs may run out of memory
            refusal = f"cannot resume: {error}"
        if refusal:  # outside of the handler, because the error's traceback refers to tensors made so far
            self.release(ReleaseMemory(kv=parts.kv, weights=parts.weights))
            raise OperationRefused(refusal)

    def _resume(self, parts: ResumeMemory) -> None:
        passes, streams = self.runner.passes, self.runner.streams
        with streams.on_forward():  # on the stream of steps, which then start after the pool is filled with zeros
            model = self.load_model() if parts.weights else passes.model
            pool = self.allocate_pool() if parts.kv else passes.pool
        streams.synchronize()
        passes.model, passes.pool = model, pool
        assert len(pool.keys) == len(pool.values), "each layer has keys and values"
        if streams.device.type == "cpu":
            return_memory(streams.device)  # memory that loading needed temporarily
        if not isinstance(model, NoModel) and pool is not NO_POOL:
            self.capture()
