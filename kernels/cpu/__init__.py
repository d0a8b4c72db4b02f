"""Kernels for CPUs: C++ where a compiler is at hand, else the reference in torch."""

from __future__ import annotations

import logging

import torch

from kernels.contracts.ops import Kernels
from kernels.cpu.build import BuildFailed, built_library
from kernels.cpu.library import CpuKernels
from kernels.reference import layers as reference

logger = logging.getLogger(__name__)


def load_kernels(num_threads: int, dtype: torch.dtype) -> Kernels:
    """The fastest kernels that this machine can run for a model dtype. Builds them on first use."""
    if dtype not in (torch.float32, torch.bfloat16):
        return reference
    try:
        return CpuKernels(built_library(), num_threads)
    except (BuildFailed, OSError) as error:
        logger.warning("running on plain torch, which is slow: the C++ kernels are not there: %s", error)
        return reference
