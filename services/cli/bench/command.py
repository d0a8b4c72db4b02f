"""The command `rootstock bench`: sends load to an OpenAI-compatible server and reports latencies and throughput.

The command runs in one process with one event loop. Without --request-rate, the load is a closed loop of --concurrency sessions.
With --request-rate, sessions arrive as a Poisson process, and --concurrency limits the sessions in flight if it is given.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvloop

from rootstock_llm.services.cli.bench import machine, report
from rootstock_llm.services.cli.bench.client import Endpoint, Outcome, first_model, open_http
from rootstock_llm.services.cli.bench.flags import DEFAULT_CONCURRENCY, PATHS
from rootstock_llm.services.cli.bench.load import Player, closed_loop, open_loop, poisson_arrivals
from rootstock_llm.services.cli.bench.spec import Spec
from rootstock_llm.services.cli.bench.workload import Session, make_sessions, make_warmup
from rootstock_llm.services.cli.shared.exits import CommandFailed, Exit
from rootstock_llm.services.cli.shared.flags import Target, target_of
from rootstock_llm.services.cli.shared.server import hint_of, unreachable
from rootstock_llm.services.cli.shared.terminal import Terminal
from rootstock_llm.services.shared.observe.progress import Progress

SHOW_EVERY_S = 0.5  # seconds between two updates of the progress bar


@dataclass(frozen=True, slots=True)
class Run:
    """The measurements of a finished run."""

    outcomes: list[Outcome]
    planned: int  # all requests of the workload, including unsent ones
    duration_s: float


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
    """Sends the warm-up sessions. Returns the first error, or None if all requests succeed."""
    player = Player(http, endpoint)
    await closed_loop(sessions, concurrency, player.play)
    return next((f"{o.error}: {o.error_detail}" for o in player.outcomes if o.error is not None), None)


@asynccontextmanager
async def progress_shown(player: Player, planned: int, err: Terminal) -> AsyncIterator[None]:
    """Shows a progress bar while the context is open, if `err` is a terminal."""
    begun = time.perf_counter()

    async def show() -> None:
        while True:
            passed_s = time.perf_counter() - begun
            err.overwrite(Progress("bench", len(player.outcomes), planned, passed_s, "requests").bar())
            await asyncio.sleep(SHOW_EVERY_S)

    showing = asyncio.create_task(show()) if err.is_tty else None
    try:
        yield
    finally:
        if showing is not None:
            showing.cancel()
            err.overwrite("")


async def measure(args: argparse.Namespace, target: Target, sessions: Sequence[Session], warmup: Sequence[Session]) -> Run:
    async with open_http(target.key, target.timeout_s) as http:
        args.model = args.model or await first_model(http, target.url)
        url = target.url + PATHS[args.endpoint]
        endpoint = Endpoint(url, args.endpoint == "chat", args.model, args.ignore_eos, args.temperature, args.extra_body)
        if error := await warm_up(warmup, http, endpoint, args.concurrency or DEFAULT_CONCURRENCY):
            print(f"rootstock bench: warm-up failed: {error}", file=sys.stderr)
        gc.collect()
        gc.freeze()  # keeps the large workload out of garbage collections during the measurement
        player = Player(http, endpoint)
        planned, start = sum(len(s.turns) for s in sessions), time.perf_counter()
        async with progress_shown(player, planned, Terminal.of(sys.stderr)):
            await offer(sessions, args, player)
            duration_s = time.perf_counter() - start
        return Run(player.outcomes, planned, duration_s)


def parameters_of(args: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Returns the flags that the results record: all flags except those of the API key and of the output."""
    hidden = ("command", "run", "api_key_file", "output_file", "output_details", "json")
    return {key: value for key, value in vars(args).items() if key not in hidden} | {"url": target.url}


def publish(args: argparse.Namespace, target: Target, run: Run) -> report.Summary:
    """Prints the summary, and appends JSON lines to --output-file if it is given."""
    name = datetime.now(UTC).isoformat(timespec="milliseconds")
    parameters = parameters_of(args, target)
    summary = report.summarize(run.outcomes, run.planned, run.duration_s)
    line = report.summary_line(name, parameters, machine.describe(), summary)
    print(orjson.dumps(line).decode() if args.json else report.render(summary, parameters), flush=True)
    if args.output_file is not None:
        lines = [line]
        if args.output_details:
            lines += [report.request_line(name, outcome) for outcome in run.outcomes]
        append(args.output_file, lines)
    return summary


def append(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    try:
        report.append_lines(path, lines)
    except OSError as error:
        message = f"{path} cannot be written ({error.strerror}): name another file with --output-file."
        raise CommandFailed(Exit.FAILED, message) from None


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark and returns the exit status. Raises CommandFailed."""
    try:
        sessions, warmup = make_sessions(spec_of(args)), make_warmup(spec_of(args), args.warmup)
    except ValueError as error:
        raise CommandFailed(Exit.USAGE, f"{error}.") from None
    target = target_of(args, os.environ)
    if args.output_file is not None:
        append(args.output_file, [])  # the load, which may take hours, begins only if its results can be stored
    try:
        measured = uvloop.run(measure(args, target, sessions, warmup))
    except aiohttp.ClientResponseError as error:
        raise CommandFailed(Exit.FAILED, f"{target.url}/v1/models answered {error.status}; {hint_of(error.status)}.") from None
    except (aiohttp.ClientError, OSError) as error:
        raise unreachable(target.url, str(error) or type(error).__name__) from None
    summary = publish(args, target, measured)
    if args.allow_errors or not summary.failed_requests:
        return Exit.DONE
    return Exit.UNREACHABLE if set(summary.errors) == {"connect"} and not summary.successful_requests else Exit.FAILED
