"""python -m rootstock_llm.services.sim.core fit SOURCE: fits a time model to measured steps."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rootstock_llm.services.shared.settings import of_values
from rootstock_llm.services.sim.core.run.config_flags import add_setting_flag
from rootstock_llm.services.sim.core.run.time_models import (
    MeasureShape,
    StepTiming,
    fit_time_model,
    measure,
    read_timings,
    time_model_json,
    write_timings,
)
from rootstock_llm.services.worker.device_limits import resolved
from rootstock_llm.services.worker.scheduler_config import scheduler_config
from rootstock_llm.services.worker.settings import WorkerSettings


def main(argv: Sequence[str]) -> None:
    """Prints the time model to stdout and the quality of the fit to stderr. Raises ValueError, OSError or ExecutorError."""
    args = build_parser().parse_args(argv)
    timings = _measure_model(args) if args.source.is_dir() else read_timings(args.source)
    if args.save_timings:
        write_timings(args.save_timings, timings)
    fit = fit_time_model(timings)
    quality = {name: value for name, value in asdict(fit).items() if name != "model"}
    print(json.dumps(quality), file=sys.stderr)
    print(time_model_json(fit.model))


def _measure_model(args: argparse.Namespace) -> list[StepTiming]:
    # Imported here, because only a measurement needs torch.
    from rootstock_llm.services.worker.exec.build import DeviceOptions, build_device_executor

    shape, settings = MeasureShape(args.batches, args.prompts, args.output), _settings(args)
    most = max(args.batches) + (settings.chunked_prefill_size or max(args.batches) * max(shape.prompts))
    executor, info = build_device_executor(
        model_path=str(args.source),
        dtype=args.dtype,
        page_size=args.page_size,
        max_slots=max(args.batches),
        num_pages=-(-shape.pool_tokens // args.page_size),
        mem_fraction_static=1.0,
        context_len=None,
        options=DeviceOptions(device="cpu", num_threads=args.num_threads, max_tokens=most),
        progress=lambda message: print(message, file=sys.stderr),
    )
    try:
        return measure(executor, scheduler_config(settings, info, bos_token_id=-1), shape, time.monotonic)
    finally:
        executor.close()


def _settings(args: argparse.Namespace) -> WorkerSettings:
    """Returns settings without a prefix cache, with which a worker computes all prompts and then decodes in one batch.

    Raises:
        ValueError: a setting is out of range; the message names it.
    """
    given = {
        "page_size": args.page_size,
        "max_running_requests": max(args.batches),
        "chunked_prefill_size": args.chunked_prefill_size,
        "adaptive_chunk_rows": 0,
        "adaptive_chunk_s": 0.0,
        "max_extend_steps": 0,
        "enable_mixed_chunk": False,
        "enable_radix_cache": False,
    }
    return resolved(of_values(WorkerSettings, given), None)


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(","))
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{min(sizes)} is below 1; every size must be at least 1")
    return sizes


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rootstock sim fit",
        description="Fits the time model to measured steps and prints it as JSON, for --time-model.",
    )
    parser.add_argument("source", type=Path, help="Model folder to measure on this machine, or a file from --save-timings.")
    parser.add_argument("--save-timings", type=Path, metavar="FILE", help="File for the measured timings, as JSON lines.")
    parser.add_argument(
        "--batches", type=_sizes, default=(1, 2, 4, 8, 16, 32), metavar="A,B,…", help="Batch sizes (default 1,2,4,8,16,32)."
    )
    parser.add_argument(
        "--prompts",
        type=_sizes,
        default=(16, 64, 256, 512),
        metavar="A,B,…",
        help="Prompt lengths in tokens (default 16,64,256,512).",
    )
    parser.add_argument("--output", type=int, default=16, help="Output tokens of each request (default 16).")
    parser.add_argument("--chunked-prefill-size", type=int, default=512, help="Largest prompt chunk in tokens (default 512).")
    for name in ("page_size", "dtype"):
        add_setting_flag(parser, name)
    parser.add_argument(
        "--num-threads", type=int, default=len(os.sched_getaffinity(0)), help="Number of threads (default: one per core)."
    )
    return parser
