"""Latency of chats while a batch runs: python -m tests.benchmarks.batches [--pairs N] [--rate R] [--gateway-flags "..."]

The demo model runs as a whole system on this machine. Chats arrive as a Poisson process. Rounds run without a batch, or with a
batch that lasts as long as the round. The output has:

- for chats with and without the batch: the time to the first token and the time between tokens;
- for each of these times, the ratio of the time with the batch to the time without it: over all rounds, with a 95 % bootstrap
  interval over pairs of rounds; and the median of the ratios of single pairs;
- the time to the first token of each round's first chat, which arrives while the batch runs at full speed;
- lines of the batch per second, with chats and without them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
import numpy as np
from numpy.typing import NDArray
from openai import OpenAI

from rootstock_llm.services.cli.bench.client import Endpoint, Outcome, open_http
from rootstock_llm.services.cli.bench.load import Player, open_loop, poisson_arrivals
from rootstock_llm.services.cli.bench.spec import Spec
from rootstock_llm.services.cli.bench.workload import make_sessions
from tests.benchmarks.intervals import interval
from tests.e2e.system import System, wait_until

LINES = 8000  # requests of the batch; more than a round can complete
LOGS = {"log_level": "warning"}
PERCENTILES = (50, 90, 99)
FIGURES = tuple(f"{what} p{at}" for what in ("TTFT", "ITL") for at in PERCENTILES)
IN_FLIGHT = "rootstock_gateway_batch_lines_in_flight"
LINES_AT_ONCE = 12  # lines in flight at full speed; some of the batch's 16 lanes are always between two lines
DRAWS = 500  # bootstrap samples


@dataclass
class Side:
    """Results of all rounds without the batch, or of all rounds with it."""

    rounds: list[list[Outcome]] = field(default_factory=list)  # chats of each round, in order of their start
    lines: list[float] = field(default_factory=list)  # lines of the batch per second in each round

    def figures(self, rounds: Iterable[int]) -> NDArray[np.float64]:
        """Returns the figures of all chats of the given rounds together, in seconds and in the order of FIGURES."""
        return np.array(figures([each for number in rounds for each in self.rounds[number]]))

    @property
    def first_s(self) -> list[float]:
        """Times to the first token of each round's first chat, in seconds."""
        return [found for (first, *_) in self.rounds if (found := first.ttft_s) is not None]


def figures(outcomes: list[Outcome]) -> list[float]:
    first = [each.ttft_s for each in outcomes if each.ttft_s is not None]
    gaps = [gap for each in outcomes for gap in each.itl_s]
    return [float(value) for values in (first, gaps) for value in np.percentile(values, PERCENTILES)]


async def chats(system: System, args: argparse.Namespace, seed: int) -> list[Outcome]:
    """Runs the chats of a round. Raises RuntimeError if a chat fails."""
    spec = Spec("random", seed=seed, num_requests=args.requests, input_len=args.input_len, output_len=args.output_len)
    async with open_http(None, 300) as http:
        endpoint = Endpoint(f"{system.url}/v1/completions", False, "demo", ignore_eos=True)
        player = Player(http, endpoint)
        await open_loop(make_sessions(spec), poisson_arrivals(args.rate, args.requests, seed), None, player.play)
    failed = [each for each in player.outcomes if each.ttft_s is None]
    if failed:
        raise RuntimeError(f"{len(failed)} chats failed")
    return player.outcomes


def begin_batch(client: OpenAI, args: argparse.Namespace) -> str:
    def line(number: int) -> bytes:
        body = {"model": "demo", "prompt": f"{number} is a number. " * 8, "max_tokens": args.output_len, "ignore_eos": True}
        return json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}).encode()

    content = b"\n".join(map(line, range(LINES)))
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    wait_until(lambda: answered(client, batch.id) > 0, 60, "the batch to run")
    return batch.id


