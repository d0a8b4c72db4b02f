"""Rules for the order of prompt tokens of several tenants or batches (docs/design/scheduler.md#fairness-between-flows)."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootstock_llm.services.worker.core.contracts.config import SchedulePolicy, SchedulerConfig
from rootstock_llm.services.worker.core.requests.shares import MAX_TENANTS, Shares
from tests.all_pairs import each_pair
from tests.core.deployed_config import deployed_config
from tests.core.harness import Engine

CHUNK = 64


def config_of(policy: SchedulePolicy = SchedulePolicy.FCFS, **more: object) -> SchedulerConfig:
    sizes = {"chunked_prefill_size": CHUNK, "adaptive_chunk_rows": 0, "max_running_requests": 64, "max_queued_requests": 500}
    return deployed_config(4096, 4, 1024, 1000, **{"schedule_policy": policy, **sizes, **more})


def prompt(handle: int, length: int) -> list[int]:
    """Returns a prompt that shares no prefix with prompts of other handles, unless the handles differ by a multiple of 1,000."""
    return [handle % 1000] * length


def prefill_of(engine: Engine, step: int) -> dict[int, int]:
    """Returns the number of prompt tokens that a step computes, by slot."""
    plan = engine.plans[step]
    return dict(zip(plan.slots[: plan.num_extend].tolist(), plan.num_tokens[: plan.num_extend].tolist(), strict=True))


def chunks_until_first_token(engine: Engine, handle: int) -> int:
    """Runs loop iterations up to the one that plans the request's last prompt token. Returns the number of earlier iterations."""
    for count in range(200):
        engine.turn()
        request = engine.core.queues.by_key.get((0, handle))
        if request is None or request.flow is None:
            return count
    raise AssertionError("the request got no step")


class TestOrder:
    @pytest.mark.by_day(one_in=2, seed=2)
    @each_pair(
        batch=[(b"a", 1), (b"a", 0), (b"", 1)],
        policy=[SchedulePolicy.FCFS, SchedulePolicy.LPM, SchedulePolicy.LOF],
        overlap=[True, False],
        length=[CHUNK * 2, CHUNK * 12],
    )
    def test_request_waits_for_at_most_two_chunks_of_another_flow(
        self, batch: tuple[bytes, int], policy: SchedulePolicy, overlap: bool, length: int
    ) -> None:
        """Checks that a request waits for at most two chunks of the other flow.

        1. The step in flight has a chunk of the other flow.
        2. The next step is planned during that step. It has another such chunk if the request's own flow was served just before.
        """
        engine = Engine(config_of(policy), overlap)
        for handle in range(20):
            engine.submit(handle, prompt(handle, length), payer=(*batch, 1.0), max_new_tokens=4)
        for _ in range(3):
            engine.turn()
        for handle in (100, 101):
            payer = (b"b", 0, 1.0) if batch[0] else (b"", 0, 1.0)
            engine.submit(handle, prompt(handle, 20), payer=payer, max_new_tokens=4)
            assert chunks_until_first_token(engine, handle) <= handle - 100
        engine.drain()
        assert len(engine.finishes) == 22
        for handle in engine.finishes:
            engine.check_answer(handle)

    def test_single_flow_gets_the_same_plans_as_without_shares(self) -> None:
        def plans(payer: tuple[bytes, int, float]) -> list[tuple[list[int], list[int]]]:
            engine = Engine(config_of())
            for handle in range(12):
                engine.submit(handle, prompt(handle, 150), payer=payer, max_new_tokens=3)
            engine.drain()
            return [(plan.slots.tolist(), plan.num_tokens.tolist()) for plan in engine.plans]

        assert plans((b"", 0, 1.0)) == plans((b"a", 7, 3.0))

    def test_earlier_service_without_competition_does_not_delay_a_tenant(self) -> None:
        engine = Engine(config_of())
        for handle in range(10):
            engine.submit(handle, prompt(handle, CHUNK * 8), payer=(b"a", 0, 1.0), max_new_tokens=1)
            engine.drain()
        for handle in (20, 21, 22, 23):  # both tenants send the same number of prompt tokens from here on
            engine.submit(handle, prompt(handle, CHUNK * 4), payer=(b"ab"[handle % 2 :][:1], 0, 1.0), max_new_tokens=1)
        before = len(engine.plans)
        engine.drain()
        order = [sorted(prefill_of(engine, step)) for step in range(before, len(engine.plans))]
        first_eight = order[:8]
        assert len({tuple(slots) for slots in first_eight}) >= 2, "both tenants get chunks in the first eight steps"

    @pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 0.25)], ids=str)
    def test_shares_follow_the_weights(self, weights: tuple[float, float]) -> None:
        engine = Engine(config_of(max_running_requests=16))
        owner: dict[int, int] = {}
        for handle in range(120):
            engine.submit(handle, prompt(handle, 96), payer=(b"ab"[handle % 2 :][:1], 0, weights[handle % 2]), max_new_tokens=1)
        served = [0, 0]
        for _ in range(40):
            engine.turn()
            for request in engine.core.queues.by_key.values():
                if request.kv.lease is not None:
                    owner[request.kv.lease.slot] = request.handle % 2
            for slot, count in prefill_of(engine, -1).items():
                served[owner[slot]] += count
        assert abs(served[0] / weights[0] - served[1] / weights[1]) <= 2 * CHUNK / min(weights)
        engine.drain()

    def test_new_batches_do_not_delay_an_older_batch(self) -> None:
        engine = Engine(config_of())
        for handle in range(8):
            engine.submit(handle, prompt(handle, CHUNK * 2), payer=(b"a", 1, 1.0), max_new_tokens=1)
        for turn in range(60):
            for handle in (1000 + 2 * turn, 1001 + 2 * turn):
                engine.submit(handle, prompt(handle, CHUNK), payer=(b"a", handle, 1.0), max_new_tokens=1)
            engine.turn()
        assert sum(handle in engine.finishes for handle in range(8)) >= 3, (
            "the old batch gets its share although batches keep arriving"
        )
        engine.drain(400)

    def test_priority_has_precedence_over_shares(self) -> None:
        engine = Engine(config_of(enable_priority_scheduling=True, priority_preemption_threshold=100))
        engine.submit(0, prompt(0, CHUNK * 4), payer=(b"a", 0, 1.0), priority=5, max_new_tokens=1)
        engine.turn()
        engine.submit(1, prompt(1, 20), payer=(b"b", 0, 1.0), priority=0, max_new_tokens=1)
        assert chunks_until_first_token(engine, 1) >= 3
        engine.drain()

    def test_unused_rest_of_a_step_goes_to_the_next_flow(self) -> None:
        """Each prompt of one tenant is four tokens longer than a chunk.

        The step with these four tokens therefore has space for the next flow.
        """
        engine = Engine(config_of(), checked=False)
        shares = engine.core.queues.shares
        for handle in range(30):
            engine.submit(handle, prompt(handle, CHUNK + 4), payer=(b"small", 0, 4.0), max_new_tokens=1)
        for handle in range(100, 104):
            engine.submit(handle, prompt(handle, 900), payer=(b"long", handle, 1.0), max_new_tokens=1)
        for _ in range(30):
            engine.turn()
            starts = {each.name: each.start for each in shares._tenants.values()}
            assert abs(starts[b"long"] - starts[b"small"]) <= CHUNK
        engine.drain(400)

    def test_new_flow_clears_the_batch_is_full_flag(self) -> None:
        """The request of the new flow is small and fits, although the request before it did not."""
        engine = Engine(config_of(max_running_requests=8))
        engine.submit(0, prompt(0, 900), payer=(b"a", 0, 1.0), max_new_tokens=60, ignore_eos=True)
        engine.submit(1, prompt(1, 900), payer=(b"a", 0, 1.0), max_new_tokens=60, ignore_eos=True)
        for _ in range(40):
            engine.turn()
        for handle in range(2, 6):
            engine.submit(handle, prompt(handle, 900), payer=(b"a", 0, 1.0), max_new_tokens=60, ignore_eos=True)
        for _ in range(60):
            engine.turn()
        engine.submit(10, prompt(10, 8), payer=(b"b", 0, 1.0), max_new_tokens=2, ignore_eos=True)
        assert chunks_until_first_token(engine, 10) == 0
        engine.drain()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), overlap=st.booleans())
