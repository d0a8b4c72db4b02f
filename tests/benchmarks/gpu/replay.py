"""Times a call of a kernel as the median over replays of a CUDA graph, without launch overhead."""

from __future__ import annotations

import torch

from rootstock_llm.kernels.bench.gpu_timing import GpuTimer, Make
from tests.benchmarks.gpu.ceilings import median_s
from tests.benchmarks.gpu.command import Setting

SECONDS = 0.1  # seconds for which the graph is replayed


def microseconds(make: Make, bytes_moved: int, setting: Setting) -> float:
    """Returns the median microseconds of a call, by graph replay on a GPU (see GpuCase) and by the clock otherwise."""
    device = torch.device(setting.device)
    if setting.on_gpu:
        return GpuTimer(device, SECONDS).time(make, bytes_moved, captures=True).microseconds
    return median_s(make(device), setting, repeats=2) * 1e6