def answered(client: OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return 0 if counts is None else counts.completed


def one_round(system: System, client: OpenAI, args: argparse.Namespace, side: Side, beside: bool, seed: int) -> None:
    batch_id = begin_batch(client, args) if beside else ""
    if beside:
        wait_until(lambda: system.metric("gateway", IN_FLIGHT) >= LINES_AT_ONCE, 60, "the batch to be at full speed")
    before, begun = answered(client, batch_id) if beside else 0, time.perf_counter()
    outcomes = asyncio.run(chats(system, args, seed))
    if beside:
        side.lines.append((answered(client, batch_id) - before) / (time.perf_counter() - begun))
        assert client.batches.retrieve(batch_id).status == "in_progress", "the batch must outlast the chats"
        client.batches.cancel(batch_id)
        wait_until(lambda: client.batches.retrieve(batch_id).status == "cancelled", 120, "the batch to end")
    side.rounds.append(sorted(outcomes, key=lambda each: each.sent_at))


def alone(system: System, client: OpenAI, args: argparse.Namespace) -> float:
    """Returns the lines per second of a batch that runs without chats."""
    batch_id = begin_batch(client, args)
    before, begun = answered(client, batch_id), time.perf_counter()
    time.sleep(args.alone_s)
    found = (answered(client, batch_id) - before) / (time.perf_counter() - begun)
    client.batches.cancel(batch_id)
    wait_until(lambda: client.batches.retrieve(batch_id).status == "cancelled", 120, "the batch to end")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6, metavar="N", help="pairs of rounds (default 6)")
    parser.add_argument("--requests", type=int, default=150, metavar="N", help="chats per round (default 150)")
    parser.add_argument("--rate", type=float, default=6.0, help="chats a second (default 6)")
    parser.add_argument("--input-len", type=int, default=64, help="words of each chat's prompt (default 64)")
    parser.add_argument(
        "--output-len", type=int, default=32, help="output tokens of each chat and each line of the batch (default 32)"
    )
    parser.add_argument("--alone-s", type=float, default=15.0, help="seconds for which a batch runs without chats (default 15)")
    parser.add_argument("--gateway-flags", default="", help="further flags of the gateway")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, System(Path(folder), gateway_flags=args.gateway_flags, **LOGS) as system:
        client = OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0, timeout=httpx.Timeout(60))
        asyncio.run(chats(system, args, 0))  # warms up
        sides = {False: Side(), True: Side()}
        for pair in range(args.pairs):
            for beside in (False, True) if pair % 2 else (True, False):
                one_round(system, client, args, sides[beside], beside, seed=1 + pair)
        full = alone(system, client, args)
    quiet, busy, rounds = sides[False], sides[True], range(args.pairs)
    drawn = np.random.default_rng(0).integers(0, args.pairs, (DRAWS, args.pairs))
    ratios = np.array([busy.figures(pairs) / quiet.figures(pairs) for pairs in drawn])
    own = np.array([busy.figures([pair]) / quiet.figures([pair]) for pair in rounds])
    for at, name in enumerate(FIGURES):
        before, after = quiet.figures(rounds)[at] * 1e3, busy.figures(rounds)[at] * 1e3
        low, high = np.percentile(ratios[:, at], (2.5, 97.5))
        least, most = interval(list(own[:, at]))
        print(
            f"{name}: {before:.1f} ms quiet, {after:.1f} with the batch: {after / before:.2f} [{low:.2f}, {high:.2f}];", end=" "
        )
        print(f"by pairs {median(own[:, at]):.2f} [{least:.2f}, {most:.2f}]")
    print(
        f"first chats: {median(quiet.first_s) * 1e3:.1f} ms quiet, {median(busy.first_s) * 1e3:.1f} with the batch, at most",
        end=" ",
    )
    print(f"{max(quiet.first_s) * 1e3:.1f} and {max(busy.first_s) * 1e3:.1f}")
    print(f"lines a second: {median(busy.lines):.1f} with chats, {full:.1f} without")


if __name__ == "__main__":
    main()
