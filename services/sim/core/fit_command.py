"""python -m services.sim.core fit SOURCE: a time model from measured steps."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from services.sim.core.run.fit import StepTiming, fit_time_model, read_timings, write_timings
from services.sim.core.run.measure import MeasureShape, measure
from services.sim.core.run.time_models import time_model_json
from services.worker.core.contracts.config import SchedulerConfig


def main(argv: Sequence[str]) -> None:
    """The model goes to stdout, how well it fits to stderr. Raises ValueError, OSError, ExecutorError."""
    args = _parser().parse_args(argv)
    timings = _measure_model(args) if args.source.is_dir() else read_timings(args.source)
    if args.save_timings:
        write_timings(args.save_timings, timings)
    fit = fit_time_model(timings)
    quality = {name: value for name, value in asdict(fit).items() if name != "model"}
    print(json.dumps(quality), file=sys.stderr)
    print(time_model_json(fit.model))


def _measure_model(args: argparse.Namespace) -> list[StepTiming]:
    from services.worker.exec.build import build_cpu_executor  # torch: only where something is to be measured

    shape = MeasureShape(args.batches, args.prompts, args.output)
    executor, info = build_cpu_executor(
        model_path=str(args.source),
        dtype=args.dtype,
        page_size=args.page_size,
        max_slots=max(args.batches),
        num_pages=-(-shape.pool_tokens // args.page_size),
        mem_fraction_static=1.0,
        context_len=None,
        num_threads=args.num_threads,
        progress=lambda message: print(message, file=sys.stderr),
    )
    config = SchedulerConfig(
        num_pages=info.num_pages,
        page_size=info.page_size,
        context_len=info.context_len,
        vocab_size=info.vocab_size,
        max_running_requests=max(args.batches),
        chunked_prefill_size=args.chunked_prefill_size,
        enable_radix_cache=False,
    )
    try:
        return measure(executor, config, shape, time.monotonic)
    finally:
        executor.close()


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(","))
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError("sizes are at least 1")
    return sizes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m services.sim.core fit",
        description="Fits the time model to measured steps and prints it as JSON, for --time-model.",
    )
    parser.add_argument("source", type=Path, help="model folder, whose steps are measured on this machine, or a file of timings")
    parser.add_argument("--save-timings", type=Path, metavar="FILE", help="keep what was measured, as JSON lines")
    parser.add_argument("--batches", type=_sizes, default=(1, 2, 4, 8, 16, 32), metavar="A,B,…", help="default 1,2,4,8,16,32")
    parser.add_argument("--prompts", type=_sizes, default=(16, 64, 256, 512), metavar="A,B,…", help="default 16,64,256,512")
    parser.add_argument("--output", type=int, default=16, help="decode steps per round (default 16)")
    parser.add_argument("--chunked-prefill-size", type=int, default=512, help="default 512")
    parser.add_argument("--page-size", type=int, default=16, help="default 16")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"), help="default auto")
    parser.add_argument("--num-threads", type=int, default=len(os.sched_getaffinity(0)), help="default: one per core")
    return parser
