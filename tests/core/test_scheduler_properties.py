"""Random messages through the core with tiny pools: CORE.md, "tests that hold this page"."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.core.config import SchedulerConfig
from services.worker.core.messages import ErrorCode, FinishReason
from tests.core.harness import Engine

CONTEXT = 96


def random_prompt(rng: random.Random) -> list[int]:
    """Few distinct beginnings, so that prefixes are shared, split and published twice."""
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
    return params


def drive(config: SchedulerConfig, seed: int, steps: int, overlap: bool) -> Engine:
    """`steps` turns with requests coming, being aborted in every phase, and pauses in which all drains."""
    rng = random.Random(seed)
    engine = Engine(config, overlap)
    handle = 0
    for _ in range(steps):
        rate = rng.choice((0.0, 0.3, 0.9)) if rng.random() < 0.05 else 0.35
        while rng.random() < rate:
            prompt = random_prompt(rng)
            salt = rng.choice(("", "", "", "tenant"))
            timeout_s = rng.choice((0.0, 0.0, 0.0, 0.3))
            params = random_params(rng, len(prompt))
            engine.submit(handle, prompt, stream=rng.random() < 0.8, salt=salt, timeout_s=timeout_s, **params)
            handle += 1
        if handle and rng.random() < 0.05:
            engine.abort(rng.randrange(max(0, handle - 12), handle))
        if rng.random() < 0.002:
            engine.core.flush_cache()
        if rng.random() < 0.01:
            engine.drain()
        engine.turn()
        assert engine.idle_turns < 3, "the scheduler is stuck with requests waiting"
    engine.drain()
    return engine


def check_run(engine: Engine) -> None:
    assert set(engine.finishes) == set(engine.submitted), "each request ends once"
    for handle in engine.submitted:
        engine.check_answer(handle)
    memory = engine.core.table.memory
    assert memory.num_leased == 0
    assert memory.slots.num_free == engine.config.max_running_requests
    assert memory.tree.num_evictable == memory.tree.num_pages


def config_of(page_size: int, pool_tokens: int, slots: int, chunk: int, **more: Any) -> SchedulerConfig:
    return SchedulerConfig(
        num_pages=pool_tokens // page_size,
        page_size=page_size,
        context_len=CONTEXT,
        vocab_size=50,
        eos_token_ids=(3,),
        max_running_requests=slots,
        max_queued_requests=1000,
        max_prefill_tokens=64,
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
)


@settings(max_examples=16, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=configs, seed=st.integers(0, 2**32), overlap=st.booleans())
def test_every_request_gets_its_answer_once_and_nothing_leaks(config: SchedulerConfig, seed: int, overlap: bool) -> None:
    check_run(drive(config, seed, 120, overlap))


@settings(max_examples=6, deadline=None)
@given(config=configs, seed=st.integers(0, 2**32), overlap=st.booleans())
def test_the_same_log_gives_the_same_plans(config: SchedulerConfig, seed: int, overlap: bool) -> None:
    first, second = drive(config, seed, 80, overlap), drive(config, seed, 80, overlap)
    assert [repr(plan) for plan in first.plans] == [repr(plan) for plan in second.plans]
    assert first.finishes == second.finishes


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_pool_too_small_for_one_request_aborts_that_request_alone(page_size: int, overlap: bool) -> None:
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
