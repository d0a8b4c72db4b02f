"""Times the GPU kernels beside plain torch: python -m kernels.bench.gpu [--only PART] [--json FILE] [--seconds S]."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from kernels.bench.gpu_case import GpuCase, Make, Work
from kernels.bench.gpu_report import COLUMNS, KernelFigures, figures_of, write_json
from kernels.bench.gpu_timing import GpuTimer

__all__ = ["GpuCase", "Make", "Work", "all_cases", "main"]

NO_GPU = "There is no GPU here that torch can use, so no kernel was timed."


def all_cases() -> Iterator[GpuCase]:
    from kernels.bench import gpu_attention, gpu_deterministic, gpu_layers, gpu_sampling  # triton is not everywhere

    for module in (gpu_layers, gpu_attention, gpu_sampling, gpu_deterministic):
        yield from module.cases()


def measured(case: GpuCase, timer: GpuTimer, copy_bandwidth: float) -> KernelFigures:
    """A case that fails ends alone: its figures say why. Where plain torch fails, ours stand alone."""
    try:
        ours = timer.time(case.make, case.bytes_moved, case.captures)
    except Exception as error:
        return KernelFigures(case.name, error=_first_line(error))
    plain, torch_error = None, ""
    if case.plain is not None:
        try:
            plain = timer.time(case.plain, case.bytes_moved, case.plain_captures)
        except Exception as error:
            torch_error = _first_line(error)
    return replace(figures_of(case, ours, plain, copy_bandwidth), torch_error=torch_error)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def main(arguments: list[str] | None = None) -> int:
    """0; 1 where a kernel failed; 2 where there is no GPU. The JSON file is written anew after each kernel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--seconds", type=float, default=0.2, help="of repeats a measurement")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    timer = GpuTimer(device, options.seconds)
    bandwidth = timer.copy_bandwidth()
    name = torch.cuda.get_device_name(device)
    run: dict[str, str | float] = {"device": name, "torch": torch.__version__, "copy_gigabytes_per_second": bandwidth / 1e9}
    print(f"{name}, torch {torch.__version__}; a copy moves {bandwidth / 1e9:.0f} GB/s\n{COLUMNS}", flush=True)
    done: list[KernelFigures] = []
    with torch.inference_mode():
        for case in all_cases():
            if options.only not in case.name:
                continue
            done.append(measured(case, timer, bandwidth))
            print(done[-1].line(), flush=True)
            if options.json:
                write_json(options.json, run, done)
            torch.cuda.empty_cache()
    return int(any(figures.error for figures in done))


if __name__ == "__main__":
    sys.exit(main())
