"""What is to be loaded, and where it shall run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kernels.contracts.ops import Kernels
from kernels.contracts.step_ops import LayerKernels
from services.worker.exec.weights.checkpoint import Checkpoint
from services.worker.exec.weights.families import DecoderConfig
from services.worker.exec.weights.load_phases import LoadPhases
from services.worker.exec.weights.weights import DecoderWeights, load_weights

WeightLoader = Callable[[Checkpoint, DecoderConfig, torch.dtype, Kernels, Callable[[str], None], LoadPhases], DecoderWeights]


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Where a model shall run. kernels: of its dtype. weights: reads a decoder's, and counts as the phase "weights".
    numerics: a fingerprint of what decides a result's bits, by dtype, context and page size; None where they may differ. With
    one, only what our own decoder computes may be loaded."""

    device: torch.device
    kernels: Callable[[torch.dtype], LayerKernels]
    weights: WeightLoader
    numerics: Callable[[torch.dtype, int, int], str] | None = None


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """dtype: auto, bfloat16, float16 or float32. context_len: tokens, None for the model's own."""

    folder: Path
    dtype: str
    page_size: int
    context_len: int | None
    num_threads: int
    progress: Callable[[str], None]
    target: LoadTarget
    phases: LoadPhases = field(default_factory=LoadPhases)


def timed_weights(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    dtype: torch.dtype,
    kernels: Kernels,
    progress: Callable[[str], None],
    phases: LoadPhases,
) -> DecoderWeights:
    """A WeightLoader for a CPU: straight from the checkpoint."""
    with phases.timed("weights"):
        return load_weights(checkpoint, config, dtype, kernels, progress, phases.clock)
