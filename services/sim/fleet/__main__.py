"""python -m rootstock_llm.services.sim.fleet, or `rootstock sim fleet`: runs a fleet on a trace and compares routing policies."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from rootstock_llm.services.gateway.routing.config import RoutingConfig, RoutingPolicy
from rootstock_llm.services.sim.core.run.config_flags import add_config_flags, groups_of, settings_of, simulated_config
from rootstock_llm.services.sim.core.run.remote_reads import Wire
from rootstock_llm.services.sim.core.run.simulation import SimulationError
from rootstock_llm.services.sim.core.run.time_models import PRESETS, load_time_model
from rootstock_llm.services.sim.core.run.worker import HostTimes
from rootstock_llm.services.sim.core.trace.arrivals import Arrivals, ClosedLoop, OpenLoop
from rootstock_llm.services.sim.core.trace.trace import Trace, read_trace
from rootstock_llm.services.sim.fleet.config import MIN_TOKENS, FleetConfig, Kill, Roles
from rootstock_llm.services.sim.fleet.report import FleetReport, as_dict, as_role_table, as_table, make_report
from rootstock_llm.services.sim.fleet.simulation import FleetSimulation
from rootstock_llm.services.sim.fleet.workloads import WORKLOADS
from rootstock_llm.services.worker.settings import WorkerSettings

KV_TOKENS = 800_000  # tokens of KV that fit on one large accelerator with the weights of an 8B model
KV_BYTES = 131_072  # bytes of KV per token of the same model in bfloat16
DERIVED = ("context_len",)  # settings without a flag, because they follow from the trace
WITHOUT_ROLES = ", no roles"  # suffix of a policy's name in the reports of its run without roles


def main(argv: Sequence[str]) -> int:
    args = build_parser().parse_args(argv)
    try:
        _run(args)
    except (ValueError, OSError, SimulationError) as error:
        print(f"rootstock sim fleet: {error}", file=sys.stderr)
        return 1
    return 0


def _run(args: argparse.Namespace) -> None:
    """Runs the fleet once per policy and prints the reports. Raises ValueError, OSError or SimulationError."""
    trace = _trace(args)
    config = _config(args, trace)
    gc.freeze()  # the trace lives until the end, and repeated garbage collection of it would take longer than the run
    reports = {policy: _simulate(args, config, policy, trace) for policy in args.policies}
    both = {}
    if config.roles is not None:
        same = replace(config, roles=None)
        both = {policy: _simulate(args, same, policy, trace, f"{policy}{WITHOUT_ROLES}") for policy in args.policies}
        reports |= {report.policy: report for report in both.values()}
    if args.json:
        print(json.dumps({policy: as_dict(report) for policy, report in reports.items()}))
        return
    prompts = sum(request.input_len for request in trace.requests)
    print(
        f"{config.workers} workers with KV for {config.scheduler.num_pages * config.scheduler.page_size:,} tokens each; "
        f"{len(trace.requests):,} requests, {prompts:,} prompt tokens, {trace.unique_block_tokens:,} of them distinct\n"
    )
    print(as_table(reports))
    if both:
        print(f"\n{as_role_table([(reports[policy], both[policy]) for policy in args.policies])}")


def _simulate(args: argparse.Namespace, config: FleetConfig, policy: str, trace: Trace, name: str = "") -> FleetReport:
    arrivals: Arrivals = ClosedLoop(trace, args.concurrency) if args.concurrency else OpenLoop(trace, args.speed)
    begun = time.perf_counter()
    outcome = FleetSimulation(config, policy, trace, arrivals).run()
    window = max(round(args.window_s / config.report_s), 1)
    return make_report(name or policy, outcome, window, time.perf_counter() - begun)


def _trace(args: argparse.Namespace) -> Trace:
    if (args.trace is None) == (args.workload is None):
        raise ValueError("give a trace file or --workload, and not both")
    if args.trace is not None:
        return read_trace(args.trace, args.block_size)
    size = args.size or args.workers
    if size < 1:
        raise ValueError(f"--size is {size}; a workload needs at least one worker")
    return WORKLOADS[args.workload](size, args.rate, args.seed)


def _config(args: argparse.Namespace, trace: Trace) -> FleetConfig:
    settings, time_model = _settings(args, trace), load_time_model(args.time_model)
    kv_tokens = round(args.kv_share * trace.unique_block_tokens) if args.kv_share else args.kv_tokens
    pages = max(kv_tokens // settings.page_size, 1)
    return FleetConfig(
        scheduler=simulated_config(settings, pages, time_model.graphs, groups=groups_of(args, settings, pages)),
        time_model=time_model,
        routing=RoutingConfig(**{field.name: getattr(args, field.name) for field in fields(RoutingConfig)}),
        workers=args.workers,
        gateways=args.gateways,
        host=HostTimes(args.plan_us * 1e-6, args.commit_us * 1e-6),
        overlap=settings.enable_overlap,
        slack=args.slack,
        hop_s=args.hop_s,
        report_s=args.report_s,
        index_delay_s=args.index_delay_s,
        speculative_s=args.speculative_s,
        detect_s=args.detect_s,
        kills=tuple(args.kill),
        seed=args.seed,
        roles=_roles(args),
    )


def _roles(args: argparse.Namespace) -> Roles | None:
    if not args.prefill_workers:
        return None
    wire = Wire(args.transfer_gbs * 1e9, args.transfer_latency_ms * 1e-3)
    return Roles(args.prefill_workers, wire, args.kv_bytes_per_token, args.disaggregation_min_tokens)


def _settings(args: argparse.Namespace, trace: Trace) -> WorkerSettings:
    """Returns the settings of each worker.

    The context is only as long as the trace needs, because the page tables of many workers would be large.
    """
    longest = max(request.input_len + max(request.max_new_tokens, request.output_len) for request in trace.requests)
    return settings_of(args, context_len=longest + 1)


def _policies(text: str) -> list[str]:
    names = [str(name) for name in RoutingPolicy]
    if text == "all":
        return names
    given = text.split(",")
    if unknown := [name for name in given if name not in names]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not a policy; the policies are {', '.join(names)}")
    return given


def _kill(text: str) -> Kill:
    try:
        worker, _, when = text.partition("@")
        at, _, back = when.partition("+")
        return Kill(int(worker), float(at), float(back) if back else 0.0)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} does not have the form WORKER@SECONDS or WORKER@SECONDS+SECONDS")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rootstock sim fleet",
        description="Runs gateways' routing and workers' schedulers on a trace and a virtual clock, once per policy.",
    )
    parser.add_argument("trace", type=Path, nargs="?", help="Trace file: JSON lines in rootstock's format or Mooncake's.")
    parser.add_argument("--block-size", type=int, help="Tokens per block of the trace.")
    parser.add_argument("--workload", choices=tuple(WORKLOADS), help="Workload to generate instead of reading a trace.")
    parser.add_argument(
        "--size", type=int, default=0, metavar="N", help="Number of workers for which the workload is made (default: --workers)."
    )
    parser.add_argument("--rate", type=float, default=0.0, help="Arrivals of the workload per second (default: all at once).")
    parser.add_argument(
        "--concurrency",
        type=int,
        default=0,
        metavar="N",
        help="Number of requests that are open at a time (closed loop); 0 (default): open loop.",
    )
    parser.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="Factor by which the arrival times are divided (default 1)."
    )
    parser.add_argument(
        "--policies", type=_policies, default=["prefix_aware", "round_robin"], metavar="A,B,…", help="Routing policies, or: all."
    )
    parser.add_argument("--seed", type=int, default=0, help="Seed of the workload and of random policies (default 0).")
    parser.add_argument(
        "--window-s",
        type=float,
        default=5.0,
        help="Length of time windows in seconds; the report shows the worst balance of a window (default 5).",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON instead of a table.")
    _add_fleet_flags(parser)
    _add_role_flags(parser)
    _add_routing_flags(parser)
    add_config_flags(parser, without=DERIVED)
    return parser


def _add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the fleet (times in seconds)")
    group.add_argument("--workers", type=int, default=8, help="Number of workers (default 8).")
    group.add_argument("--gateways", type=int, default=2, help="Number of gateways (default 2).")
    group.add_argument("--kv-tokens", type=int, default=KV_TOKENS, help=f"Tokens of KV per worker (default {KV_TOKENS:,}).")
    group.add_argument(
        "--kv-share",
        type=float,
        default=0.0,
        help="KV per worker, as a share of the trace's distinct prompt tokens; 0 (default): --kv-tokens.",
    )
    presets = ", ".join(PRESETS)
    group.add_argument(
        "--time-model", default="h200-like", metavar="NAME|FILE", help=f"Time model: {presets}, or a file written by sim fit."
    )
    group.add_argument("--plan-us", type=float, default=0.0, metavar="US", help="Host time per plan in microseconds.")
    group.add_argument("--commit-us", type=float, default=0.0, metavar="US", help="Host time per commit in microseconds.")
    defaults = {field.name: field.default for field in fields(FleetConfig)}
    for name, about in (
        ("slack", "Requests that a worker accepts beyond its largest number of running requests, as a share of that number"),
        ("hop_s", "Seconds from a gateway to a worker, and from a worker to a gateway"),
        ("report_s", "Seconds between load reports, and between event batches of the prefix index"),
        ("index_delay_s", "Seconds from an event batch to the gateways' indexes"),
        ("speculative_s", "Seconds for which a gateway assumes that a prompt is cached at the worker that got it"),
        ("detect_s", "Seconds until gateways notice the death of a worker"),
    ):
        text = f"{about} (default {defaults[name]})."
        group.add_argument(f"--{name.replace('_', '-')}", type=float, default=defaults[name], metavar="X", help=text)
    group.add_argument(
        "--kill",
        type=_kill,
        action="append",
        default=[],
        metavar="W@T[+S]",
        help="Kill worker W after T seconds; with +S, restart it S seconds later.",
    )


def _add_role_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prefill and decode workers (docs/design/prefill-and-decode.md)")
    add = group.add_argument
    about = "Number of the workers that are prefill workers; above 0, every policy also runs without roles (default 0)."
    add("--prefill-workers", type=int, default=0, metavar="N", help=about)
    add(
        "--transfer-gbs",
        type=float,
        default=10.0,
        metavar="X",
        help="GB/s between two workers; 0: no transfer completes (default 10).",
    )
    add("--transfer-latency-ms", type=float, default=0.2, metavar="MS", help="Milliseconds of latency per read (default 0.2).")
    add(
        "--kv-bytes-per-token",
        type=int,
        default=KV_BYTES,
        metavar="N",
        help=f"Bytes of KV per token over all layers (default {KV_BYTES:,}).",
    )
    about = f"Smallest number of uncached prompt tokens for which a prefill worker is used (default {MIN_TOKENS})."
    add("--disaggregation-min-tokens", type=int, default=MIN_TOKENS, metavar="N", help=about)


def _add_routing_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("routing (see services/gateway/routing/config.py)")
    for field in fields(RoutingConfig):
        name = f"--{field.name.replace('_', '-')}"
        group.add_argument(name, type=type(field.default), default=field.default, metavar="X", help=f"Default {field.default}.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
