"""Cost of a routing decision: python -m tests.benchmarks.router

One thread makes decisions like the gateway, without I/O: it matches a prompt's blocks with the index, picks a worker by policy
and adds the blocks as speculative. Expired speculative blocks are removed before each decision (`expire`), about one prompt's
blocks each time. A shape defines how many of a prompt's `--blocks` blocks each of the `--workers` workers has. For each shape the
output has the median, the 99th percentile and the maximum of a decision in µs, and the medians of expire and of the decision's
parts. The last lines have the cost of hashing a prompt. Times are CPU times of the thread, because other processes disturb them
less than wall times; `--wall` measures wall times.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.gateway.routing.config import RoutingConfig, RoutingPolicy
from rootstock_llm.services.gateway.routing.policies import Policy, RoutingQuery, WorkerColumns, make_policy
from rootstock_llm.services.gateway.routing.prefix_index import PrefixIndex
from rootstock_llm.services.shared.index.prefix_index import BLOCK_TOKENS, block_hashes, root_hash, split_hashes

SYSTEM_BLOCKS = 64  # blocks of the system prompt that all prompts of a shape share
SPECULATION_S = 2.0  # lifetime of a speculative block
DECISIONS_PER_S = 400.0  # rate of the simulated decisions; with SPECULATION_S, it sets the number of speculative blocks

Prompt = list[bytes]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Fleet:
    """The prefix index, and the workers with their load."""

    index: PrefixIndex
    owners: list[int]  # the workers' numbers in the index
    workers: WorkerColumns


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of all decisions in µs."""

    total: NDArray[np.float64]  # per decision, without expiry
    parts: NDArray[np.float64]  # per decision: expiry, match, pick, speculation


def new_fleet(size: int, rng: random.Random) -> Fleet:
    index, workers, owners = PrefixIndex(), WorkerColumns(), []
    for number in range(size):
        row = workers.add(f"worker-{number}", rng.getrandbits(64))
        owner = index.owner(f"worker-{number}", rng.getrandbits(63))
        workers.usable[row], workers.limit[row], workers.running[row], workers.owner[row] = True, 320, 256, owner
        workers.requests[row] = 20 + rng.randrange(3)
        owners.append(owner)
    return Fleet(index, owners, workers)


def fresh(rng: random.Random, count: int) -> Prompt:
    """Returns random block hashes that are in no worker's cache."""
    raw = rng.randbytes(8 * count)
    return [raw[at : at + 8] for at in range(0, len(raw), 8)]


def background(fleet: Fleet, rng: random.Random, blocks: int) -> None:
    """Adds `blocks` blocks of other prompts per worker, so that the index has a realistic size."""
    for owner in fleet.owners:
        fleet.index.stored(owner, fresh(rng, blocks))


def nobody(fleet: Fleet, rng: random.Random, blocks: int) -> Iterator[Prompt]:
    """Yields prompts of which no worker has a block."""
    while True:
        yield fresh(rng, blocks)


def everybody(fleet: Fleet, rng: random.Random, blocks: int) -> Iterator[Prompt]:
    """Yields equal prompts. Each worker has all blocks of the prompt."""
    prompt = fresh(rng, blocks)
    for owner in fleet.owners:
        fleet.index.stored(owner, prompt)
    while True:
        yield copied(prompt)


def different_depths(fleet: Fleet, rng: random.Random, blocks: int) -> Iterator[Prompt]:
    """Yields equal prompts. Each worker has a random number of the first blocks of the prompt."""
    prompt = fresh(rng, blocks)
    for owner in fleet.owners:
        fleet.index.stored(owner, prompt[: rng.randrange(blocks + 1)])
    while True:
        yield copied(prompt)


def system_prefix(fleet: Fleet, rng: random.Random, blocks: int) -> Iterator[Prompt]:
    """Yields prompts that begin with a system prompt that all workers have. The rest of each prompt is new."""
    system = fresh(rng, SYSTEM_BLOCKS)
    for owner in fleet.owners:
        fleet.index.stored(owner, system)
    while True:
        yield copied(system) + fresh(rng, blocks - SYSTEM_BLOCKS)


def conversations(fleet: Fleet, rng: random.Random, blocks: int) -> Iterator[Prompt]:
    """Yields prompts that consist of a system prompt, one of 256 histories and a new turn of 8 blocks.

    All workers have the system prompt. One to four workers have a history. No worker has the new turn.
    """
    system = fresh(rng, SYSTEM_BLOCKS)
    for owner in fleet.owners:
        fleet.index.stored(owner, system)
    histories = [fresh(rng, blocks - SYSTEM_BLOCKS - 8) for _ in range(256)]
    for history in histories:
        for owner in rng.sample(fleet.owners, min(len(fleet.owners), rng.randint(1, 4))):
            fleet.index.stored(owner, history)
    while True:
        yield copied(system) + copied(rng.choice(histories)) + fresh(rng, 8)


