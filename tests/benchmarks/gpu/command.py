"""The command line that all GPU benchmarks share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.benchmarks.gpu.journal import Journal


@dataclass(frozen=True, slots=True)
class Setting:
    """Values of the shared flags."""

    device: str  # torch device, such as "cuda:0"
    toy: bool  # sizes that a CPU computes in a second, to check the benchmark itself
    attention: str = "auto"  # name of the attention backend
    kernels: str = "auto"  # auto, triton or torch, for benchmarks that do not compare kernels
    graphs: bool = True  # False: decode steps run kernel by kernel
    say: Callable[[str], None] = print  # receives progress messages while an executor is built

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def run_command(how: str, measure: Callable[[Setting, Journal], None], argv: Sequence[str] | None = None) -> int:
    """Parses the command line and runs a benchmark.

    Args:
        how: text for the help and the report. It says how the figures are measured.
        measure: runs the benchmark and adds its results to the journal.

    Returns:
        Exit status: 0; 1 if a part failed (see Journal.apart); 2 if the device is a GPU and none is available.
    """
    parser = argparse.ArgumentParser(description=how)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--toy", action="store_true", help="tiny sizes to check the benchmark itself; the figures mean nothing")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--attention", default="auto", help="attention backend: auto, flashinfer, triton or torch")
    parser.add_argument("--kernels", default="auto", help="layer and sampling kernels: auto, triton, or torch with --no-graphs")
    parser.add_argument("--no-graphs", action="store_true", help="run decode steps kernel by kernel, without CUDA graphs")
    options = parser.parse_args(argv)
    journal = Journal(how, options.out)
    setting = Setting(options.device, options.toy, options.attention, options.kernels, not options.no_graphs, journal.say)
    if setting.on_gpu and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU.")
        return 2
    if options.no_graphs or options.kernels != "auto":
        journal.note(f"CUDA graphs: {'off' if options.no_graphs else 'on'}; kernels of layers and sampling: {options.kernels}.")
    measure(setting, journal)
    sys.stdout.flush()
    return int(bool(journal.failed))
