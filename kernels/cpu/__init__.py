"""Loads the C++ kernels, or their torch twins if the library cannot be built."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from rootstock_llm.kernels.contracts.sample_ops import SampleKernels
from rootstock_llm.kernels.contracts.step_ops import LayerKernels
from rootstock_llm.kernels.cpu.build import BuildFailed, built_library
from rootstock_llm.kernels.cpu.copies import CpuCopies
from rootstock_llm.kernels.cpu.library import CpuKernels
from rootstock_llm.kernels.cpu.sampling import CpuSampling
from rootstock_llm.kernels.reference import layers as reference

logger = logging.getLogger(__name__)
COST = "2 to 7 times slower than on C++ kernels"  # part of a log message; measured in docs/reference/performance.md
Built = TypeVar("Built")


def load_kernels(num_threads: int, dtype: torch.dtype, deterministic: bool = False) -> LayerKernels:
    """Returns the fastest kernels of this machine for a model dtype, building them on first use.

    Args:
        num_threads: size of the OpenMP team of each call.
        dtype: dtype of the model.
        deterministic: whether results have the guarantees of a deterministic implementation of Kernels.

    Raises:
        ValueError: deterministic kernels cannot run here; the torch twins are not deterministic.
    """
    kernels: LayerKernels | None = None
    if dtype in (torch.float32, torch.bfloat16):
        kernels = _built(partial(CpuKernels, threads=num_threads, deterministic=deterministic))
    if deterministic and kernels is None:
        raise ValueError(f"no deterministic kernels for {dtype}: only the C++ kernels for float32 and bfloat16 are deterministic")
    return kernels or reference


def load_sampling(num_threads: int) -> SampleKernels:
    """Returns the sampling kernels, building them on first use. Logits are float32 for any model dtype."""
    kernels: SampleKernels | None = _built(partial(CpuSampling, threads=num_threads))
    return kernels or reference


def load_copies() -> CpuCopies | None:
    """Returns the C++ functions that copy memory, building them on first use. Returns None if the build fails."""
    return _built(CpuCopies)


def _built(kind: Callable[[Path], Built]) -> Built | None:
    try:
        return kind(built_library())
    except (BuildFailed, OSError) as error:
        logger.warning("the model runs on torch's own kernels, %s: %s", COST, error)
        return None
