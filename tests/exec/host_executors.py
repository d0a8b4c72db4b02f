"""Builds executors on host streams, with our C++ kernels or with torch's reference kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rootstock_llm.services.worker.exec.build import DeviceOptions, build_device_executor
from rootstock_llm.services.worker.exec.contracts.model_info import LoadedInfo
from rootstock_llm.services.worker.exec.device import load_target
from rootstock_llm.services.worker.exec.executor import DeviceExecutor
from rootstock_llm.services.worker.exec.weights.load_request import LoadRequest
from tests.night import NIGHTLY

# Marks tests or modules that run with both kernel sets. Without a mark, kernel_name is cpp (tests/exec/conftest.py).
KERNELS = ["cpp", "torch"]
on_both_kernels = pytest.mark.parametrize("kernel_name", KERNELS, indirect=True, scope="module")
on_both_by_night = pytest.mark.parametrize("kernel_name", KERNELS if NIGHTLY else KERNELS[:1], indirect=True, scope="module")


def build_host_executor(
    model_path: str | Path,
    dtype: str,
    page_size: int,
    max_slots: int,
    num_pages: int | None,
    mem_fraction_static: float,
    context_len: int | None,
    num_threads: int,
    progress: Callable[[str], None],
    check_relay: bool = False,
    kernels: str = "cpp",
    max_drafts: int = 0,
) -> tuple[DeviceExecutor, LoadedInfo]:
    """Builds an executor like build_device_executor does, with steps that are large enough for every prompt of the tests.

    With max_drafts above 0, the executor drafts by n-grams.
    """
    options = DeviceOptions(device="cpu", num_threads=num_threads, kernels=kernels, max_drafts=max_drafts)
    return build_device_executor(
        str(model_path), dtype, page_size, max_slots, num_pages, mem_fraction_static, context_len, options, progress, check_relay
    )


def load_request(folder: Path, dtype: str, page_size: int, context_len: int | None) -> LoadRequest:
    """Returns a LoadRequest for the CPU, with one thread and our C++ kernels."""
    target = load_target(torch.device("cpu"), DeviceOptions(device="cpu"))
    return LoadRequest(folder, dtype, page_size, context_len, 1, lambda _: None, target)
