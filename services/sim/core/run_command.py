"""python -m rootstock_llm.services.sim.core TRACE: runs a trace and prints the figures."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rootstock_llm.services.sim.core.report.report import as_dict, as_table, make_report
from rootstock_llm.services.sim.core.report.timeline import check_drawable, draw_timeline
from rootstock_llm.services.sim.core.run.config_flags import NUM_PAGES, add_config_flags, groups_of, settings_of, simulated_config
from rootstock_llm.services.sim.core.run.digest import RunDigest
from rootstock_llm.services.sim.core.run.simulation import Simulation
from rootstock_llm.services.sim.core.run.time_models import PRESETS, load_time_model
from rootstock_llm.services.sim.core.run.worker import HostTimes
from rootstock_llm.services.sim.core.trace.arrivals import Arrivals, ClosedLoop, OpenLoop
from rootstock_llm.services.sim.core.trace.trace import BLOCK_SIZE, MOONCAKE_BLOCK_SIZE, Trace, read_trace
from rootstock_llm.services.worker.core.contracts.graph_limits import GraphLimits


def main(argv: Sequence[str]) -> None:
    """Runs the trace and prints its report or digest. Raises ValueError, OSError, SimulationError or NoPicture."""
    args = build_parser().parse_args(argv)
    if args.timeline:
        check_drawable(args.timeline)
    trace = read_trace(args.trace, args.block_size)
    if args.digest or args.digest_lines:
        _print_digest(trace, args)
        return
    simulation = _simulation(trace, args)
    gc.freeze()  # the trace lives until the end, and repeated garbage collection of it would take longer than the run
    begun = time.perf_counter()
    outcome = simulation.run()
    report = make_report(outcome, time.perf_counter() - begun)
    print(json.dumps(as_dict(report)) if args.json else as_table(report))
    if args.timeline:
        draw_timeline(outcome, args.timeline, f"{args.trace.name}: {report.output_tokens_per_s:,.0f} output tokens/s")


def _simulation(trace: Trace, args: argparse.Namespace, digest: RunDigest | None = None) -> Simulation:
    time_model, settings = load_time_model(args.time_model), settings_of(args)
    graphs = time_model.graphs if args.jumps == "graph" else GraphLimits()
    return Simulation(
        simulated_config(settings, args.num_pages, graphs, args.max_drafts, groups_of(args, settings, args.num_pages)),
        trace,
        _arrivals(trace, args),
        time_model if args.jumps == "graph" else replace(time_model, graph_rereads=0),
        HostTimes(args.plan_us * 1e-6, args.commit_us * 1e-6),
        settings.enable_overlap,
        args.jumps != "none",
        digest,
    )


def _print_digest(trace: Trace, args: argparse.Namespace) -> None:
    with ExitStack() as files:
        lines = files.enter_context(args.digest_lines.open("w", encoding="utf-8")) if args.digest_lines else None
        digest = RunDigest(lines)
        _simulation(trace, args, digest).run()
    print(digest.hexdigest())


def _arrivals(trace: Trace, args: argparse.Namespace) -> Arrivals:
    return ClosedLoop(trace, args.concurrency) if args.concurrency else OpenLoop(trace, args.speed)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rootstock sim run",
        description="Runs the scheduler on a trace and a virtual clock.",
    )
    parser.add_argument("trace", type=Path, help="Trace file: JSON lines in rootstock's format or Mooncake's.")
    parser.add_argument(
        "--block-size", type=int, help=f"Tokens per block (default {BLOCK_SIZE}; Mooncake: {MOONCAKE_BLOCK_SIZE})."
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        default=0,
        metavar="N",
        help="Number of requests that are open at a time (closed loop), without regard to arrival times; 0 (default): open loop.",
    )
    parser.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="Factor by which the arrival times are divided (default 1)."
    )
    presets = ", ".join(PRESETS)
    parser.add_argument(
        "--time-model", default="h200-like", metavar="NAME|FILE", help=f"Time model: {presets}, or a file written by fit."
    )
    parser.add_argument("--plan-us", type=float, default=0.0, metavar="US", help="Host time per plan in microseconds.")
    parser.add_argument("--commit-us", type=float, default=0.0, metavar="US", help="Host time per commit in microseconds.")
    parser.add_argument(
        "--num-pages", type=int, default=NUM_PAGES, metavar="N", help=f"Pages of the KV pool (default {NUM_PAGES:,})."
    )
    parser.add_argument(
        "--jumps",
        choices=("graph", "eager", "none"),
        default="graph",
        help="Computation of tokens that a grammar forces. graph (default): in CUDA graphs if the time model has graphs. eager:"
        " without graphs. none: forced tokens are sampled one per step.",
    )
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="Draw the run into this .png or .svg file.")
    parser.add_argument(
        "--max-drafts",
        type=int,
        default=0,
        metavar="N",
        help="Largest number of draft tokens per row, of which about half are accepted (default 0).",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON instead of a table.")
    parser.add_argument(
        "--digest", action="store_true", help="Print only the SHA-256 of all plans and outputs, to compare two checkouts."
    )
    lines = "Also write the hashed lines, one per submission, plan and output; implies --digest."
    parser.add_argument("--digest-lines", type=Path, metavar="FILE", help=lines)
    add_config_flags(parser)
    return parser
