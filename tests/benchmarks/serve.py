"""Load generator for any OpenAI-compatible server: python -m tests.benchmarks.serve --url http://127.0.0.1:8000

One process, one event loop. Without --request-rate it is a closed loop of --concurrency sessions; with it, sessions arrive as a
Poisson process and --concurrency, if given, caps how many are in flight. Exit status: 0, or 1 if a request failed and
--allow-errors is not given, or 2 for arguments that make no sense.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvloop

from tests.benchmarks import machine, report
from tests.benchmarks.client import Endpoint, Outcome, first_model, open_http
from tests.benchmarks.load import Player, closed_loop, open_loop, poisson_arrivals
from tests.benchmarks.workload import WORKLOADS, Session, Spec, make_sessions, make_warmup

DEFAULT_CONCURRENCY = 16
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Run:
    """What a run left: its outcomes, how many requests it should have sent, and how long it took."""

    outcomes: list[Outcome]
    planned: int
    duration_s: float


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_server_flags(parser.add_argument_group("server"))
    add_workload_flags(parser.add_argument_group("workload"))
    add_load_flags(parser.add_argument_group("load and results"))
    return parser


def add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--url", default="http://127.0.0.1:8000", help="base URL, with or without /v1")
    group.add_argument("--endpoint", choices=sorted(PATHS), default="completions")
    group.add_argument("--model", help="default: the first of /v1/models")
    group.add_argument("--api-key", help="sent as a bearer token; not written to the results")
    group.add_argument("--temperature", type=float, default=0.0)
    group.add_argument("--ignore-eos", action="store_true", help="ask for exactly the output length")
    group.add_argument("--extra-body", type=orjson.loads, default={}, metavar="JSON", help="merged into every request's body")
    group.add_argument("--timeout", type=float, default=3600.0, help="seconds for a whole request")


def add_workload_flags(group: argparse._ArgumentGroup) -> None:
    spec = Spec("random")
    group.add_argument("--workload", choices=list(WORKLOADS), default="random")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--num-requests", type=int, help="default: 100 for random, all there are for the others")
    group.add_argument("--input-len", type=int, default=spec.input_len, help="tokens (ids) or words (text); of each turn")
    group.add_argument("--output-len", type=int, default=spec.output_len, help="max_tokens")
    group.add_argument("--range-ratio", type=float, default=1.0, help="shortest length as a fraction of the longest; 1: fixed")
    group.add_argument("--token-ids", action="store_true", help="send prompts as token ids (completions only)")
    group.add_argument("--id-min", type=int, default=spec.id_min)
    group.add_argument("--id-max", type=int, default=spec.id_max, help="exclusive; keep below the model's special tokens")
    group.add_argument("--groups", type=int, default=spec.groups, help="generated-shared-prefix")
    group.add_argument("--prompts-per-group", type=int, default=spec.prompts_per_group, help="generated-shared-prefix")
    group.add_argument("--system-len", type=int, default=spec.system_len, help="generated-shared-prefix")
    group.add_argument("--question-len", type=int, default=spec.question_len, help="generated-shared-prefix")
    group.add_argument("--conversations", type=int, default=spec.conversations, help="multi-turn")
    group.add_argument("--turns", type=int, default=spec.turns, help="multi-turn: turns of each conversation")


def add_load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--concurrency", type=int, help=f"sessions in flight; default {DEFAULT_CONCURRENCY} in a closed loop")
    group.add_argument("--request-rate", type=float, help="sessions per second, Poisson; makes the loop open")
    group.add_argument("--warmup", type=int, default=1, help="requests before the measured ones, with other contents")
    group.add_argument("--output-file", type=Path, help="JSON lines are appended to it")
    group.add_argument("--output-details", action="store_true", help="a line for each request as well")
    group.add_argument("--allow-errors", action="store_true", help="exit with 0 even if requests failed")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = build_parser()
    args = parser.parse_args(argv)
    args.url = args.url.rstrip("/").removesuffix("/v1")
    if args.request_rate is None and args.concurrency is None:
        args.concurrency = DEFAULT_CONCURRENCY
    if args.token_ids and args.endpoint == "chat":
        parser.error("token ids go to the completions endpoint")
    if min(x for x in (args.concurrency, args.request_rate, args.timeout) if x is not None) <= 0 or args.warmup < 0:
        parser.error("concurrency, request rate and timeout must be positive, and the warm-up not negative")
    if args.output_details and args.output_file is None:
        parser.error("--output-details needs --output-file")
    return args


def spec_of(args: argparse.Namespace) -> Spec:
    given = {f.name: getattr(args, f.name) for f in fields(Spec) if f.name != "name"}
    return Spec(name=args.workload, **given)


async def offer(sessions: Sequence[Session], args: argparse.Namespace, player: Player) -> None:
    if args.request_rate is None:
        await closed_loop(sessions, args.concurrency, player.play)
    else:
        arrivals = poisson_arrivals(args.request_rate, len(sessions), args.seed)
        await open_loop(sessions, arrivals, args.concurrency, player.play)


async def warm_up(sessions: Sequence[Session], http: aiohttp.ClientSession, endpoint: Endpoint, concurrency: int) -> str | None:
    """The first error of the warm-up, or None."""
    player = Player(http, endpoint)
    await closed_loop(sessions, concurrency, player.play)
    return next((f"{o.error}: {o.error_detail}" for o in player.outcomes if o.error is not None), None)


async def measure(args: argparse.Namespace, sessions: Sequence[Session], warmup: Sequence[Session]) -> Run:
    async with open_http(args.api_key, args.timeout) as http:
        args.model = args.model or await first_model(http, args.url)
        url = args.url + PATHS[args.endpoint]
        endpoint = Endpoint(url, args.endpoint == "chat", args.model, args.ignore_eos, args.temperature, args.extra_body)
        if error := await warm_up(warmup, http, endpoint, args.concurrency or DEFAULT_CONCURRENCY):
            print(f"serve: warm-up failed: {error}", file=sys.stderr)
        gc.collect()
        gc.freeze()  # the workload is large and lives to the end: no collection should walk it while requests are timed
        player = Player(http, endpoint)
        start = time.perf_counter()
        await offer(sessions, args, player)
        return Run(player.outcomes, sum(len(s.turns) for s in sessions), time.perf_counter() - start)


def parameters_of(args: argparse.Namespace) -> dict[str, Any]:
    hidden = ("api_key", "output_file", "output_details")
    return {key: value for key, value in vars(args).items() if key not in hidden}


def publish(args: argparse.Namespace, run: Run) -> report.Summary:
    """Prints the block and appends the JSON lines."""
    name = datetime.now(UTC).isoformat(timespec="milliseconds")
    parameters = parameters_of(args)
    summary = report.summarize(run.outcomes, run.planned, run.duration_s)
    print(report.render(summary, parameters), flush=True)
    if args.output_file is not None:
        lines = [report.summary_line(name, parameters, machine.describe(), summary)]
        if args.output_details:
            lines += [report.request_line(name, outcome) for outcome in run.outcomes]
        report.append_lines(args.output_file, lines)
    return summary


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        sessions, warmup = make_sessions(spec_of(args)), make_warmup(spec_of(args), args.warmup)
    except ValueError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 2
    try:
        run = uvloop.run(measure(args, sessions, warmup))
    except (aiohttp.ClientError, LookupError, OSError) as error:
        print(f"serve: {args.url}/v1/models does not name a model: {error!r}", file=sys.stderr)
        return 1
    summary = publish(args, run)
    return 0 if args.allow_errors or not summary.failed_requests else 1


if __name__ == "__main__":
    sys.exit(main())
