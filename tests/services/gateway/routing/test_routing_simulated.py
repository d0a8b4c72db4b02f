"""Tests of routing with the real index and policies, simulated workers and a virtual clock."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from rootstock_llm.services.gateway.routing.config import RoutingConfig
from rootstock_llm.services.gateway.routing.policies import RoutingQuery, WorkerColumns, make_policy
from rootstock_llm.services.gateway.routing.prefix_index import PrefixIndex
from rootstock_llm.services.shared.index.prefix_index import BLOCK_TOKENS

SPECULATION_S = 2.0  # seconds for which a routed prompt counts as cached before the worker reports its blocks
SECONDS_PER_BLOCK = 0.02  # time of a worker to compute a block of BLOCK_TOKENS tokens
DECODE_S = 2.0  # mean time between the end of the prompt and the end of the request


@dataclass(frozen=True, slots=True)
class Outcome:
    hit_rate: float  # cached blocks over all blocks of the prompts
    seconds: float  # virtual time at the end of the last request
    rows: list[int]  # chosen worker by prompt
    loads: np.ndarray  # float64[samples, workers], open requests after each pick of the second half


class Simulation:
    """A closed loop with `clients` open requests.

    A worker has an LRU cache of `cache_blocks`. It computes uncached blocks request by request and decodes in parallel.
    """

    def __init__(self, policy: str, workers: int, clients: int, cache_blocks: int, config: RoutingConfig | None = None) -> None:
        self.columns, self.index = WorkerColumns(), PrefixIndex()
        self.policy = make_policy(policy, config or RoutingConfig(), random.Random(7))
        self.clients, self.cache_blocks = clients, cache_blocks
        self.caches: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(workers)]
        self.free_at = [0.0] * workers
        for number in range(workers):
            row = self.columns.add(f"w{number}", random.Random(number).getrandbits(64))
            self.columns.owner[row] = self.index.owner(f"w{number}", 1)
            self.columns.usable[row], self.columns.limit[row], self.columns.running[row] = True, 10_000, 64

    def run(self, prompts: list[list[bytes]]) -> Outcome:
        now, done, rows, loads = 0.0, list[tuple[float, int]](), list[int](), []
        hits, blocks = 0, sum(map(len, prompts))
        jitter = random.Random(11)
        for number, prompt in enumerate(prompts):
            if len(done) == self.clients:
                now, row = heapq.heappop(done)
                self.columns.requests[row] -= 1
            row = self.route(prompt, now, number)
            cached = self.prefill(row, prompt)
            self.free_at[row] = max(now, self.free_at[row]) + (len(prompt) - cached) * SECONDS_PER_BLOCK
            heapq.heappush(done, (self.free_at[row] + DECODE_S * jitter.uniform(0.8, 1.2), row))
            hits += cached
            rows.append(row)
            if number > len(prompts) // 2:
                loads.append(self.columns.requests[: len(self.caches)].astype(float))
        return Outcome(hits / blocks, max(end for end, _ in done), rows, np.array(loads))

    def route(self, prompt: list[bytes], now: float, number: int) -> int:
        self.index.expire(now)
        matched = self.index.match(prompt)[self.columns.owner] * BLOCK_TOKENS
        matched[~self.columns.used] = 0
        pick = self.policy.pick(RoutingQuery(len(prompt) * BLOCK_TOKENS, matched), self.columns)
        assert pick is not None
        self.columns.requests[pick.row] += 1
        self.columns.last_pick[pick.row] = number + 1
        self.index.speculate(int(self.columns.owner[pick.row]), prompt, now + SPECULATION_S)
        return pick.row

    def prefill(self, row: int, prompt: list[bytes]) -> int:
        """Caches the blocks of a prompt. Returns the number of leading blocks that were cached before."""
        cache, owner = self.caches[row], int(self.columns.owner[row])
        cached = next((depth for depth, block in enumerate(prompt) if block not in cache), len(prompt))
        for block in reversed(prompt):
            cache[block] = None
            cache.move_to_end(block)
        self.index.stored(owner, prompt)
        evicted = [cache.popitem(last=False)[0] for _ in range(len(cache) - self.cache_blocks)]
        self.index.removed(owner, evicted)
        return cached


def blocks(rng: random.Random, count: int) -> list[bytes]:
    return [rng.randbytes(8) for _ in range(count)]


def with_one_hot_prefix(rng: random.Random) -> Iterator[list[bytes]]:
    """Yields prompts of 34 blocks. 60 % begin with the same 32 blocks (2048 tokens); the rest share no prefix."""
    hot = blocks(rng, 32)
    while True:
        yield (hot + blocks(rng, 2)) if rng.random() < 0.6 else blocks(rng, 34)


def shared_prefixes(rng: random.Random, groups: int, prompts: int) -> list[list[bytes]]:
    """Returns `prompts` prompts of 34 blocks for each of `groups` prefixes of 32 blocks, in random order."""
    prefixes = [blocks(rng, 32) for _ in range(groups)]
    drawn = [prefix + blocks(rng, 2) for prefix in prefixes for _ in range(prompts)]
    rng.shuffle(drawn)
    return drawn


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("clients", [32, 64, 256])
def test_policy_prefix_aware_limits_the_load_when_most_prompts_share_a_prefix(clients: int) -> None:
    prompts = list(itertools.islice(with_one_hot_prefix(random.Random(1)), 2000))
    outcome = Simulation("prefix_aware", 8, clients, cache_blocks=4000).run(prompts)
    assert outcome.loads.mean(axis=0).max() <= 1.25 * outcome.loads.mean()
    over = outcome.loads.max(axis=1) > 1.5 * outcome.loads.mean(axis=1)
    assert not over.any()
    assert outcome.hit_rate > 0.5, "at most 0.56 is possible: 60 % of the prompts, 32 of 34 blocks"


def test_policy_prefix_aware_equals_least_requests_when_no_prefix_is_shared() -> None:
    rng = random.Random(2)
    prompts = [blocks(rng, rng.randint(2, 40)) for _ in range(1500)]
    rows = [Simulation(policy, 8, 100, cache_blocks=2000).run(prompts).rows for policy in ("prefix_aware", "least_requests")]
    assert rows[0] == rows[1]


def test_policy_prefix_aware_raises_the_cache_hit_rate_of_shared_prefixes() -> None:
    """Eight workers serve 64 groups of 16 prompts.

    A worker's cache has space for the 512 blocks of 8 groups: 8 * 32 shared blocks and 8 * 16 * 2 other blocks.
    """
    prompts = shared_prefixes(random.Random(3), 64, 16)
    aware, other = (Simulation(p, 8, 64, cache_blocks=512).run(prompts) for p in ("prefix_aware", "round_robin"))
    assert aware.hit_rate >= 3 * other.hit_rate
    assert aware.seconds <= other.seconds / 1.5
