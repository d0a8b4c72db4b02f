"""Declares the request to load a model, the device for it, and the loader of its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from rootstock_llm.kernels.contracts.ops import Kernels
from rootstock_llm.kernels.contracts.step_ops import LayerKernels
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.services.worker.exec.weights.checkpoint import Checkpoint
from rootstock_llm.services.worker.exec.weights.load_progress import LoadMeter, LoadPhases
from rootstock_llm.services.worker.exec.weights.quantization import (
    FROM_CHECKPOINT,
    UNQUANTIZED,
    Quantization,
    QuantizationOptions,
)
from rootstock_llm.services.worker.exec.weights.source import CheckpointSource, WeightReader, listed_tensors

T = TypeVar("T")


class WeightLoader(Protocol):
    """A function that makes a model from a checkpoint's tensors."""

    def __call__(
        self,
        checkpoint: Checkpoint,
        read: Callable[[WeightReader], T],
        dtype: torch.dtype,
        kernels: Kernels,
        progress: Callable[[str], None],
        phases: LoadPhases,
        quantization: Quantization = UNQUANTIZED,
    ) -> T:
        """Calls `read` with a reader of the checkpoint's tensors, and returns its result. Raises CheckpointError.

        The reader returns tensors on the device. The duration is added to the phase "weights".

        Args:
            read: makes the model from a reader. It is called several times, and must request the same tensors each time.
            dtype: dtype to which the tensors are converted.
            kernels: kernels of the device, which pack the weights.
            progress: called with a log line every few seconds and at the end, on any thread.
            quantization: decides the form of the model's matrices.
        """


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The device on which a model will run."""

    device: torch.device
    kernels: Callable[[torch.dtype], LayerKernels]  # returns the kernels for a dtype
    weights: WeightLoader  # loads weights onto the device
    # Returns the fingerprint of the kernels for (dtype, context length, page size), see kernel_set.numerics(). None unless the
    # deterministic mode is on. Models that transformers' code computes cannot be loaded in this mode.
    numerics: Callable[[torch.dtype, int, int], str] | None = None


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A model folder, and the options with which its model is loaded."""

    folder: Path
    dtype: str  # auto, bfloat16, float16 or float32
    page_size: int  # tokens
    context_len: int | None  # tokens; None for the longest context of the model
    num_threads: int  # threads with which a CPU computes
    progress: Callable[[str], None]  # called with lines for the log
    target: LoadTarget
    phases: LoadPhases = field(default_factory=LoadPhases)
    quantization: QuantizationOptions = FROM_CHECKPOINT


def load_weights(
    checkpoint: Checkpoint,
    read: Callable[[WeightReader], T],
    dtype: torch.dtype,
    kernels: Kernels,
    progress: Callable[[str], None],
    phases: LoadPhases,
    quantization: Quantization = UNQUANTIZED,
) -> T:
    """Implements WeightLoader for a CPU: `read` gets tensors that are read from the files one by one."""
    with phases.timed("weights"):
        listed = listed_tensors(read, dtype, quantization)
        checkpoint.require([placement.name for placement in listed])
        total = sum(placement.into.nbytes for placement in listed)
        meter = LoadMeter(total, phases.clock, progress)
        keeps = kernels is reference  # the torch twins pack no copies
        source = CheckpointSource(checkpoint, dtype, on_read=meter.added, quantization=quantization, copies=keeps)
        loaded = read(WeightReader(source, kernels))
        meter.end()
        return loaded
