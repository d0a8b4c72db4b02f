"""Memory and speed of models for a laptop: python -m tests.benchmarks.small_models [SHAPE …] [--runs 3] [--no-compiler]

For each SHAPE of make_model, the whole system serves a checkpoint with random weights. The shape `demo` is the demo model, for
comparison. Each prompt of 256 tokens gets 64 output tokens; first one stream runs, then eight at once. Prints a row for each
shape: the size of the weights, the largest resident memory of one of the system's processes, and the median and range over the
runs of output tokens per second.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil
import uvloop

from tests.benchmarks.checkout_pairs import burst
from tests.benchmarks.compare_transformers import BUILD, draw_prompts
from tests.benchmarks.make_model import SHAPES, write_model
from tests.benchmarks.server_process import ROOT, running_server

COMMAND = "{python} -m rootstock_llm.services.local --model {model} --port {port} --no-demo --max-total-tokens 16384"
DEFAULT = ("demo", "smollm2-360m", "qwen2.5-0.5b", "qwen3-0.6b", "qwen3-1.7b")
INPUT_LEN, OUTPUT_LEN, STREAMS = 256, 64, (1, 8)
HEAD = "| shape | weights, GB | memory, GB | tokens/s, 1 stream | 8 streams |\n| --- | ---: | ---: | ---: | ---: |"
COMPILERS = ("g++", "c++", "clang++")


def folder_of(name: str) -> Path:
    if name == "demo":
        return ROOT / "models" / "demo"
    folder = BUILD / name
    if not folder.exists():
        write_model(folder, SHAPES[name])
    return folder


def measured(name: str, runs: int) -> str:
    folder = folder_of(name)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    with running_server(COMMAND, folder, BUILD / f"{name}.log") as url:
        found: list[list[float]] = [[] for _ in STREAMS]
        for run in range(runs + 1):
            for rates, streams in zip(found, STREAMS, strict=True):
                prompts = draw_prompts(folder, streams, INPUT_LEN, (run, streams))
                rates.append(uvloop.run(burst(url, prompts, OUTPUT_LEN)).tokens_s)
        peak = max(map(peak_bytes, psutil.Process().children(recursive=True)))
    cells = [name, f"{size / 1e9:.2f}", f"{peak / 1e9:.2f}"]
    # The first run is a warm-up.
    cells += [f"{statistics.median(r[1:]):.1f} ({min(r[1:]):.1f} to {max(r[1:]):.1f})" for r in found]
    return "| " + " | ".join(cells) + " |"


def peak_bytes(process: psutil.Process) -> int:
    """Returns the largest resident memory, in bytes, that the process has had; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def hide_compilers(folder: Path) -> None:
    """Sets PATH to one folder without a C++ compiler, and moves compiled kernels away so that services do not find them."""
    for place in map(Path, os.environ["PATH"].split(os.pathsep)):
        for program in place.iterdir() if place.is_dir() else ():
            link = folder / program.name
            if not os.path.lexists(link) and not any(name in program.name for name in COMPILERS):
                link.symlink_to(program)
    os.environ["PATH"] = str(folder)
    os.environ["XDG_CACHE_HOME"] = str(folder)
    if (built := ROOT / "build" / "kernels").exists():
        built.rename(folder / "kernels")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=DEFAULT, metavar="SHAPE", help=f"of {', '.join(['demo', *SHAPES])}")
    parser.add_argument("--runs", type=int, default=3, help="measured bursts per number of streams, after a warm-up burst")
    parser.add_argument("--no-compiler", action="store_true", help="measure as on a machine without a C++ compiler")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as hidden:
        if args.no_compiler:
            hide_compilers(Path(hidden))
        try:
            print(HEAD)
            for name in args.shapes:
                print(measured(name, args.runs), flush=True)
        finally:
            if (kernels := Path(hidden) / "kernels").exists():
                shutil.move(kernels, ROOT / "build" / "kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
