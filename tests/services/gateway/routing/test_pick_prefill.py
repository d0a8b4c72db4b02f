"""Tests of pick_prefill: the prompts for which a prefill worker is used, and the choice of this worker."""

from __future__ import annotations

import random

from rootstock_llm.services.gateway.routing.config import RoutingConfig, RoutingPolicy
from rootstock_llm.services.gateway.routing.policies import (
    MOST_QUEUED_TOKENS,
    Pick,
    RoutingQuery,
    WorkerColumns,
    make_policy,
    pick_prefill,
)

# Tokens of the prompt; prompt tokens that the decode worker has cached; tokens queued at the prefill worker; whether the decode
# worker is busy; whether the prefill worker is full; whether the prefill worker computes the prompt.
PROMPTS = {
    "long prompt, all idle": (600, 0, 0, False, False, True),
    "short prompt": (511, 0, 0, True, False, False),
    "mostly cached prompt": (600, 89, 0, True, False, False),
    "both workers busy": (600, 0, 100, True, False, True),
    "idle decode worker, busy prefill worker": (600, 0, 100, False, False, False),
    "prefill queue at the limit": (600, 0, MOST_QUEUED_TOKENS, True, False, True),
    "prefill queue above the limit": (600, 0, MOST_QUEUED_TOKENS + 1, True, False, False),
    "no free slot at the prefill worker": (600, 0, 0, True, True, False),
}


def test_prefill_worker_is_picked_only_when_time_is_saved() -> None:
    for name, (tokens, cached, queued, decode_busy, full, uses_prefill) in PROMPTS.items():
        columns = WorkerColumns()
        prefill, decode = columns.add("prefill", 1), columns.add("decode", 2)
        columns.usable[:2], columns.limit[:2], columns.running[:2] = True, 4, 4
        columns.serves[prefill] = False
        columns.tokens[prefill], columns.requests[prefill], columns.requests[decode] = queued, 4 * full, decode_busy
        policy = make_policy(str(RoutingPolicy.LEAST_REQUESTS), RoutingConfig(), random.Random(0))
        pick = pick_prefill(policy, columns, RoutingQuery(tokens), Pick(decode, "any", cached), 512)
        assert (pick is not None and pick.row == prefill) == uses_prefill, name


def fleet(prefill: int, decode: int, limit: int = 4) -> WorkerColumns:
    columns = WorkerColumns()
    for row in range(prefill + decode):
        assert columns.add(f"worker-{row}", row) == row
    count = prefill + decode
    columns.usable[:count], columns.limit[:count], columns.running[:count] = True, limit, limit
    columns.serves[:prefill] = False
    columns.requests[prefill:count] = 1
    return columns


def picked(columns: WorkerColumns, decode: int) -> int | None:
    policy = make_policy(str(RoutingPolicy.LEAST_REQUESTS), RoutingConfig(), random.Random(0))
    pick = pick_prefill(policy, columns, RoutingQuery(600), Pick(decode, "any", 0), 512)
    return None if pick is None else pick.row


def test_prefill_worker_with_a_long_queue_is_not_picked() -> None:
    columns = fleet(2, 1, limit=8)
    columns.requests[:2], columns.tokens[:2] = (1, 2), (MOST_QUEUED_TOKENS + 1, 2000)
    assert picked(columns, 2) == 1


def test_prefill_worker_is_not_picked_when_decode_workers_have_too_few_free_slots() -> None:
    columns = fleet(1, 2)
    columns.limit[0] = 100
    columns.requests[0], columns.tokens[0] = 5, 100
    assert picked(columns, 1) == 0
    columns.requests[0] = 6
    assert picked(columns, 1) is None
    columns.requests[1] = 0
    columns.requests[2] = 4
    assert picked(columns, 1) is None, "an idle decode worker computes the prompt itself"
