"""Releases the KV pool and the weights of a device, and resumes them. After both are resumed, graphs are captured again."""

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
    """Stands for a model whose weights are released, or whose attention is not set yet. Every call raises."""

    def forward(self, input_ids: Tensor, rows: RaggedRows, pool: KVPool) -> NoReturn:
        raise RuntimeError("the model cannot compute: its weights are released")

    def states(self, wanted: Tensor) -> NoReturn:
        raise RuntimeError("the model cannot compute: its weights are released")

    def logits(self, wanted: Tensor) -> NoReturn:
        raise RuntimeError("the model cannot compute: its weights are released")


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Implements Releasable for a runner. No step may run from release() to the end of resume()."""

    runner: DeviceRunner
    load_model: Callable[[], CausalModel]  # loads the model that is in the folder now, and the draft model
    allocate_pool: Callable[[], KVPool]  # allocates pools of the same size as at the start, also that of the draft model
    capture: Callable[[], None]  # captures the graphs
    drop: Callable[[ReleaseMemory], None]  # releases the drafter's weights or pool; load_model and allocate_pool restore them

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
        except Exception as error:  # an error of any type: loaders raise many types, and capturing may run out of memory
            refusal = f"cannot resume: {error}"
        if refusal:  # outside of the handler: there, the error's traceback would keep new tensors alive
            self.release(ReleaseMemory(kv=parts.kv, weights=parts.weights))
            raise OperationRefused(refusal)

    def _resume(self, parts: ResumeMemory) -> None:
        passes, streams = self.runner.passes, self.runner.streams
        with streams.on_forward():  # so that later steps run after the pool is filled with zeros
            model = self.load_model() if parts.weights else passes.model
            pool = self.allocate_pool() if parts.kv else passes.pool
        streams.synchronize()
        passes.model, passes.pool = model, pool
        assert len(pool.keys) == len(pool.values), "each layer has keys and values"
        if streams.device.type == "cpu":
            return_memory(streams.device)  # memory that loading needed temporarily
        if not isinstance(model, NoModel) and pool is not NO_POOL:
            self.capture()
