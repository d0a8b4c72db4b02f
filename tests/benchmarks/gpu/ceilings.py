"""Upper limits of the device's bandwidth and arithmetic: python -m tests.benchmarks.gpu.ceilings."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tests.benchmarks.gpu.command import Setting, run_command
from tests.benchmarks.gpu.journal import Journal

HOW = (
    "Bytes per second of a copy (read and written) and of a sum (read) of a buffer much larger than the caches; operations per"
    " second of bf16 matrix products. Medians over repeats, timed by CUDA events."
)
REPEATS = 20


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Measured bandwidths in bytes per second."""

    copy: float  # bandwidth of copying a tensor; each byte counts twice, as read and as written
    read: float  # bandwidth of summing a tensor

    @property
    def best(self) -> float:
        """The larger of `copy` and `read`. Other benchmarks report the bandwidth that they reach as a share of this value."""
        return max(self.copy, self.read)


def median_s(work: Callable[[], object], setting: Setting, repeats: int = REPEATS) -> float:
    """Returns the median seconds of `work` after two unmeasured runs, by CUDA events on a GPU and by the clock elsewhere."""
    for _ in range(2):
        work()
    setting.synchronize()
    if not setting.on_gpu:
        return statistics.median(_clocked(work) for _ in range(repeats))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        work()
        end.record()
    setting.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3


def _clocked(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def bandwidth(setting: Setting) -> Bandwidth:
    size = 1 << (20 if setting.toy else 32)  # bytes
    source = torch.ones(size // 4, device=setting.device)
    target = torch.empty_like(source)
    copied = 2 * size / median_s(lambda: target.copy_(source), setting)
    read = size / median_s(lambda: torch.sum(source), setting)
    return Bandwidth(copied, read)


def matmul_flops(setting: Setting, rows: int, inner: int, columns: int) -> float:
    """Returns the floating-point operations per second of [rows, inner] @ [inner, columns]."""
    dtype = torch.bfloat16 if setting.on_gpu else torch.float32
    left = torch.randn(rows, inner, device=setting.device, dtype=dtype)
    right = torch.randn(columns, inner, device=setting.device, dtype=dtype)
    out = torch.empty(rows, columns, device=setting.device, dtype=dtype)
    return 2 * rows * inner * columns / median_s(lambda: torch.mm(left, right.t(), out=out), setting)


def measure(setting: Setting, journal: Journal) -> None:
    found = bandwidth(setting)
    for name, value in (("copy", found.copy), ("read", found.read)):
        journal.row("bandwidth", ("what", "GB/s"), (name, value / 1e9))
        journal.figure(f"{name}.bytes_per_s", value, "B/s")
    sizes = (
        ((64, 64, 64),) if setting.toy else ((64, 4096, 24_576), (256, 4096, 24_576), (8192, 4096, 24_576), (8192, 12_288, 4096))
    )
    for rows, inner, columns in sizes:
        flops = matmul_flops(setting, rows, inner, columns)
        journal.row("matrix products", ("rows", "inner", "columns", "TFLOP/s"), (rows, inner, columns, flops / 1e12))


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(HOW, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
