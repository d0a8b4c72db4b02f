"""Sends random messages to cores with small pools, and checks the invariants of docs/design/scheduler.md#invariants."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rootstock_llm.services.worker.core.contracts.config import EvictionPolicy, SchedulePolicy, SchedulerConfig
from rootstock_llm.services.worker.core.contracts.experts import ExpertShape
from rootstock_llm.services.worker.core.contracts.messages import ErrorCode, FinishReason, SessionTurn
from rootstock_llm.services.worker.core.contracts.plan import EmbeddingParams, ScoreParams
from rootstock_llm.services.worker.core.contracts.transfers import EARLY_S, Tier, WritePolicy
from tests.core.deployed_config import deployed_config
from tests.core.fake_grammar import spec
from tests.core.harness import Engine
from tests.night import NIGHTLY

CONTEXT = 96


def random_prompt(rng: random.Random) -> list[int]:
    """Returns a prompt with one of few beginnings, so that prefixes are shared, split and published twice."""
    stem = [rng.randrange(3)] * rng.randrange(1, 40)
    return stem + [rng.randrange(50) for _ in range(rng.randrange(0, 24))]


def random_params(rng: random.Random, prompt_len: int) -> dict[str, Any]:
    params: dict[str, Any] = {"max_new_tokens": rng.randrange(1, CONTEXT - prompt_len + 1)}
    if rng.random() < 0.3:
        params["ignore_eos"] = True
    if rng.random() < 0.2:
        params["stop"] = (rng.choice("abcdefg") + rng.choice("hijklmn"), rng.choice("opq"))
    if rng.random() < 0.2:
        params["stop_token_ids"] = tuple(rng.sample(range(50), rng.randrange(1, 12)))
    if rng.random() < 0.2:
        params["min_new_tokens"] = rng.randrange(0, 8)
    if rng.random() < 0.2:
        params["stream_interval"] = rng.randrange(1, 6)
    if rng.random() < 0.2:
        params["grammar"] = spec(rng.randrange(4), rng.randrange(1, 30))
    if rng.random() < 0.1:
        params["speculative"] = False
    if rng.random() < 0.15:
        params["stop_regex"] = (rng.choice("abcdefg") + "+" + rng.choice("hijklmn"),)
    if rng.random() < 0.2:
        params["top_logprobs"] = rng.randrange(0, 3)
    if rng.random() < 0.2:
        params["prompt_logprobs_from"] = rng.randrange(prompt_len)
    if rng.random() < 0.1:
        return {"embedding": EmbeddingParams(), "max_new_tokens": 1}
    if rng.random() < 0.15:
        return {"score": ScoreParams(tuple(rng.choices(range(50), k=rng.randrange(1, 4)))), "max_new_tokens": 0}
    if rng.random() < 0.1:
        params |= {"max_new_tokens": 0, "min_new_tokens": 0}
    return params


def random_turn(rng: random.Random, engine: Engine) -> SessionTurn | None:
    """Returns a turn of one of a few sessions, or None.

    The session may be closed or without turns, and the parent may not exist.
    """
    if rng.random() < 0.75:
        return None
    name = rng.choice(("s0", "s1", "s2"))
    turns = [rid for session, rid in engine.contexts if session == name]
    parent = rng.choice(["", "", *turns])
    return SessionTurn(name, parent, rng.choice((-1, -1, rng.randrange(40))), rng.random() < 0.3)


def session_traffic(rng: random.Random, engine: Engine) -> None:
    name = rng.choice(("s0", "s1", "s2"))
    if rng.random() < 0.05:
        engine.open_session(name, rng.choice((0, 60, 300)), rng.choice((0.0, 1.0)))
    elif rng.random() < 0.005:
        engine.core.close_session(name)


def drive(
    config: SchedulerConfig,
    seed: int,
    steps: int,
    overlap: bool,
    checked: bool = True,
    after_turn: Callable[[Engine], None] = lambda engine: None,
    most_turns: float = inf,
) -> Engine:
    """Sends random requests, aborts, flushes and settings to an engine. Sometimes waits until all requests end.

    Args:
        steps: number of iterations. Each sends messages and runs one iteration of the scheduler loop.
        checked: see Engine.
        after_turn: is called after each iteration.
        most_turns: no more messages are sent after this many iterations of the scheduler loop, including those while it waits.
    """
    rng, routed = random.Random(seed), random.Random(seed)
    engine = Engine(config, overlap, checked, page_moved_s=rng.choice((0.0, 0.003, 0.05)))
    engine.executor.early_s = rng.choice((0.0, EARLY_S, 10.0))
    if rng.random() < 0.5:
        engine.executor.pages_moved = lambda operation: rng.choice((len(operation.keys), rng.randrange(len(operation.keys) + 1)))
    if config.experts is not None:
        engine.control.start_expert_record()
    handle = 0
    for _ in range(steps):
        rate = rng.choice((0.0, 0.3, 0.9)) if rng.random() < 0.05 else 0.35
        while rng.random() < rate:
            prompt = random_prompt(rng)
            salt = rng.choice(("", "", "", "tenant"))
            timeout_s = rng.choice((0.0, 0.0, 0.0, 0.3))
            params = random_params(rng, len(prompt))
            more: dict[str, Any] = {"priority": rng.randrange(-2, 3), "routing_key": rng.choice(("", "a", "b"))}
            tenant = rng.choice((b"", b"", b"a", b"b"))
            more["payer"] = (tenant, rng.choice((0, 0, 1, 2)), 3.0 if tenant == b"b" else 1.0)
            if rng.random() < 0.2:
                more["prediction"] = [rng.randrange(50) for _ in range(rng.randrange(30))]
            turn = random_turn(rng, engine)
            generates = turn is None and not params.keys() & {"embedding", "score"}
            if config.experts is not None and generates and routed.random() < 0.3:
                more["routed_from"] = routed.randrange(len(prompt) + 1)
            for _ in range(rng.choice((1, 1, 1, 3)) if turn is None else 1):  # 3: requests with equal prompts
                stream = rng.random() < 0.8
                engine.submit(handle, prompt, stream=stream, salt=salt, timeout_s=timeout_s, session=turn, **more, **params)
                handle += 1
        session_traffic(rng, engine)
        if rng.random() < 0.3:
            engine.compile()
        if handle and rng.random() < 0.05:
            engine.abort(rng.randrange(max(0, handle - 12), handle))
        if rng.random() < 0.002:
            engine.control.flush_cache()
        if rng.random() < 0.002:
            engine.control.flush_tiers(rng.choice(((Tier.HOST,), (Tier.STORAGE,), (Tier.HOST, Tier.STORAGE))))
        if rng.random() < 0.01:
            engine.control.forget_salt(
                rng.choice(("", "tenant")), rng.choice(((Tier.DEVICE, Tier.HOST, Tier.STORAGE), (Tier.DEVICE,)))
            )
            engine.check()
        if rng.random() < 0.01:
            policy = rng.choice(list(SchedulePolicy)).value
            limit = rng.randrange(1, config.max_running_requests + 1)
            engine.control.retune({"schedule_policy": policy, "max_running_requests": limit, "new_token_ratio": rng.random()})
        if rng.random() < 0.01:
            engine.drain()
        engine.turn()
        after_turn(engine)
        assert engine.idle_turns < 3, "the scheduler is stuck with requests waiting"
        if engine.num_turns >= most_turns:
            break
    engine.drain()
    return engine


def check_run(engine: Engine) -> None:
    assert set(engine.finishes) == set(engine.submitted), "each request ends once"
    for handle in engine.submitted:
        engine.check_answer(handle)
    if (record := engine.control.expert_distribution()) is not None:
        assert record.rows.sum() == record.num_tokens * record.shape.ids_per_token
    memory = engine.core.memory
    assert memory.num_leased == 0 and not memory.quarantined and engine.core.settled
    assert memory.slots.num_free == engine.config.max_running_requests
    assert memory.tree.num_evictable == memory.tree.num_pages
    assert not len(engine.core.queues.gate) and not engine.core.sessions.running_turns()


EXPERTS = ExpertShape((0, 2, 3), 8, 2)


def config_of(page_size: int, pool_tokens: int, slots: int, chunk: int, **more: Any) -> SchedulerConfig:
    return deployed_config(
        num_pages=pool_tokens // page_size,
        page_size=page_size,
        context_len=CONTEXT,
        vocab_size=50,
        eos_token_ids=(3,),
        max_running_requests=slots,
        max_queued_requests=1000,
        max_prefill_tokens=64,
        page_bytes=page_size * 64,
        chunked_prefill_size=chunk,
        **more,
    )


configs = st.builds(
    config_of,
    page_size=st.sampled_from([1, 4, 16]),
    pool_tokens=st.sampled_from([96, 128, 256, 640]),
    slots=st.integers(1, 9),
    chunk=st.sampled_from([0, 16, 32]),
    enable_mixed_chunk=st.booleans(),
    enable_radix_cache=st.booleans(),
    retract_interval=st.sampled_from([0, 0, 1, 5]),
    waiting_timeout_s=st.sampled_from([0.0, 0.0, 0.3]),
    running_timeout_s=st.sampled_from([0.0, 0.0, 0.3]),
    schedule_conservativeness=st.sampled_from([0.3, 1.0]),
    schedule_policy=st.sampled_from(SchedulePolicy),
    eviction_policy=st.sampled_from(EvictionPolicy),
    enable_priority_scheduling=st.booleans(),
    schedule_low_priority_values_first=st.booleans(),
    priority_preemption_threshold=st.integers(0, 2),
    graph_rows=st.sampled_from([0, 0, 4, 12]),
    graph_rereads=st.sampled_from([20, 1000]),
    eager_step_cost=st.sampled_from([0.1, 9.0]),
    max_drafts=st.sampled_from([0, 1, 3, 7]),
    drafts_by_model=st.booleans(),
    adaptive_chunk_rows=st.sampled_from([0, 1, 64]),
    adaptive_chunk_s=st.sampled_from([0.0, 0.0, 1e-4, 0.02]),
    max_extend_steps=st.integers(0, 2),
    prefill_max_requests=st.integers(0, 2),
    max_prompt_logprob_tokens=st.sampled_from([16, 4096]),
    pooling_reuses_prefix=st.booleans(),
    max_sessions=st.integers(1, 3),
    host_pages=st.sampled_from([0, 6, 40, 400]),
    hicache_salt_quota=st.sampled_from([0.0, 2e-6]),
    hicache_storage_salt_quota=st.sampled_from([0.0, 2e-6]),
    has_storage=st.booleans(),
    hicache_write_policy=st.sampled_from(WritePolicy),
    experts=st.sampled_from([None, EXPERTS]),
)


# In the example with this configuration, two loads run. The later load writes to a page that the earlier load has written to,
# because the page was evicted in between.
REUSED_LOADS = config_of(
    page_size=4,
    pool_tokens=96,
    slots=2,
    chunk=16,
    enable_mixed_chunk=True,
    retract_interval=1,
    schedule_policy=SchedulePolicy.DFS_WEIGHT,
    eviction_policy=EvictionPolicy.LFU,
    schedule_low_priority_values_first=True,
    priority_preemption_threshold=1,
    max_drafts=1,
    drafts_by_model=True,
    adaptive_chunk_rows=1,
    adaptive_chunk_s=1e-4,
    prefill_max_requests=1,
    max_prompt_logprob_tokens=16,
    max_sessions=3,
    host_pages=400,
    hicache_storage_salt_quota=2e-6,
    has_storage=True,
    hicache_write_policy=WritePolicy.WRITE_BACK,
)


@settings(max_examples=32 if NIGHTLY else 8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(config=REUSED_LOADS, seed=497727636, overlap=True)
@given(config=configs, seed=st.integers(0, 2**32), overlap=st.booleans())
def test_scheduler_gives_each_output_once_and_leaks_no_page(config: SchedulerConfig, seed: int, overlap: bool) -> None:
    check_run(drive(config, seed, 120, overlap))


@settings(max_examples=12 if NIGHTLY else 4, deadline=None)
@given(config=configs, seed=st.integers(0, 2**32), overlap=st.booleans())
def test_scheduler_gives_the_same_plans_for_the_same_calls(config: SchedulerConfig, seed: int, overlap: bool) -> None:
    first, second = (drive(config, seed, 80, overlap, checked=False) for _ in range(2))
    assert [repr(plan) for plan in first.plans] == [repr(plan) for plan in second.plans]
    assert repr(first.finishes) == repr(second.finishes)


@pytest.mark.by_day(one_in=2, seed=16)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_small_pool_aborts_only_the_requests_that_do_not_fit(page_size: int, overlap: bool) -> None:
    engine = Engine(config_of(page_size, 64, 4, 16), overlap)
    engine.submit(0, [40] * 20, max_new_tokens=70, ignore_eos=True)
    for handle in range(1, 6):
        engine.submit(handle, [handle] * 10, max_new_tokens=8, ignore_eos=True)
    engine.submit(6, [41] * 70, max_new_tokens=4)
    engine.drain()
    assert engine.finishes[0].error is ErrorCode.OUT_OF_MEMORY
    assert "64 tokens" in engine.finishes[0].message
    assert engine.finishes[6].error is ErrorCode.OUT_OF_MEMORY
    for handle in range(1, 6):
        assert engine.finishes[handle].reason is FinishReason.LENGTH
    check_run(engine)
