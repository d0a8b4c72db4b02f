"""Mixed requests in a tiny KV pool with all features get the results of requests that run singly in a system without flags."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import numpy as np
import pytest

from tests.e2e.mixed_asks import KINDS, Essence, ask_all, asks_of, essence
from tests.e2e.system import System, wait_until
from tests.night import NIGHTLY

POOL_TOKENS = 512
FLAGS = (
    "--enable-mixed-chunk --retract-interval 7 --schedule-policy lpm --enable-priority-scheduling --chunked-prefill-size 64"
    " --adaptive-chunk-rows 16 --max-extend-steps 2 --max-prefill-tokens 256 --prefill-max-requests 6 --max-running-requests 10"
    " --max-prompt-logprob-tokens 256 --eviction-policy priority --no-consecutive-prefill-overlap"
    " --schedule-conservativeness 0.3"
)
TOLERANCE = 2e-4  # largest difference of numbers; in float32, chunks and other requests of a step change the last digits
ROUNDS = 5 if NIGHTLY else 3
ASKS = asks_of(KINDS, ROUNDS)


@pytest.fixture(scope="module")
def expected(exact_system: System) -> list[Essence]:
    """Results of the requests in a system without flags, one request at a time."""
    return [essence(answers) for answers in asyncio.run(ask_all(exact_system, ASKS, 1))]


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(tmp_path_factory.mktemp("crowded"), dtype="float32", max_total_tokens=POOL_TOKENS, worker_flags=FLAGS) as system:
        yield system


def shuffled(seed: int) -> list[int]:
    return random.Random(seed).sample(range(len(ASKS)), len(ASKS))


def least_urgent_first() -> list[int]:
    """Returns the requests' indices in order of rising priority, so that each request can preempt the earlier ones."""
    return sorted(range(len(ASKS)), key=lambda index: ASKS[index].posts[-1][1].get("priority", 0))


@pytest.mark.parametrize(
    ("order", "apart_s"), [(shuffled(1), 0), (least_urgent_first(), 0.01)], ids=["at once", "by rising priority"]
)
def test_mixed_requests_get_the_results_of_a_plain_system_when_the_worker_is_crowded(
    crowded: System, expected: list[Essence], order: list[int], apart_s: float
) -> None:
    answers = asyncio.run(ask_all(crowded, [ASKS[index] for index in order], len(ASKS), apart_s))
    wrong = [ASKS[index].kind for index, got in zip(order, answers, strict=True) if not is_close(essence(got), expected[index])]
    assert wrong == []


def is_close(got: Essence, wanted: Essence) -> bool:
    close = len(got.numbers) == len(wanted.numbers) and np.allclose(got.numbers, wanted.numbers, atol=TOLERANCE, rtol=0)
    return got.exact == wanted.exact and close


def test_crowded_worker_retracts_preempts_and_evicts(crowded: System) -> None:
    """Reads the metrics and the log after test_mixed_requests_get_the_results_of_a_plain_system_when_the_worker_is_crowded."""
    for counter, least in (
        ("sglang:num_retracted_requests_total", 20),
        ("rootstock_worker_preempted_requests_total", 1),
        ("sglang:evicted_tokens_total", POOL_TOKENS),
        ("sglang:cached_tokens_total", 200 * ROUNDS),
    ):
        assert crowded.metric("worker-0", counter) >= least, counter
    gauges = ("sglang:num_used_tokens", "sglang:num_running_reqs", "sglang:num_queue_reqs", "rootstock_worker_sessions")
    wait_until(lambda: not any(crowded.metric("worker-0", gauge) for gauge in gauges), 60, "all KV pages to be free")
    assert crowded.metric("worker-0", "sglang:num_aborted_requests_total") == 0
    assert '"level":"error"' not in crowded.log("worker-0"), "the worker must log no failed step and no broken invariant"
