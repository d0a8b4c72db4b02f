"""The kernels of a device: Triton's on a GPU, torch's twins of them elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.contracts.ops import Kernels
from kernels.contracts.sample_ops import SampleKernels
from kernels.contracts.step_ops import StepKernels


class LayerKernels(Kernels, StepKernels, Protocol):
    """What runs the model's layers also begins its steps."""


@dataclass(frozen=True, slots=True)
class KernelSet:
    layers: LayerKernels
    sampling: SampleKernels


def _chosen(name: str, device: torch.device) -> str:
    """name: auto, triton or torch. Raises ValueError for another one."""
    if name not in ("auto", "triton", "torch"):
        raise ValueError(f"there are no kernels named {name}; there are auto, triton and torch")
    return name if name != "auto" else "triton" if device.type == "cuda" else "torch"


def layer_kernels(name: str, device: torch.device) -> LayerKernels:
    """Raises ValueError for another name than auto, triton and torch."""
    if _chosen(name, device) == "torch":
        from kernels.reference import layers as reference

        return reference
    from kernels.triton.layers.layers import TritonLayers

    return TritonLayers(device)


def kernel_set(name: str, device: torch.device, max_rows: int, vocab_size: int) -> KernelSet:
    """max_rows: sampled by one launch. Raises ValueError as layer_kernels()."""
    layers = layer_kernels(name, device)
    if _chosen(name, device) == "torch":
        from kernels.reference import sampling as sampling_twin

        return KernelSet(layers, sampling_twin)
    from kernels.triton.sampling.sampling import TritonSampling

    return KernelSet(layers, TritonSampling(max_rows, vocab_size, device))
