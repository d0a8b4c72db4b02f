"""Rules of the admission gates: the requests that they hold, the length of the wait, and the effect on other requests."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rootstock_llm.services.worker.core.contracts.config import EvictionPolicy, SchedulePolicy, SchedulerConfig
from rootstock_llm.services.worker.core.contracts.messages import ErrorCode, FinishReason
from rootstock_llm.services.worker.core.requests.request import Phase
from tests.all_pairs import each_value
from tests.core.harness import Engine
from tests.core.test_scheduler_basic import make
from tests.core.test_scheduler_properties import CONTEXT, check_run, config_of

MAX_PASSES = 8  # a wait ends after this many passes in which no further part of the shared prefix was computed


def wide(overlap: bool = True, **changes: Any) -> Engine:
    values: dict[str, Any] = {"num_pages": 2048, "max_running_requests": 64, "chunked_prefill_size": 8192, "context_len": 1024}
    return make(overlap, **{**values, **changes})


def prompt(prefix: int, tail: int, shared: int = 64) -> list[int]:
    return [prefix] * shared + [500 + tail] * 16


def admitted(engine: Engine) -> list[list[int]]:
    """Returns the handles of the requests that begin in each plan. A prompt ends with 500 + its request's handle."""
    out = []
    for plan in engine.plans:
        ends = plan.num_tokens[: plan.num_extend].cumsum() - 1
        slots = {params.slot for params in plan.admitted}
        rows = zip(plan.slots.tolist(), plan.input_ids[ends].tolist(), strict=False)
        out.append([token - 500 for slot, token in rows if slot in slots])
    return out


