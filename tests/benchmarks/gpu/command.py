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
    """device: as torch names it. toy: sizes that a CPU does in a second, to see that the benchmark works. attention: a back
    end's name, and kernels: auto, triton or torch, for what does not compare them. graphs: False for decode steps kernel by
    kernel. say: told what happens while an executor is made."""

    device: str
    toy: bool
    attention: str = "auto"
    kernels: str = "auto"
    graphs: bool = True
    say: Callable[[str], None] = print

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def run_command(how: str, measure: Callable[[Setting, Journal], None], argv: Sequence[str] | None = None) -> int:
    """how: what the figures are and how they come about. 0; 1 where a piece of it failed, see Journal.apart; without a GPU, and
    without --device cpu, it says so and ends with 2."""
    parser = argparse.ArgumentParser(description=how)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--toy", action="store_true", help="sizes at which no figure means anything")
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    parser.add_argument("--attention", default="auto", help="back end of attention: auto, flashinfer, triton or torch")
    parser.add_argument("--kernels", default="auto", help="of layers and sampling: auto, triton, or torch with --no-graphs")
    parser.add_argument("--no-graphs", action="store_true", help="decode kernel by kernel")
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
