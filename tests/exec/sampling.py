"""A sampler by itself: slots are admitted and rows of logits sampled, without a model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kernels.contracts.sample_ops import SampleKernels
from kernels.cpu import load_sampling
from kernels.reference import sampling as sampling_twin
from services.worker.core.contracts.plan import I32, BatchPlan, SlotParams
from services.worker.exec.contracts.step_data import Batch, Outcome
from services.worker.exec.sampling.sampler import DeviceSampler
from services.worker.exec.sampling.token_sets import Words
from services.worker.exec.streams.upload import UploadRing
from tests.exec.device_doubles import InlineStreams


def sample_kernels(name: str) -> SampleKernels:
    return sampling_twin if name == "torch" else load_sampling(1)


class Sampling:
    """The sampler's calls in the order in which a runner makes them. kernels: cpp or torch."""

    def __init__(self, max_slots: int, vocab_size: int, kernels: SampleKernels) -> None:
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
        """logits: float32[n, V]; positions: of the tokens sampled; masks: row -> uint32[ceil(V / 32)]."""
        space = self.sampler.passing_space(torch.from_numpy(slots), torch.from_numpy(positions))
        launched = self.sampler.launch(Batch(slots, np.arange(len(slots)), logits, space, fixed=False), masks or {})
        return self.sampler.outcome(launched)

    def edited(self, logits: Tensor, slot: int, position: int) -> list[float]:
        """float32[V] as the slot's row is drawn from."""
        self.sample(logits[None], np.array([slot], np.int32), np.array([position], np.int32))
        found: list[float] = self.sampler._edited[0].tolist()
        return found
