"""Compares this checkout with another one in alternating pairs: python -m tests.benchmarks.checkout_pairs OTHER [--model FOLDER]

Three servers run at once: two of the old checkout (OTHER, with its own .venv), and one of the new checkout, which is this one.
Each round sends the same burst of requests to one server after the other, in an order that changes from round to round. For each
number of requests in flight, the output has the median and the range of two ratios: throughput new/old, and p99 of the time to
the first token old/new. The output also has both ratios between the two old servers. A ratio above 1 means that the new checkout
is better. The new checkout is no worse if its median ratio is within the range of the ratios between the two old servers.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop

from rootstock_llm.services.cli.bench.client import Endpoint, first_model, open_http, stream
from tests.benchmarks.compare_transformers import BUILD, check, draw_prompts, ensure_model
from tests.benchmarks.server_process import ROOT, module_of, running_server

COMMAND = "{checkout}/.venv/bin/python -m {module} --model {{model}} --port {{port}} --no-demo {flags}"
TIMEOUT_S = 3600.0
OLD, AGAIN, NEW = "old", "old again", "new"


@dataclass(frozen=True, slots=True)
class Burst:
    """Result of a burst of requests to one server."""

    tokens_s: float  # output tokens per second, summed over all requests
    ttft_s: float  # p99 of the times to the first token, in seconds


async def burst(url: str, prompts: list[list[int]], output_len: int) -> Burst:
    """Sends all prompts at once."""
    async with open_http(timeout_s=TIMEOUT_S) as http:
        endpoint = Endpoint(f"{url}/v1/completions", False, await first_model(http, url), ignore_eos=True)
        bodies = [endpoint.body({"prompt": prompt}, output_len) for prompt in prompts]
        began = time.perf_counter()
        outcomes = await asyncio.gather(*(stream(http, endpoint, body) for body in bodies))
        seconds = time.perf_counter() - began
    for outcome in outcomes:
        check(outcome, output_len)
    first = [outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None]
    return Burst(len(prompts) * output_len / seconds, float(np.percentile(first, 99)))


def order_of(number: int) -> tuple[str, ...]:
    """Returns the order of servers in a round. Over six rounds, each server has each position and neighbour equally often."""
    return ((OLD, NEW, AGAIN), (AGAIN, OLD, NEW), (NEW, AGAIN, OLD), (AGAIN, NEW, OLD), (OLD, AGAIN, NEW), (NEW, OLD, AGAIN))[
        number % 6
    ]


def rounds(urls: dict[str, str], args: argparse.Namespace, in_flight: int) -> list[dict[str, Burst]]:
    """Returns the results by round, without the first round (a warm-up). Each round has new prompts, so no prompt is cached."""
    found = []
    for number in range(args.rounds + 1):
        prompts = draw_prompts(args.model, in_flight, args.input_len, (args.seed, number, in_flight))
        found.append({name: uvloop.run(burst(urls[name], prompts, args.output_len)) for name in order_of(number)})
    return found[1:]


def line(in_flight: int, found: list[dict[str, Burst]]) -> str:
    def ratios(name: str) -> tuple[list[float], list[float]]:
        throughput = [each[name].tokens_s / each[OLD].tokens_s for each in found]
        return throughput, [each[OLD].ttft_s / each[name].ttft_s for each in found]

    cells = [str(in_flight)]
    for of_new, of_old in zip(ratios(NEW), ratios(AGAIN), strict=True):
        for values in (of_new, of_old):
            cells.append(f"{statistics.median(values):.3f} ({min(values):.2f} to {max(values):.2f})")
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="folder of the other checkout, with its own .venv")
    parser.add_argument(
        "--model", type=Path, default=ROOT / "models" / "demo", help="folder of the checkpoint; default: the demo model"
    )
    parser.add_argument("--shape", help="shape of make_model; replaces --model by random weights of this shape")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--flags", default="--max-total-tokens 32768", help="flags of every server; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exit from the with block stops the servers
    if args.shape:
        args.model = BUILD / args.shape
        ensure_model(args.model, args.shape)
    checkouts = {OLD: args.other.resolve(), AGAIN: args.other.resolve(), NEW: ROOT}
    with ExitStack() as servers:
        urls = {}
        for name, checkout in checkouts.items():
            command = COMMAND.format(checkout=checkout, module=module_of(checkout, "local"), flags=args.flags)
            log = BUILD / "logs" / f"pairs-{name.replace(' ', '-')}.log"
            urls[name] = servers.enter_context(running_server(command, args.model.resolve(), log, checkout))
        print("| in flight | tok/s new/old | tok/s old/old | p99 TTFT old/new | p99 TTFT old/old |\n|---:|---|---|---|---|")
        for in_flight in args.in_flight:
            print(line(in_flight, rounds(urls, args, in_flight)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