class TestPrefixGate:
    @pytest.mark.by_day(one_in=3, seed=20)
    @each_value(policy=list(SchedulePolicy), overlap=[True, False])
    def test_prefix_gate_admits_pairs_with_a_shared_prefix_within_three_steps(
        self, overlap: bool, policy: SchedulePolicy
    ) -> None:
        engine = wide(overlap, schedule_policy=policy)
        for handle in range(40):
            engine.submit(handle, prompt(handle // 2, handle), max_new_tokens=40, ignore_eos=True)
        for _ in range(3):
            engine.turn()
        assert [len(handles) for handles in admitted(engine)] in ([20, 0, 20], [20, 20, 0])
        engine.drain()
        assert [engine.finishes[handle].cached_tokens for handle in range(40)].count(64) == 20
        check_run(engine)

    def test_prefix_gate_admits_requests_behind_a_blocked_request(self) -> None:
        engine = wide()
        for handle, prefix in enumerate((1, 1, 2, 1, 3)):
            engine.submit(handle, prompt(prefix, handle), max_new_tokens=4, ignore_eos=True)
        engine.turn()
        assert admitted(engine) == [[0, 2, 4]]

    @pytest.mark.parametrize("end", ["abort", "retract"])
    def test_prefix_gate_ends_the_wait_when_the_awaited_request_is_aborted_or_retracted(self, end: str) -> None:
        engine = wide()
        for handle in range(2):
            engine.submit(handle, prompt(1, handle), max_new_tokens=4, ignore_eos=True)
        engine.turn()
        queues = engine.core.queues
        first, second = queues.by_key[0, 0], queues.by_key[0, 1]
        assert second.blocked_tokens
        if end == "abort":
            engine.abort(0)
        else:
            engine.core.lifecycle.retract(first, 1, 1)
            engine.check()
        engine.turn()
        begun = [second] if end == "abort" else [first, second]
        assert any(request.kv.lease is not None for request in begun)
        engine.drain()
        for handle in engine.finishes:
            engine.check_answer(handle)

    def test_prefix_gate_ends_the_wait_when_the_shared_prefix_is_computed(self) -> None:
        """A prompt of 160 tokens has chunks of 64. The second prompt shares 112 tokens, which are in the first two chunks."""
        engine = wide(chunked_prefill_size=64, max_extend_steps=0)
        engine.submit(0, [1] * 112 + [2] * 47 + [500], max_new_tokens=4, ignore_eos=True)
        engine.turn()
        engine.submit(1, [1] * 112 + [3] * 7 + [501], max_new_tokens=4, ignore_eos=True)
        engine.drain()
        assert admitted(engine)[:4] == [[-499], [], [], [1]]
        assert engine.finishes[1].cached_tokens == 112
        check_run(engine)

    def test_prefix_gate_ends_the_wait_after_eight_passes_without_progress(self) -> None:
        """More urgent requests with the same prefix arrive repeatedly and are aborted before the commit of their step."""
        engine = wide(enable_priority_scheduling=True)
        engine.submit(1000, prompt(1, 0), max_new_tokens=4, ignore_eos=True)
        waiting = engine.core.queues.by_key[0, 1000]
        passes = 0
        while waiting.kv.lease is None and passes < 3 * MAX_PASSES:
            engine.submit(passes, prompt(1, 1 + passes), priority=1, max_new_tokens=4, ignore_eos=True)
            engine.turn()
            engine.abort(passes)
            passes += 1
        assert passes == MAX_PASSES + 1
        engine.drain()
        check_run(engine)

    def test_prefix_gate_forgets_an_aborted_request(self) -> None:
        engine = wide()
        for handle in range(3):
            engine.submit(handle, prompt(1, handle), max_new_tokens=4, ignore_eos=True)
        engine.turn()
        assert engine.core.queues.waiting.num_blocked == 2
        engine.abort(1)
        assert engine.core.queues.waiting.num_blocked == 1
        engine.drain()
        assert engine.core.queues.waiting.num_blocked == 0
        check_run(engine)

    @pytest.mark.by_day(one_in=2)
    @pytest.mark.parametrize("eviction", [EvictionPolicy.LRU, EvictionPolicy.LFU])
    def test_prefix_gate_leaves_the_tree_unchanged(self, eviction: EvictionPolicy) -> None:
        """The gate's look-ups split no node, although their hits end within a node."""
        engine = wide(eviction_policy=eviction, max_extend_steps=0)
        engine.submit(0, [1] * 40 + [2] * 40, max_new_tokens=1)
        engine.drain()
        engine.submit(1, [1] * 40 + [3] * 80, max_new_tokens=4, ignore_eos=True)
        engine.turn()
        nodes = engine.core.memory.tree.nodes()
        before = [(node, node.stamp, node.hits, len(node.pages)) for node in nodes]
        for handle in range(2, 6):
            engine.submit(handle, [1] * 40 + [3] * 60 + [handle] * 8, max_new_tokens=4, ignore_eos=True)
        engine.core.plan(engine.now)
        assert engine.core.queues.waiting.num_blocked == 4
        nodes = engine.core.memory.tree.nodes()
        assert [(node, node.stamp, node.hits, len(node.pages)) for node in nodes] == before


class TestWaitBehindALaterRequest:
    """Request 1 waits for the prefix of request 0. Request 2, which has many chunks, begins during this wait."""

    @staticmethod
    def start(**changes: Any) -> Engine:
        engine = wide(chunked_prefill_size=128, adaptive_chunk_rows=0, max_extend_steps=0, **changes)
        for handle in range(2):
            engine.submit(handle, prompt(1, handle), max_new_tokens=4, ignore_eos=True)
        engine.submit(2, [2] * 600, max_new_tokens=4, ignore_eos=True)
        for _ in range(3):
            engine.turn()
        return engine

    def test_request_runs_before_the_next_chunk_of_a_later_request_when_the_wait_ends(self) -> None:
        engine = self.start()
        plan = engine.plans[2]
        assert plan.num_tokens.tolist()[: plan.num_extend] == [16, 112]
        assert engine.core.queues.by_key[0, 1].phase is Phase.DECODE
        engine.drain()
        assert engine.finishes[1].cached_tokens == 64
        check_run(engine)

    def test_request_waits_when_an_unfinished_prompt_needs_the_pages(self) -> None:
        engine = self.start(num_pages=174)
        assert engine.core.queues.by_key[0, 1].phase is Phase.WAITING
        engine.drain()
        assert engine.core.stats().retractions_total == 0
        check_run(engine)

    @pytest.mark.parametrize("tail", [4, 40])
    def test_request_waits_for_a_second_shared_prefix_after_the_first_is_computed(self, tail: int) -> None:
        """Requests 0, 1 and 2 share 64 tokens, and requests 1 and 2 share 128.

        Request 2 waits for request 0, then for request 1. Request 3 extends during both waits.
        """
        engine = wide(chunked_prefill_size=128, adaptive_chunk_rows=0)
        first, second = [1] * 64, [1] * 64 + [3] * 64
        for handle, ids in enumerate([first + [5] * 40, second + [6] * 2, second + [7] * tail, [2] * 700]):
            engine.submit(handle, ids, max_new_tokens=4, ignore_eos=True)
        engine.drain()
        assert engine.finishes[2].cached_tokens == 128
        check_run(engine)

    @pytest.mark.parametrize("overlap", [False, True])
    def test_request_waits_for_a_longer_prefix_of_a_request_admitted_in_the_same_pass(self, overlap: bool) -> None:
        """Request 2 stops waiting for request 0 in the pass that admits request 1, with which it shares 464 tokens."""
        engine = wide(overlap, chunked_prefill_size=128, adaptive_chunk_rows=0, max_extend_steps=1)
        shared = [1] * 64 + [3] * 400
        for handle, ids in enumerate([[1] * 64 + [5] * 40, shared + [6] * 2, shared + [7] * 2, [2] * 700]):
            engine.submit(handle, ids, max_new_tokens=4, ignore_eos=True)
        engine.drain()
        assert 464 - engine.finishes[2].cached_tokens < 32, "the request waits unless fewer than 32 shared tokens are uncached"
        check_run(engine)


class TestMemoryOfAHeldRequest:
    """Request 1 waits for the prefix of request 0. Both are urgent.

    The less urgent request 2 must leave the memory that request 1 needs.
    """

    @staticmethod
    def start(**changes: Any) -> Engine:
        engine = wide(enable_priority_scheduling=True, priority_preemption_threshold=100, **changes)
        for handle in range(2):
            engine.submit(handle, prompt(1, handle), priority=5, max_new_tokens=40, ignore_eos=True)
        engine.submit(2, prompt(2, 2), priority=0, max_new_tokens=40, ignore_eos=True)
        for _ in range(3):
            engine.turn()
        return engine

    @pytest.mark.parametrize("changes", [{"max_running_requests": 2}, {"num_pages": 70}], ids=["slots", "pages"])
    def test_less_urgent_request_leaves_memory_for_a_blocked_request(self, changes: dict[str, int]) -> None:
        engine = self.start(**changes)
        assert admitted(engine) == [[0], [], [1]]
        engine.drain()
        check_run(engine)

    @pytest.mark.parametrize("changes", [{"max_running_requests": 3}, {"num_pages": 110}], ids=["slots", "pages"])
    def test_less_urgent_request_uses_memory_that_a_blocked_request_does_not_need(self, changes: dict[str, int]) -> None:
        engine = self.start(**changes)
        assert admitted(engine) == [[0, 2], [], [1]]
        engine.drain()
        check_run(engine)

    def test_blocked_request_preempts_no_running_request(self) -> None:
        engine = wide(enable_priority_scheduling=True, max_running_requests=2)
        engine.submit(2, prompt(2, 2), max_new_tokens=40, ignore_eos=True)
        for _ in range(4):
            engine.turn()
        for handle in range(2):
            engine.submit(handle, prompt(1, handle), priority=5, max_new_tokens=40, ignore_eos=True)
        engine.turn()
        engine.turn()
        assert engine.core.stats().preemptions_total == 0
        engine.turn()
        assert engine.core.stats().preemptions_total == 1
        engine.drain()
        check_run(engine)


class TestPoolGate:
    def test_pool_gate_rejects_a_request_larger_than_the_pool(self) -> None:
        engine = make(num_pages=8, max_running_requests=2)
        engine.submit(0, [1] * 8, max_new_tokens=100, ignore_eos=True)
        engine.submit(1, [2] * 8, max_new_tokens=2, ignore_eos=True)
        engine.drain()
        assert engine.finishes[0].error is ErrorCode.OUT_OF_MEMORY
        assert engine.finishes[1].reason is FinishReason.LENGTH


roomy = st.builds(
    config_of,
    page_size=st.sampled_from([1, 4, 16]),
    pool_tokens=st.sampled_from([256, 640]),
    slots=st.integers(2, 9),
    chunk=st.sampled_from([0, 64]),
    enable_mixed_chunk=st.booleans(),
    schedule_policy=st.sampled_from(SchedulePolicy),
    enable_priority_scheduling=st.just(True),
    priority_preemption_threshold=st.sampled_from([0, 100]),
)


def watch(engine: Engine) -> None:
    """Makes the engine check after each pass for how many passes each request is held.

    The limit is MAX_PASSES passes after the request's prefix hit has last become longer. One plan may have two passes.
    """
    core, gate = engine.core, engine.core.planner.extends._prefixes
    ended, seen = gate.end_pass, dict[int, tuple[int, int]]()  # by request: longest hit in tokens, passes since the hit

    def look() -> None:
        ended()
        for request in core.queues.waiting:
            if not request.blocked_tokens:
                continue
            hit = core.memory.peek(request.namespace, request.kv.token_key, request.prefix_limit())[1]
            most, waited = seen.get(request.seq, (-1, 0))
            seen[request.seq] = (hit, 1) if hit > most else (most, waited + 1)
            assert seen[request.seq][1] <= MAX_PASSES, (
                f"request {request.request_id} is held for more than {MAX_PASSES} passes without a longer hit"
            )

    gate.end_pass = look


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=roomy, seed=st.integers(0, 2**32), overlap=st.booleans(), aborts=st.sampled_from([0.8, 1.0]))
def test_prefix_gate_skips_a_request_at_most_eight_times_without_progress(
    config: SchedulerConfig, seed: int, overlap: bool, aborts: float
) -> None:
    """Urgent requests with a shared prefix arrive repeatedly.

    A request is aborted with the probability `aborts` before its prefix is computed.
    """
    rng = random.Random(seed)
    engine = Engine(config, overlap)
    watch(engine)
    for turn in range(40):
        for handle in [3 * turn, *((3 * turn + 1, 3 * turn + 2) if turn % 16 == 0 else ())]:
            urgent = handle == 3 * turn
            body = [rng.random() < 0.05] * rng.choice((40, 56)) + [rng.randrange(50) for _ in range(rng.randrange(8))]
            engine.submit(handle, body, priority=turn * urgent, max_new_tokens=rng.randrange(1, CONTEXT - len(body)))
        engine.turn()
        if rng.random() < aborts:
            engine.abort(3 * turn)
    engine.drain()
    check_run(engine)