def test_shares_of_waiting_tenants_differ_by_at_most_a_chunk_and_a_page(seed: int, overlap: bool) -> None:
    """Lengths, batches and weights are random.

    The shares stay close, because the tenant with the lowest virtual start is served next.
    """
    rng = random.Random(seed)
    engine = Engine(config_of(max_running_requests=32), overlap, checked=False)
    weights = {b"a": rng.choice((0.5, 1.0, 2.0)), b"b": 1.0, b"c": rng.choice((1.0, 4.0))}
    handle = 0
    shares = engine.core.queues.shares
    for _ in range(60):
        for tenant, weight in weights.items():
            while sum(r.payer[0] == tenant for r in engine.core.queues.waiting) < 4:
                handle += 1
                payer = (tenant, rng.choice((0, 0, handle % 7 + 1)), weight)
                engine.submit(handle, prompt(handle, rng.randrange(1, 300)), payer=payer, max_new_tokens=1)
        engine.turn()
        starts = [each.start for each in shares._tenants.values()]
        assert max(starts) - min(starts) <= (CHUNK + engine.core.config.page_size) / min(weights.values())
    engine.drain()


class TestBookkeeping:
    def test_shares_forget_only_tenants_without_requests(self) -> None:
        shares = Shares()
        kept = shares.enter((b"kept", 0, 0), 1.0)
        shares.charge(kept, 500)
        for number in range(2 * MAX_TENANTS):
            shares.leave(shares.enter((b"%d" % number, 0, 0), 1.0))
            assert len(shares._tenants) <= MAX_TENANTS
        assert shares.pending() == {(b"kept", 0, 0): 1} and shares.enter((b"kept", 0, 0), 1.0) is kept

    def test_idle_tenant_accumulates_no_share(self) -> None:
        shares = Shares()
        early = shares.enter((b"early", 0, 0), 1.0)
        shares.leave(early)
        busy = shares.enter((b"busy", 0, 0), 1.0)
        for _ in range(100):
            shares.charge(busy, 10)
        shares.enter((b"early", 0, 0), 1.0)
        assert busy.tenant.start - early.tenant.start == 10, (
            "an idle tenant returns with an advantage of one planned chunk, 10 tokens, however long it was idle"
        )
