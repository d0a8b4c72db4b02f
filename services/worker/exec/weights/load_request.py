"""The request to load a model: folder, device and weight loader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from rootstock_llm.kernels.contracts.ops import Kernels
from rootstock_llm.kernels.contracts.step_ops import LayerKernels
from rootstock_llm.services.worker.exec.weights.checkpoint import Checkpoint
from rootstock_llm.services.worker.exec.weights.load_progress import LoadMeter, LoadPhases
from rootstock_llm.services.worker.exec.weights.source import CheckpointSource, WeightReader, listed_tensors

T = TypeVar("T")


class WeightLoader(Protocol):
    """Loads what `read` makes of a checkpoint's tensors."""

    def __call__(
        self,
        checkpoint: Checkpoint,
        read: Callable[[WeightReader], T],
        dtype: torch.dtype,
        kernels: Kernels,
        progress: Callable[[str], None],
        phases: LoadPhases,
    ) -> T:
        """Counts as the phase "weights". Raises CheckpointError.

        Args:
            read: called several times, each time for the same tensors.
            kernels: of the device, which will compute with the weights.
            progress: called with a line every few seconds and at the end, from any thread.
        """


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The device that a model will run on."""

    device: torch.device
    # returns the kernels for a dtype
    kernels: Callable[[torch.dtype], LayerKernels]
    weights: WeightLoader
    # returns the fingerprint of everything that affects the bits of a result, for a dtype, a context length and a page size.
    # None outside the deterministic mode, which excludes models that transformers' code computes
    numerics: Callable[[torch.dtype, int, int], str] | None = None


@dataclass(frozen=True, slots=True)
class LoadRequest:
    folder: Path
    # auto, bfloat16, float16 or float32
    dtype: str
    # tokens
    page_size: int
    # tokens. None for the model's own length
    context_len: int | None
    num_threads: int
    # receives lines for the log
    progress: Callable[[str], None]
    target: LoadTarget
    phases: LoadPhases = field(default_factory=LoadPhases)


def load_weights(
    checkpoint: Checkpoint,
    read: Callable[[WeightReader], T],
    dtype: torch.dtype,
    kernels: Kernels,
    progress: Callable[[str], None],
    phases: LoadPhases,
) -> T:
    """Implements WeightLoader on a CPU: reads straight from the checkpoint."""
    with phases.timed("weights"):
        listed = listed_tensors(read, dtype)
        checkpoint.require([placement.name for placement in listed])
        total = sum(placement.into.nbytes for placement in listed)
        meter = LoadMeter(total, phases.clock, progress)
        loaded = read(WeightReader(CheckpointSource(checkpoint, dtype, on_read=meter.added), kernels))
        meter.end()
        return loaded
