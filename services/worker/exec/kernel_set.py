"""The kernels of a device: Triton's on a GPU, ours in C++ on a CPU, torch's twins of either where they are asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.contracts.sample_ops import SampleKernels
from kernels.contracts.step_ops import LayerKernels
from kernels.cpu import load_kernels, load_sampling
from kernels.reference import layers as reference

AUTO, TRITON, CPP, TORCH = "auto", "triton", "cpp", "torch"


@dataclass(frozen=True, slots=True)
class KernelSet:
    layers: LayerKernels
    sampling: SampleKernels


def _chosen(name: str, device: torch.device) -> str:
    """name: auto, triton, cpp or torch. Raises ValueError for another one."""
    if name not in (AUTO, TRITON, CPP, TORCH):
        raise ValueError(f"there are no kernels named {name}; there are {AUTO}, {TRITON}, {CPP} and {TORCH}")
    return name if name != AUTO else TRITON if device.type == "cuda" else CPP


def layer_kernels(name: str, device: torch.device, dtype: torch.dtype, num_threads: int) -> LayerKernels:
    """dtype: of the model. num_threads: that C++ kernels compute with. Raises ValueError for an unknown name."""
    chosen = _chosen(name, device)
    if chosen == TORCH:
        return reference
    if chosen == CPP:
        return load_kernels(num_threads, dtype)
    from kernels.triton.layers.layers import TritonLayers

    return TritonLayers(device)


def sample_kernels(name: str, device: torch.device, num_threads: int, max_rows: int, vocab_size: int) -> SampleKernels:
    """max_rows: sampled by one launch. Raises ValueError for an unknown name."""
    chosen = _chosen(name, device)
    if chosen == TORCH:
        return reference
    if chosen == CPP:
        return load_sampling(num_threads)
    from kernels.triton.sampling.sampling import TritonSampling

    return TritonSampling(max_rows, vocab_size, device)