def half_of_them(fleet: Fleet, rng: random.Random, blocks: int) -> Iterator[Prompt]:
    """Yields equal prompts. Half of the workers have the first sixteenth of the prompt, a quarter two sixteenths, and so on."""
    prompt, owners = fresh(rng, blocks), list(fleet.owners)
    for owner in owners:
        depth = int(np.random.default_rng(owner).geometric(0.5)) * blocks // 16
        fleet.index.stored(owner, prompt[:depth])
    while True:
        yield copied(prompt)


SHAPES = (nobody, everybody, different_depths, system_prefix, conversations, half_of_them)


def copied(prompt: Prompt) -> Prompt:
    """Returns the prompt as new bytes objects, as in a new request. Look-ups of used objects are faster: their hash is cached."""
    return [bytes(bytearray(block)) for block in prompt]


def decide(fleet: Fleet, policy: Policy, prompt: Prompt, now: float, clock: Clock) -> tuple[float, ...]:
    """Makes a decision. Returns the clock in seconds at the beginning, and after expiry, match, pick and speculation."""
    index, workers = fleet.index, fleet.workers
    begin = clock()
    index.expire(now)
    after_expiry = clock()
    depths = index.match(prompt)
    matched = np.where(workers.owner >= 0, depths[workers.owner], 0) * BLOCK_TOKENS
    after_match = clock()
    pick = policy.pick(RoutingQuery(len(prompt) * BLOCK_TOKENS, matched), workers)
    assert pick is not None
    after_pick = clock()
    index.speculate(int(workers.owner[pick.row]), prompt, now + SPECULATION_S)
    workers.last_pick[pick.row] = int(now * 1e6)
    return begin, after_expiry, after_match, after_pick, clock()


def measure(shape: Callable[..., Iterator[Prompt]], args: argparse.Namespace, clock: Clock) -> tuple[Costs, int]:
    rng = random.Random(args.seed)
    fleet = new_fleet(args.workers, rng)
    background(fleet, rng, args.background)
    prompts = shape(fleet, rng, args.blocks)
    policy = make_policy(args.policy, RoutingConfig(), random.Random(args.seed))
    times = np.zeros((args.decisions, 5))
    warmup = args.decisions // 10
    for number in range(-warmup, args.decisions):
        measured = decide(fleet, policy, next(prompts), (number + warmup) / DECISIONS_PER_S, clock)
        if number >= 0:
            times[number] = measured
    return Costs((times[:, 4] - times[:, 1]) * 1e6, np.diff(times, axis=1) * 1e6), fleet.index.num_blocks


def hashing(ids: Sequence[int], decisions: int, clock: Clock) -> NDArray[np.float64]:
    """Returns the microseconds of each repetition of hashing a prompt and splitting its hashes."""
    root = root_hash("model", "main", "tokenizer", "")
    costs = np.zeros(decisions)
    for number in range(decisions):
        begin = clock()
        list(split_hashes(block_hashes(root, ids)))
        costs[number] = (clock() - begin) * 1e6
    return costs


def row(name: str, costs: NDArray[np.float64], rest: str = "") -> str:
    p50, p99 = np.percentile(costs, (50, 99))
    return f"{name:18}{p50:8.0f}{p99:8.0f}{costs.max():8.0f}  {rest}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=512, help="blocks of 64 tokens in every prompt")
    parser.add_argument("--background", type=int, default=500, help="blocks of other prompts that each worker has")
    parser.add_argument("--decisions", type=int, default=4000)
    parser.add_argument("--policy", default=RoutingPolicy.PREFIX_AWARE.value, choices=[p.value for p in RoutingPolicy])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wall", action="store_true")
    args = parser.parse_args(argv)
    clock = time.perf_counter if args.wall else time.thread_time
    print(f"{args.workers} workers, prompts of {args.blocks} blocks, {args.policy}; µs per decision")
    print(f"{'shape':18}{'p50':>8}{'p99':>8}{'max':>8}  of p50: expire, match, pick, speculate; blocks in the index")
    for shape in SHAPES:
        costs, blocks = measure(shape, args, clock)
        parts = ", ".join(f"{part:.0f}" for part in np.median(costs.parts, axis=0))
        print(row(shape.__name__, costs.total, f"{parts}; {blocks:,}"), flush=True)
        gc.collect()
    ids = array("I", range(args.blocks * BLOCK_TOKENS))
    print(row("hashing a list", hashing(ids.tolist(), args.decisions // 10, clock)))
    print(row("hashing an array", hashing(ids, args.decisions // 10, clock)))


if __name__ == "__main__":
    main()
