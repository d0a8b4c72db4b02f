"""Runs the property tests' workload for at least 4,500 steps in all, over every policy and flag.

With ROOTSTOCK_TEST_NIGHTLY=1, the workload runs for at least 50,000 steps, twenty times.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from rootstock_llm.services.worker.core.contracts.config import EvictionPolicy, SchedulePolicy
from rootstock_llm.services.worker.core.contracts.messages import FinishReason
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, ForwardMode
from tests.all_pairs import each_pair, each_value
from tests.core.harness import Engine
from tests.core.test_scheduler_properties import CONTEXT, check_run, config_of, drive, random_prompt
from tests.night import NIGHTLY

ROUNDS = range(20) if NIGHTLY else range(1)
# If a wanted event has not occurred, a row of ROWS runs for up to PATIENCE times its share of the steps.
PATIENCE = 4 if NIGHTLY else 15
STEPS_OF_A_ROUND = 50_000 if NIGHTLY else 4_500
TURNS_OF_A_DRIVE = 250 if NIGHTLY else 60  # loop iterations of drive() per seed, before the requests that are left end

LRU, LFU, FIFO, PRIORITY = EvictionPolicy.LRU, EvictionPolicy.LFU, EvictionPolicy.FIFO, EvictionPolicy.PRIORITY

COLUMNS = (
    "page_size",
    "pool_tokens",
    "slots",
    "chunk",
    "schedule_policy",
    "eviction_policy",
    "enable_priority_scheduling",
    "schedule_low_priority_values_first",
    "priority_preemption_threshold",
    "enable_mixed_chunk",
    "retract_interval",
    "max_extend_steps",
    "adaptive_chunk_rows",
    "enable_radix_cache",
    "overlap",
)
ROWS: dict[str, tuple[Any, ...]] = {
    "fcfs": (1, 160, 6, 16, SchedulePolicy.FCFS, LRU, False, False, 0, False, 0, 0, 64, True, True),
    "fcfs mixed": (16, 224, 6, 32, SchedulePolicy.FCFS, FIFO, True, False, 0, True, 0, 0, 1, True, True),
    "fcfs without a cache": (4, 160, 6, 16, SchedulePolicy.FCFS, LRU, True, True, 1, True, 5, 1, 0, False, False),
    "lpm": (4, 160, 6, 16, SchedulePolicy.LPM, LFU, False, False, 0, False, 0, 2, 64, True, False),
    "lpm mixed": (1, 160, 9, 32, SchedulePolicy.LPM, PRIORITY, True, False, 0, True, 5, 0, 0, True, True),
    "dfs-weight": (4, 160, 6, 0, SchedulePolicy.DFS_WEIGHT, FIFO, True, True, 1, False, 0, 1, 64, True, True),
    "dfs-weight mixed": (1, 160, 6, 16, SchedulePolicy.DFS_WEIGHT, LRU, False, False, 0, True, 1, 0, 1, True, False),
    "lof": (16, 224, 6, 16, SchedulePolicy.LOF, PRIORITY, True, True, 0, True, 0, 2, 0, True, True),
    "random": (4, 160, 3, 16, SchedulePolicy.RANDOM, LFU, True, False, 2, False, 1, 0, 1, True, True),
    "routing-key": (1, 160, 6, 16, SchedulePolicy.ROUTING_KEY, LRU, True, False, 1, True, 0, 1, 64, True, True),
}


def driven(name: str, seed: int, turns: int = TURNS_OF_A_DRIVE, checked: bool = True) -> Engine:
    values = dict(zip(COLUMNS, ROWS[name], strict=True))
    overlap = values.pop("overlap")
    config = config_of(**values, schedule_conservativeness=0.3, max_prompt_logprob_tokens=16, random_seed=seed)
    return drive(config, seed, turns, overlap, checked)


def num_jumps(plans: list[BatchPlan]) -> int:
    """Returns the number of extend rows with forced tokens.

    An extend row has forced tokens if its slot was not admitted again, and the slot's previous row was sampled.
    """
    count = 0
    sampled: set[int] = set()
    for plan in plans:
        admitted = {params.slot for params in plan.admitted}
        for row, slot in enumerate(plan.slots.tolist()):
            if row < plan.num_extend and slot not in admitted and slot in sampled:
                count += 1
            (sampled.add if plan.sample[row] else sampled.discard)(slot)
    return count


def exercised(engine: Engine) -> Counter[str]:
    stats = engine.core.stats()
    return Counter(
        {
            "retractions": stats.retractions_total,
            "preemptions": stats.preemptions_total,
            "evicted pages": stats.evicted_pages_total,
            "cached prompt tokens": stats.cached_tokens_total,
            "grammars waited for": len(engine.book.ready),
            "jumps": num_jumps(engine.plans),
            "turns of open sessions": len(engine.contexts),
            "mixed steps": sum(plan.mode is ForwardMode.MIXED for plan in engine.plans),
            "rows with prompt logprobs": sum(len(plan.prompt_logprob_rows) for plan in engine.plans),
            "vectors": sum(finish.reason is FinishReason.EMBEDDED for finish in engine.finishes.values()),
        }
    )


@pytest.mark.parametrize("round_number", ROUNDS)
@pytest.mark.parametrize("name", ROWS)
def test_scheduler_keeps_invariants_in_long_runs(name: str, round_number: int) -> None:
    """Every invariant holds after every call, every request ends once, and each event of `wanted` has occurred."""
    values = dict(zip(COLUMNS, ROWS[name], strict=True))
    never = set()
    if not values["enable_priority_scheduling"]:
        never.add("preemptions")
    if not values["enable_radix_cache"]:
        never |= {"evicted pages", "cached prompt tokens"}
    wanted = {"retractions", "preemptions", "evicted pages", "cached prompt tokens", "grammars waited for", "jumps"}
    wanted |= {"turns of open sessions", "mixed steps", "rows with prompt logprobs", "vectors"}
    share = STEPS_OF_A_ROUND / len(ROWS)
    steps, seed, seen = 0, 1000 * round_number, Counter[str]()
    while steps < share or (steps < PATIENCE * share and not all(seen[what] for what in wanted - never)):
        engine = driven(name, seed)
        check_run(engine)
        steps, seed = steps + len(engine.plans), seed + 1
        seen += exercised(engine)
    assert {what for what in wanted if not seen[what]} == never


EITHER = (True, False)
EVERY_VALUE: dict[str, set[Any]] = {
    "schedule_policy": set(SchedulePolicy),
    "eviction_policy": set(EvictionPolicy),
    "enable_priority_scheduling": set(EITHER),
    "schedule_low_priority_values_first": set(EITHER),
    "enable_mixed_chunk": set(EITHER),
    "enable_radix_cache": set(EITHER),
    "overlap": set(EITHER),
    "retract_interval": {0, 1, 5},
    "max_extend_steps": {0, 1, 2},
}


def test_long_runs_cover_every_policy_and_flag() -> None:
    assert {column: {row[COLUMNS.index(column)] for row in ROWS.values()} for column in EVERY_VALUE} == EVERY_VALUE


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("name", ["lpm mixed", "random"])
def test_plans_are_reproducible_by_seed(name: str) -> None:
    first, second, other = (driven(name, seed, 100, checked=False) for seed in (77, 77, 78))
    assert [repr(plan) for plan in first.plans] == [repr(plan) for plan in second.plans]
    assert repr(first.finishes) == repr(second.finishes)
    assert [repr(plan) for plan in other.plans] != [repr(plan) for plan in first.plans]


class TestNoStarvation:
    """With the policy fcfs and without priorities, requests are admitted in order and after a bounded number of steps."""

    @each_pair(overlap=EITHER, retract_interval=[0, 3], mixed=EITHER)
    def test_scheduler_admits_requests_in_order_of_arrival(self, overlap: bool, retract_interval: int, mixed: bool) -> None:
        config = config_of(
            4, 160, 6, 16, enable_mixed_chunk=mixed, retract_interval=retract_interval, schedule_conservativeness=0.3
        )
        engine, rng = Engine(config, overlap, checked=False), random.Random(5)
        for handle in range(150):
            prompt = random_prompt(rng)
            engine.submit(handle, prompt, max_new_tokens=rng.randrange(1, CONTEXT - len(prompt)), ignore_eos=rng.random() < 0.5)
            if rng.random() < 0.1:
                engine.abort(rng.randrange(max(0, handle - 12), handle + 1))
            for _ in range(rng.randrange(6)):
                engine.turn()
                self.check_order(engine)
        engine.drain()
        check_run(engine)

    @staticmethod
    def check_order(engine: Engine) -> None:
        """Checks that every admitted request arrived before every request that was never admitted.

        Requests that wait for a prefix are exempt.
        """
        here = engine.core.queues.by_key.values()
        begun = [request.seq for request in here if request.progress.queue_s >= 0]
        never = [request.seq for request in here if request.progress.queue_s < 0 and request.kv.prefix_seen < 0]
        assert not begun or not never or max(begun) < min(never)

    @each_value(overlap=EITHER, retract_interval=[0, 4])
    def test_scheduler_admits_a_request_within_the_time_that_earlier_requests_need(
        self, overlap: bool, retract_interval: int
    ) -> None:
        """Bounds the steps until the first admission, under a load that keeps the queue full.

        Until the request is admitted, each step extends or decodes an earlier request. An earlier request takes one step per
        chunk and per output token. Each of its retractions costs at most one more step per chunk.
        """
        config = config_of(4, 160, 6, 16, retract_interval=retract_interval, schedule_conservativeness=0.3)
        engine, rng = Engine(config, overlap, checked=False), random.Random(6)
        bounds: dict[int, int] = {}
        handle = 0
        for _ in range(400):
            while engine.core.stats().num_waiting < 5:
                prompt = random_prompt(rng)
                engine.submit(handle, prompt, max_new_tokens=rng.randrange(1, CONTEXT - len(prompt)))
                bounds[handle] = self.bound(engine, handle)
                handle += 1
            engine.turn()
            for request in engine.core.queues.by_key.values():
                late = engine.core.stats().retractions_total * -(-CONTEXT // 16)
                waited = len(engine.plans) - bounds[request.handle]
                assert request.progress.queue_s >= 0 or waited <= late, f"request {request.handle} waits beyond its bound"
        assert handle > 30

    @staticmethod
    def bound(engine: Engine, handle: int) -> int:
        """Returns the step at which the request begins at the latest if no request is retracted."""
        before = [request for request in engine.core.queues.by_key.values() if request.handle != handle]
        chunks = sum(-(-request.num_prompt_tokens // 16) + 1 for request in before)
        outputs = sum(request.params.max_new_tokens - len(request.progress.output_ids) for request in before)
        return len(engine.plans) + chunks + outputs + 2
