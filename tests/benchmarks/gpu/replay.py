"""Times one call of a kernel: the median over replays of a CUDA graph, so that no launch is in it."""

from __future__ import annotations

import torch

from kernels.bench.gpu_timing import GpuTimer, Make
from tests.benchmarks.gpu.ceilings import median_s
from tests.benchmarks.gpu.command import Setting

SECONDS = 0.1  # of repeats


def microseconds(make: Make, bytes_moved: int, setting: Setting) -> float:
    """See kernels.bench.gpu_timing.GpuCase. By the clock where there is no GPU."""
    device = torch.device(setting.device)
    if setting.on_gpu:
        return GpuTimer(device, SECONDS).time(make, bytes_moved, captures=True).microseconds
    return median_s(make(device), setting, repeats=2) * 1e6
