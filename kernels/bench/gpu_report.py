"""The figures of kernels on a GPU, as lines of a table and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from kernels.bench.gpu_case import GpuCase
from kernels.bench.gpu_timing import Timing

COLUMNS = f"{'kernel':44} {'us':>9} {'GB/s':>7} {'% copy':>7} {'TFLOP/s':>8} {'torch us':>9} {'ratio':>6}  input"


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """One case. percent_of_copy: of the bandwidth of a large copy in the same run. torch_microseconds: the same work in plain
    torch, None where there is none to compare with. cold: inputs came from memory; else from the L2 cache, and more than 100
    percent is possible. error: why there are no figures, else "". torch_error: why there are none of plain torch.
    """

    name: str
    microseconds: float = 0.0
    gigabytes_per_second: float = 0.0
    percent_of_copy: float = 0.0
    teraflops: float = 0.0
    torch_microseconds: float | None = None
    cold: bool = False
    error: str = ""
    torch_error: str = ""

    def line(self) -> str:
        if self.error:
            return f"{self.name:44} failed: {self.error}"
        beside = "failed" if self.torch_error else ""
        beside = beside if self.torch_microseconds is None else f"{self.torch_microseconds:.1f}"
        ratio = "" if self.torch_microseconds is None else f"{self.torch_microseconds / self.microseconds:.2f}"
        flops = f"{self.teraflops:.1f}" if self.teraflops else ""
        rates = f"{self.microseconds:9.1f} {self.gigabytes_per_second:7.0f} {self.percent_of_copy:7.1f} {flops:>8}"
        return f"{self.name:44} {rates} {beside:>9} {ratio:>6}  {'memory' if self.cold else 'L2'}"


def figures_of(case: GpuCase, ours: Timing, plain: Timing | None, copy_bandwidth: float) -> KernelFigures:
    """copy_bandwidth: bytes a second."""
    seconds = ours.microseconds * 1e-6
    rate = case.bytes_moved / seconds
    return KernelFigures(
        name=case.name,
        microseconds=ours.microseconds,
        gigabytes_per_second=rate / 1e9,
        percent_of_copy=100 * rate / copy_bandwidth,
        teraflops=case.flops / seconds / 1e12,
        torch_microseconds=None if plain is None else plain.microseconds,
        cold=ours.cold,
    )


def write_json(path: Path, run: dict[str, str | float], kernels: list[KernelFigures]) -> None:
    """run: what was the same for all kernels: device, versions, copy bandwidth."""
    path.write_text(json.dumps({**run, "kernels": [asdict(figures) for figures in kernels]}, indent=1) + "\n")
