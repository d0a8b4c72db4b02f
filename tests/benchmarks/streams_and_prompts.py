"""A load for several benchmarks, with two parts that run at the same time.

Several lanes each run streams with short prompts, one after another. A separate lane sends long prompts one at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, quantiles

import httpx

from tests.benchmarks.intervals import interval
from tests.e2e.system import System

STREAM_TOKENS, PROMPT_OUTPUT = 160, 8
FIRST_ID, LAST_ID = 4, 1200  # range of the demo model's ordinary tokens


@dataclass
class Run:
    """Measurements of a run."""

    gaps: list[float] = field(default_factory=list)  # seconds between tokens of a stream
    ttft: list[float] = field(default_factory=list)  # seconds to the first token of a long prompt

    def figures(self) -> dict[str, float]:
        cuts = quantiles(self.gaps, n=100)
        return {"itl p50": cuts[49], "itl p99": cuts[98], "ttft of the prompts": median(self.ttft)}


async def _stream(http: httpx.AsyncClient, prompt: list[int], tokens: int) -> list[float]:
    """Sends a streamed request. Returns the time of sending, then the time of each token, by time.perf_counter()."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    times = [time.perf_counter()]
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                times.append(time.perf_counter())
    return times


async def _load(system: System, args: argparse.Namespace, seed: int) -> Run:
    rng, run, done = random.Random(seed), Run(), asyncio.Event()

    def prompt(length: int) -> list[int]:
        return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(length)]

    async with httpx.AsyncClient(base_url=system.url, timeout=300) as http:

        async def streams() -> None:
            while not done.is_set():
                times = await _stream(http, prompt(16), STREAM_TOKENS)
                run.gaps += [later - before for before, later in pairwise(times[1:])]

        running = [asyncio.create_task(streams()) for _ in range(args.streams)]
        await asyncio.sleep(1.0)
        for _ in range(args.prompts):
            times = await _stream(http, prompt(args.tokens), PROMPT_OUTPUT)
            run.ttft.append(times[1] - times[0])
        done.set()
        await asyncio.gather(*running)
    return run


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=9, metavar="N", help="pairs of runs (default 9)")
    parser.add_argument("--streams", type=int, default=4, metavar="N", help="concurrent streams (default 4)")
    parser.add_argument("--prompts", type=int, default=6, metavar="N", help="long prompts per run, in sequence (default 6)")
    parser.add_argument("--tokens", type=int, default=3500, metavar="N", help="tokens of a long prompt (default 3500)")


def compare(systems: Mapping[str, System], args: argparse.Namespace) -> dict[str, list[float]]:
    """Compares two running systems in pairs of runs, after a warm-up run of each, and prints the figures.

    Returns:
        For each figure, the ratio of the first system to the second one in each pair.
    """
    first, second = systems
    ratios: dict[str, list[float]] = {}
    for each in systems.values():
        asyncio.run(_load(each, args, args.pairs))
    for pair in range(args.pairs):
        order = list(systems) if pair % 2 else list(systems)[::-1]
        figures = {name: asyncio.run(_load(systems[name], args, pair)).figures() for name in order}
        for what, value in figures[first].items():
            ratios.setdefault(what, []).append(value / figures[second][what])
        print(pair, {name: {k: round(v * 1e3, 1) for k, v in each.items()} for name, each in figures.items()}, flush=True)
    return ratios


def print_ratios(ratios: Mapping[str, list[float]], names: str) -> None:
    """Prints the medians of the ratios with 95 % intervals. `names` describes the ratios."""
    for what, values in ratios.items():
        low, high = interval(values)
        print(f"{what}, {names}: {median(values):.2f} [{low:.2f}, {high:.2f}]")
