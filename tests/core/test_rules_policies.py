"""Rules for the order of waiting requests by policy, with SGLang's thresholds (docs/design/scheduler.md#policies)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rootstock_llm.services.worker.core.contracts.config import SchedulePolicy, SchedulerConfig
from rootstock_llm.services.worker.core.contracts.messages import Submit
from rootstock_llm.services.worker.core.contracts.plan import SamplingParams
from rootstock_llm.services.worker.core.requests.request import Request, make_request
from rootstock_llm.services.worker.core.requests.shares import Shares
from rootstock_llm.services.worker.core.requests.waiting_queue import WaitingQueue, effective_policy, service_order
from rootstock_llm.services.worker.core.scheduler import configured_memory
from tests.all_pairs import each_value
from tests.core.deployed_config import deployed_config
from tests.core.test_scheduler_basic import make


def config_of(policy: SchedulePolicy, **more: object) -> SchedulerConfig:
    return deployed_config(4096, 1, 512, 1000, schedule_policy=policy, **more)


class Line:
    """A waiting queue and a cache, with requests named by arrival: 0, 1, 2."""

    def __init__(self, policy: SchedulePolicy, **more: object) -> None:
        self.config = config_of(policy, **more)
        self.memory = configured_memory(self.config)
        self.queue, self.shares = WaitingQueue(), Shares()
        self.arrived = 0

    def cache(self, tokens: Sequence[int], salt: str = "") -> None:
        request = self.request(tokens, salt=salt)
        tree = self.memory.tree
        tree.insert(tree.root(request.namespace), request.kv.token_key, self.memory.pages.alloc(len(tokens)))

    def request(self, tokens: Sequence[int], max_new: int = 8, priority: int = 0, salt: str = "", key: str = "") -> Request:
        params = SamplingParams(max_new)
        ids = np.array(tokens, dtype=np.int32)
        message = Submit(0, self.arrived, "", ids, params, salt=salt, priority=priority, routing_key=key)
        request = make_request(message, self.arrived, self.config, 0.0)
        request.flow = self.shares.enter(request.payer, request.weight)
        return request

    def wait(self, tokens: Sequence[int] = (1, 2, 3), max_new: int = 8, priority: int = 0, salt: str = "", key: str = "") -> None:
        self.queue.add(self.request(tokens, max_new, priority, salt, key))
        self.arrived += 1

    def order(self, running: Sequence[Request] = (), seed: int = 0) -> list[int]:
        out = []
        for request in service_order(self.config, self.queue, running, self.memory, np.random.default_rng(seed), False):
            self.queue.remove(request)
            out.append(request.seq)
        return out


def prompt(first: int, length: int, tail: int = 0) -> list[int]:
    """Returns `length` times the token `first`, then 20 equal tokens that depend on `tail`."""
    return [first] * length + [900 + tail] * 20


class TestFirstComeFirstServed:
    def test_fcfs_orders_requests_by_arrival(self) -> None:
        line = Line(SchedulePolicy.FCFS)
        line.cache(prompt(3, 100))
        for first in (1, 2, 3, 4):
            line.wait(prompt(first, 100))
        assert line.order() == [0, 1, 2, 3]


class TestLongestPrefixMatch:
    def test_lpm_orders_requests_by_cached_prefix_and_then_by_arrival(self) -> None:
        line = Line(SchedulePolicy.LPM)
        for first, length in ((1, 40), (2, 60), (3, 50)):
            line.cache(prompt(first, length)[:length])
        for first in (9, 1, 2, 3, 8):
            line.wait(prompt(first, 60))
        assert line.order() == [2, 3, 1, 0, 4]

    @pytest.mark.parametrize(("waiting", "policy"), [(128, SchedulePolicy.LPM), (129, SchedulePolicy.FCFS)])
    def test_lpm_orders_requests_by_arrival_when_more_than_128_requests_wait(self, waiting: int, policy: SchedulePolicy) -> None:
        line = Line(SchedulePolicy.LPM)
        line.cache([7] * 40)
        for _ in range(waiting - 1):
            line.wait([1])
        line.wait([7] * 41)
        assert effective_policy(line.config, waiting) is policy
        assert line.order()[0] == (waiting - 1 if policy is SchedulePolicy.LPM else 0)

    @pytest.mark.parametrize("policy", [SchedulePolicy.LPM, SchedulePolicy.DFS_WEIGHT])
    def test_prefix_policies_order_requests_by_arrival_when_the_cache_is_off(self, policy: SchedulePolicy) -> None:
        assert effective_policy(config_of(policy, enable_radix_cache=False), 5) is SchedulePolicy.FCFS

    @pytest.mark.parametrize("policy", [SchedulePolicy.DFS_WEIGHT, SchedulePolicy.RANDOM])
    def test_dfs_weight_and_random_policies_apply_to_a_queue_of_any_length(self, policy: SchedulePolicy) -> None:
        assert effective_policy(config_of(policy), 100_000) is policy


class TestInBatchPrefixCaching:
    """If several waiting requests share an uncached prefix, one computes it. The others wait and then find it cached."""

    @pytest.mark.parametrize(("shared", "order"), [(31, [0, 1, 2]), (32, [0, 2, 1])])
    def test_lpm_delays_a_request_that_shares_32_tokens_with_an_earlier_request(self, shared: int, order: list[int]) -> None:
        line = Line(SchedulePolicy.LPM)
        line.wait(prompt(1, shared, tail=1))
        line.wait(prompt(1, shared, tail=2))
        line.wait(prompt(2, shared, tail=3))
        assert line.order() == order

    @pytest.mark.parametrize(("cached", "order"), [(32, [0, 2, 1]), (33, [0, 1, 2])])
    def test_lpm_delays_only_requests_with_at_most_32_cached_tokens(self, cached: int, order: list[int]) -> None:
        line = Line(SchedulePolicy.LPM)
        line.cache([1] * cached)
        line.wait(prompt(1, 64, tail=1))
        line.wait(prompt(1, 64, tail=2))
        line.wait(prompt(2, 64, tail=3))
        assert line.order() == order

    def test_lpm_compares_only_requests_of_one_namespace(self) -> None:
        line = Line(SchedulePolicy.LPM)
        line.wait(prompt(1, 64))
        line.wait(prompt(1, 64), salt="tenant")
        line.wait(prompt(2, 64))
        assert line.order() == [0, 1, 2]

    def test_dfs_weight_delays_requests_that_share_a_prefix(self) -> None:
        line = Line(SchedulePolicy.DFS_WEIGHT)
        line.cache([1] * 8)
        line.wait(prompt(1, 64, tail=1))
        line.wait(prompt(1, 64, tail=2))
        line.wait(prompt(1, 8, tail=3))
        assert line.order() == [0, 2, 1]

    @pytest.mark.by_day(one_in=6, seed=2)
    @each_value(policy=list(SchedulePolicy), overlap=[False, True])
    def test_identical_prompts_are_computed_once(self, policy: SchedulePolicy, overlap: bool) -> None:
        engine = make(overlap, schedule_policy=policy, chunked_prefill_size=0)
        for handle in range(4):
            engine.submit(handle, [1] * 50, max_new_tokens=4, ignore_eos=True)
        engine.drain()
        assert sorted(engine.finishes[handle].cached_tokens for handle in range(4)) == [0, 48, 48, 48]
        for handle in engine.submitted:
            engine.check_answer(handle)


class TestDfsWeight:
    def test_dfs_weight_serves_the_heaviest_branch_depth_first(self) -> None:
        line = Line(SchedulePolicy.DFS_WEIGHT)
        for tokens in ([1] * 8, [1] * 8 + [2] * 8, [1] * 8 + [3] * 8, [4] * 8):
            line.cache(tokens)
        line.wait([4] * 8 + [50])  # 0: on the light branch
        line.wait([1] * 8 + [51])  # 1: on the heavy branch
        line.wait([1] * 8 + [2] * 8 + [52])  # 2: the only request on a sub-branch of the heavy branch
        line.wait([1] * 8 + [3] * 8 + [53])  # 3: on a sub-branch with two requests
        line.wait([1] * 8 + [3] * 8 + [54])  # 4: on the same sub-branch
        assert line.order() == [3, 4, 2, 1, 0]

    def test_dfs_weight_serves_requests_without_a_hit_last(self) -> None:
        line = Line(SchedulePolicy.DFS_WEIGHT)
        line.cache([1] * 8)
        line.wait([70] * 9)
        line.wait([1] * 8 + [50])
        line.wait([71] * 9)
        assert line.order() == [1, 0, 2]


class TestLongestOutputFirst:
    def test_lof_orders_requests_by_max_new_tokens_and_then_by_arrival(self) -> None:
        line = Line(SchedulePolicy.LOF)
        for max_new in (10, 30, 20, 30):
            line.wait(max_new=max_new)
        assert line.order() == [1, 3, 2, 0]


class TestRandom:
    @staticmethod
    def shuffled(seed: int) -> list[int]:
        line = Line(SchedulePolicy.RANDOM)
        for _ in range(20):
            line.wait()
        return line.order(seed=seed)

    def test_random_order_depends_on_the_seed(self) -> None:
        assert self.shuffled(1) == self.shuffled(1) != self.shuffled(2)
        assert sorted(self.shuffled(1)) == list(range(20))

    def test_random_admissions_depend_on_the_configured_seed(self) -> None:
        def admissions(seed: int) -> list[list[int]]:
            engine = make(schedule_policy=SchedulePolicy.RANDOM, random_seed=seed, max_running_requests=1)
            for handle in range(12):
                engine.submit(handle, [handle] * 4, max_new_tokens=1)
            engine.drain()
            return [plan.input_ids.tolist() for plan in engine.plans]

        assert admissions(1) == admissions(1) != admissions(2)


class TestRoutingKey:
    def test_routing_key_policy_orders_keys_by_running_requests_and_then_by_arrival(self) -> None:
        line = Line(SchedulePolicy.ROUTING_KEY)
        running = [line.request([1], key=key) for key in ("b", "a", "c", "c", "")]
        for key in ("x", "a", "b", "", "c", "a"):
            line.wait(key=key)
        assert line.order(running) == [4, 1, 5, 2, 0, 3]

    def test_routing_key_policy_orders_requests_by_arrival_when_no_key_has_a_running_request(self) -> None:
        line = Line(SchedulePolicy.ROUTING_KEY)
        for key in ("b", "a", ""):
            line.wait(key=key)
        assert line.order([line.request([1])]) == [0, 1, 2]


def test_stats_count_present_requests_by_routing_key() -> None:
    engine = make(max_running_requests=2)
    for handle, key in enumerate(("a", "b", "a", "", "c")):
        engine.submit(handle, [handle] * 4, max_new_tokens=20, ignore_eos=True, routing_key=key)
    for _ in range(3):
        engine.turn()
    stats = engine.core.stats()
    assert (sorted(stats.running_by_key), sorted(stats.requests_by_key)) == ([1, 1], [1, 1, 2])
    engine.abort(4)
    assert sorted(engine.core.stats().requests_by_key) == [1, 2]
    engine.drain()
    assert engine.core.stats().running_by_key == engine.core.stats().requests_by_key == ()


class TestPriorityWithinPolicies:
    @pytest.mark.by_day(one_in=2, seed=44)
    @each_value(policy=list(SchedulePolicy), low_first=[False, True])
    def test_policies_reorder_only_requests_of_equal_priority(self, policy: SchedulePolicy, low_first: bool) -> None:
        urgent = -2 if low_first else 2
        line = Line(policy, enable_priority_scheduling=True, schedule_low_priority_values_first=low_first)
        line.cache(prompt(1, 40))
        line.wait(prompt(1, 40), max_new=99, key="k")
        line.wait(prompt(2, 10), priority=urgent)
        line.wait(prompt(3, 10), priority=-urgent)
        order = line.order([line.request([1], key="k")])
        assert order == [1, 0, 2]
