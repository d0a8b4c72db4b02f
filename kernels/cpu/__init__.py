"""Kernels for CPUs: C++ where a compiler is at hand, else their twins in torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from kernels.contracts.sample_ops import SampleKernels
from kernels.contracts.step_ops import LayerKernels
from kernels.cpu.build import BuildFailed, built_library
from kernels.cpu.copies import CpuCopies
from kernels.cpu.library import CpuKernels
from kernels.cpu.sampling import CpuSampling
from kernels.reference import layers as reference

logger = logging.getLogger(__name__)
COST = "2 to 7 times slower than on C++ kernels"  # measured: docs/reference/performance.md
Made = TypeVar("Made")


def load_kernels(num_threads: int, dtype: torch.dtype, deterministic: bool = False) -> LayerKernels:
    """The fastest kernels that this machine can run for a model dtype. Builds them on first use. deterministic: see CpuKernels;
    raises ValueError where these cannot run, for nothing stands in for them."""
    made: LayerKernels | None = None
    if dtype in (torch.float32, torch.bfloat16):
        made = _made(partial(CpuKernels, threads=num_threads, deterministic=deterministic))
    if deterministic and made is None:
        raise ValueError(f"deterministic kernels for {dtype} cannot be had: they are the C++ ones, of float32 and bfloat16")
    return made or reference


def load_sampling(num_threads: int) -> SampleKernels:
    """Logits are float32, whatever the model's dtype. Builds as load_kernels()."""
    made: SampleKernels | None = _made(partial(CpuSampling, threads=num_threads))
    return made or reference


def load_copies() -> CpuCopies | None:
    """None where there are no C++ kernels. Builds as load_kernels()."""
    return _made(CpuCopies)


def _made(kind: Callable[[Path], Made]) -> Made | None:
    try:
        return kind(built_library())
    except (BuildFailed, OSError) as error:
        logger.warning("the model runs on torch's own kernels, %s: %s", COST, error)
        return None
