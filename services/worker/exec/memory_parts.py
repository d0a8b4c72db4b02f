"""Gives the KV pool and the weights of a device back, and takes them again; graphs are captured anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from kernels.contracts.ops import RaggedRows
from services.worker.exec.contracts.causal_model import CausalModel
from services.worker.exec.contracts.operations import OperationRefused, ReleaseMemory, ResumeMemory
from services.worker.exec.pools.kv_pool import NO_POOL, KVPool
from services.worker.exec.step.model_runner import DeviceRunner
from services.worker.exec.streams.returned_memory import return_memory


class NoModel:
    """Stands where a model was whose weights are released."""

    def forward(self, input_ids: Tensor, rows: RaggedRows, pool: KVPool) -> NoReturn:
        raise RuntimeError("the weights are released")

    def states(self, wanted: Tensor) -> NoReturn:
        raise RuntimeError("the weights are released")

    def logits(self, wanted: Tensor) -> NoReturn:
        raise RuntimeError("the weights are released")


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """load_model: reads the checkpoint's folder as it is at that time; allocate_pool: of the size of the first one;
    capture: what start-up did once model and pool were there, graphs among it; drop: lets what others hold of these parts go,
    which the first two make again. No step runs between release and resume."""

    runner: DeviceRunner
    load_model: Callable[[], CausalModel]
    allocate_pool: Callable[[], KVPool]
    capture: Callable[[], None]
    drop: Callable[[ReleaseMemory], None]

    def release(self, parts: ReleaseMemory) -> None:
        if self.runner.graphs is not None:
            self.runner.graphs.release()
        self.drop(parts)
        passes = self.runner.passes
        passes.model = NoModel() if parts.weights else passes.model
        passes.pool = NO_POOL if parts.kv else passes.pool
        return_memory(self.runner.streams.device)

    def resume(self, parts: ResumeMemory) -> None:
        """Raises OperationRefused where the folder or the memory does not allow it; what was released then stays so, and can be
        resumed later."""
        refusal = ""
        try:
            self._resume(parts)
        except Exception as error:  # of any kind: loaders raise many, and graphs want memory too
            refusal = f"cannot resume: {error}"
        if refusal:  # outside the handler: that error holds what was made until then
            self.release(ReleaseMemory(kv=parts.kv, weights=parts.weights))
            raise OperationRefused(refusal)

    def _resume(self, parts: ResumeMemory) -> None:
        passes, streams = self.runner.passes, self.runner.streams
        with streams.on_forward():  # where steps find it done: a pool takes long to fill with zeros
            model = self.load_model() if parts.weights else passes.model
            pool = self.allocate_pool() if parts.kv else passes.pool
        streams.synchronize()
        passes.model, passes.pool = model, pool
        assert len(pool.keys) == len(pool.values), "each layer has keys and values"
        if streams.device.type == "cpu":
            return_memory(streams.device)  # what loading took is the system's again
        if not isinstance(model, NoModel) and pool is not NO_POOL:
            self.capture()
