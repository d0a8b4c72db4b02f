"""KV tiers in whole systems. The KV pool is tiny, so mixed requests read their prefixes from host memory or from files.

The worker reads from files after a restart. The system is deterministic and is compared bitwise with one that has a large pool.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.e2e.mixed_asks import KINDS, ask_all, asks_of, essence, hot, repeated
from tests.e2e.plain_answers import PlainAnswers
from tests.e2e.system import CHOSEN_MODELS, MODELS, System
from tests.night import NIGHTLY

CROWD = "--retract-interval 7 --enable-priority-scheduling --chunked-prefill-size 64 --max-running-requests 10"
ASKS = asks_of([*KINDS, hot, repeated], 15 if NIGHTLY else 1)
POOL_TOKENS = 768


def read_from(system: System) -> tuple[float, float]:
    """Returns the numbers of tokens whose KV the worker has read from host memory and from files."""
    return system.metric("worker-0", "sglang:load_back_tokens_total"), system.metric("worker-0", "sglang:prefetched_tokens_total")


@pytest.mark.parametrize("model", CHOSEN_MODELS)
def test_mixed_requests_get_bitwise_equal_results_from_every_tier(
    tmp_path: Path, plain_answers: PlainAnswers, model: str
) -> None:
    settings = MODELS[model]
    expected = plain_answers.of(ASKS, **settings)
    tiers = f"--enable-hierarchical-cache --hicache-size 1 --hicache-storage-backend file --hicache-storage-dir {tmp_path / 'kv'}"
    flags = f"--deterministic {CROWD} {tiers}"
    more = settings | {"max_total_tokens": POOL_TOKENS, "worker_flags": flags, "log_level": "info"}
    with System(tmp_path / "tiers", **more) as system:
        for turn in range(3):
            order = random.Random(turn).sample(range(len(ASKS)), len(ASKS))
            answers = asyncio.run(ask_all(system, [ASKS[index] for index in order], 20))
            wrong = [ASKS[index].kind for index, got in zip(order, answers, strict=True) if essence(got) != expected[index]]
            assert wrong == [], f"wrong results in round {turn}, by kind of request"
            host, files = read_from(system)
            read = (1, host, files)[turn]  # tokens that the round has read from its tier; in round 0, the tiers are empty
            assert read > 0, "round 1 must read KV from host memory, and round 2, after the worker's restart, from files"
            assert '"level":"error"' not in system.log("worker-0"), "the worker must log no failed step and no broken invariant"
            if turn == 1:
                system.kill("worker-0")
                system.start("worker-0")
                system.wait_ready()
