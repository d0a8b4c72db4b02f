"""A sampler without a model, with which tests admit slots and sample rows of logits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.sample_ops import SampleKernels
from rootstock_llm.kernels.cpu import load_sampling
from rootstock_llm.kernels.reference import sampling as sampling_twin
from rootstock_llm.services.worker.core.contracts.plan import I32, BatchPlan, SlotParams
from rootstock_llm.services.worker.exec.contracts.step_data import Outcome, SampleBatch
from rootstock_llm.services.worker.exec.sampling.sampler import DeviceSampler
from rootstock_llm.services.worker.exec.sampling.slots import Words
from rootstock_llm.services.worker.exec.streams.copies import UploadRing
from tests.exec.device_doubles import InlineStreams


def sample_kernels(name: str) -> SampleKernels:
    return sampling_twin if name == "torch" else load_sampling(1)


class Sampling:
    """Calls a sampler in the order in which the executor's runner calls it."""

    def __init__(self, max_slots: int, vocab_size: int, kernels: SampleKernels) -> None:
        """Creates a sampler.

        Args:
            max_slots: number of slots.
            vocab_size: number of tokens of the vocabulary.
            kernels: result of sample_kernels().
        """
        streams = InlineStreams()
        self.relay = torch.full((max_slots,), -1, dtype=torch.int64)
        self.sampler = DeviceSampler(max_slots, vocab_size, kernels, streams, self.relay)
        self._ring, self._mark = UploadRing(streams, 64), streams.mark_copy()

    def admit(self, slot: SlotParams) -> None:
        views = self._ring.send(self.sampler.admission([slot]).sections())
        self.sampler.admit(views)
        self._ring.release(self._mark)

    def follow(self, plan: BatchPlan) -> None:
        self.sampler.follow(plan)
        self.sampler.ring.release(self._mark)

    def sample(self, logits: Tensor, slots: I32, positions: I32, masks: Mapping[int, Words] | None = None) -> Outcome:
        """Samples one token per row.

        Args:
            logits: float32[n, V].
            slots: int32[n].
            positions: int32[n], positions of the sampled tokens.
            masks: by row: uint32[ceil(V / 32)], bits of the permitted tokens.
        """
        inputs = self.sampler.step_inputs(torch.from_numpy(slots), torch.from_numpy(positions))
        batch = SampleBatch.of(logits, inputs, slots, np.arange(len(slots)))
        return self.sampler.outcome(self.sampler.launch(batch, masks or {}))

    def edited(self, logits: Tensor, slot: int, position: int) -> list[float]:
        """Returns the slot's logits, V numbers, after penalties, biases and filters."""
        self.sample(logits[None], np.array([slot], np.int32), np.array([position], np.int32))
        found: list[float] = self.sampler._edited[0].tolist()
        return found
