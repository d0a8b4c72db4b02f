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
    """device: as torch names it. toy: sizes that a CPU does in a second, to see that the benchmark works."""

    device: str
    toy: bool

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def run_command(how: str, measure: Callable[[Setting, Journal], None], argv: Sequence[str] | None = None) -> int:
    """how: what the figures are and how they come about. Without a GPU, and without --device cpu, it says so and ends with 2."""
    parser = argparse.ArgumentParser(description=how)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--toy", action="store_true", help="sizes at which no figure means anything")
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    options = parser.parse_args(argv)
    setting = Setting(options.device, options.toy)
    if setting.on_gpu and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU.")
        return 2
    measure(setting, Journal(how, options.out))
    sys.stdout.flush()
    return 0
