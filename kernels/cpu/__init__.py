"""Kernels for CPUs: C++ where a compiler is at hand, else their twins in torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from kernels.contracts.sample_ops import SampleKernels
from kernels.contracts.step_ops import LayerKernels
from kernels.cpu.build import BuildFailed, built_library
from kernels.cpu.library import CpuKernels
from kernels.cpu.sampling import CpuSampling
from kernels.reference import layers as reference

logger = logging.getLogger(__name__)
Made = TypeVar("Made")


def load_kernels(num_threads: int, dtype: torch.dtype) -> LayerKernels:
    """The fastest kernels that this machine can run for a model dtype. Builds them on first use."""
    if dtype not in (torch.float32, torch.bfloat16):
        return reference
    made: LayerKernels | None = _made(CpuKernels, num_threads)
    return made or reference


def load_sampling(num_threads: int) -> SampleKernels:
    """Logits are float32, whatever the model's dtype. Builds as load_kernels()."""
    made: SampleKernels | None = _made(CpuSampling, num_threads)
    return made or reference


def _made(kind: Callable[[Path, int], Made], num_threads: int) -> Made | None:
    try:
        return kind(built_library(), num_threads)
    except (BuildFailed, OSError) as error:
        logger.warning("running on plain torch, which is slow: the C++ kernels are not there: %s", error)
        return None
