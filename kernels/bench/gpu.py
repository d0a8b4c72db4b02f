"""Times the GPU kernels and plain torch: python -m rootstock_llm.kernels.bench.gpu [--only PART] [--json FILE] [--seconds S]."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from rootstock_llm.kernels.bench.gpu_timing import GpuCase, GpuTimer, Make, Timing, Work

COLUMNS = f"{'kernel':44} {'us':>9} {'GB/s':>7} {'% copy':>7} {'TFLOP/s':>8} {'torch us':>9} {'ratio':>6}  input"


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """The results of one case, printed as a line of a table and written as JSON."""

    name: str
    microseconds: float = 0.0
    gigabytes_per_second: float = 0.0
    percent_of_copy: float = 0.0  # bandwidth as a percentage of the bandwidth of a large copy in the same run
    teraflops: float = 0.0
    torch_microseconds: float | None = None  # time of the same work in plain torch; None: there is no comparison
    # Whether the inputs came from memory. If they came from the L2 cache, percent_of_copy may exceed 100.
    cold: bool = False
    error: str = ""  # error of the kernel, which then has no figures; empty: no error
    torch_error: str = ""  # error of plain torch, which then has no time; empty: no error

    def line(self) -> str:
        if self.error:
            return f"{self.name:44} failed: {self.error}"
        torch_time = "failed" if self.torch_error else ""
        torch_time = torch_time if self.torch_microseconds is None else f"{self.torch_microseconds:.1f}"
        ratio = "" if self.torch_microseconds is None else f"{self.torch_microseconds / self.microseconds:.2f}"
        flops = f"{self.teraflops:.1f}" if self.teraflops else ""
        rates = f"{self.microseconds:9.1f} {self.gigabytes_per_second:7.0f} {self.percent_of_copy:7.1f} {flops:>8}"
        return f"{self.name:44} {rates} {torch_time:>9} {ratio:>6}  {'memory' if self.cold else 'L2'}"


def figures_of(case: GpuCase, ours: Timing, plain: Timing | None, copy_bandwidth: float) -> KernelFigures:
    """Computes the figures of a case from its times. copy_bandwidth is in bytes per second."""
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
    """Writes the figures of all cases. `run` describes the whole run: device, torch version and copy bandwidth."""
    path.write_text(json.dumps({**run, "kernels": [asdict(figures) for figures in kernels]}, indent=1) + "\n")


__all__ = ["GpuCase", "Make", "Work", "all_cases", "main"]

NO_GPU = "torch finds no GPU, so no kernel was timed."


def all_cases() -> Iterator[GpuCase]:
    from rootstock_llm.kernels.bench import (  # imported here because triton may not be installed
        gpu_attention,
        gpu_deterministic,
        gpu_experts,
        gpu_layers,
        gpu_sampling,
    )

    for module in (gpu_layers, gpu_experts, gpu_attention, gpu_sampling, gpu_deterministic):
        yield from module.cases()


def measured(case: GpuCase, timer: GpuTimer, copy_bandwidth: float) -> KernelFigures:
    """Times a case with our kernel and with plain torch.

    If the kernel fails, the result has the error and no figures. If plain torch fails, the result has the kernel's figures.
    """
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
    """Times the cases and rewrites the JSON file after each one. Returns 0; 1 if a kernel failed; 2 if there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="Run only the cases whose names contain this text.")
    parser.add_argument("--json", type=Path, help="File for the figures, as JSON.")
    parser.add_argument("--seconds", type=float, default=0.2, help="Seconds for which a measurement repeats its work.")
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
