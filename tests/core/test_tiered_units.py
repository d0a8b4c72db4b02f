"""Windows and states in the tiers below the device, checked with FakeExecutor and with the oracle of token prefixes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rootstock_llm.services.shared.index.prefix_index import END_MARK, BlockTier
from rootstock_llm.services.worker.core.contracts.cache_groups import CacheGroup, CacheKind
from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.messages import FinishReason
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan
from rootstock_llm.services.worker.core.contracts.transfers import (
    UNASKED,
    Deleted,
    Fact,
    OperationKind,
    PageOperation,
    Selection,
    Tier,
    WritePolicy,
)
from rootstock_llm.services.worker.exec.contracts.operations import DeleteStored
from tests.core.harness import Engine, chained, slow, small
from tests.core.peers import Relayed
from tests.core.test_cache_units import (
    KINDS,
    check_hits,
    config_with_three_groups,
    configs,
    groups_of,
    serve_different_prompts,
    served,
)
from tests.core.test_scheduler_properties import check_run, drive
from tests.night import NIGHTLY

PARTS = {CacheKind.WINDOW: 2, CacheKind.STATE: 3}  # number of parts of a unit; a part has the size of a page


def with_bytes(groups: tuple[CacheGroup, ...], page_bytes: int) -> tuple[CacheGroup, ...]:
    """Returns groups whose units have the parts of PARTS, the last one with padding."""
    return tuple(replace(group, unit_bytes=PARTS[group.kind] * page_bytes - 1) for group in groups)


def tiered(window: int = 8, spare_windows: int = 40, spare_states: int = 12, **changes: Any) -> Engine:
    """Returns an engine like that of test_cache_units.hybrid(), but with a host tier. It prefers reading to computing pages."""
    changes = {"num_pages": 64, "host_pages": 200, "state_interval": 16, **changes}
    groups = groups_of(small(**changes).config, window, spare_windows, spare_states)
    return slow(small(groups=with_bytes(groups, 64), **changes))


def build(config: SchedulerConfig, **tiers: Any) -> SchedulerConfig:
    """Returns a configuration with tiers, whose units have the parts of PARTS."""
    return replace(config, groups=with_bytes(config.groups, config.page_bytes), **tiers)


TIER_CHOICES: dict[str, Sequence[Any]] = {  # arguments of build()
    "host_pages": (6, 60, 600),
    "hicache_salt_quota": (0.0, 2e-5),
    "hicache_storage_salt_quota": (0.0, 2e-5),
    "has_storage": (False, True),
    "hicache_write_policy": [*WritePolicy],
}
tiered_configs = st.builds(build, configs, **{name: st.sampled_from(values) for name, values in TIER_CHOICES.items()})


@settings(max_examples=200 if NIGHTLY else 5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=tiered_configs, seed=st.integers(0, 2**32), overlap=st.booleans())
def test_random_traffic_through_tiers_gets_the_right_tokens_and_leaks_no_unit(
    config: SchedulerConfig, seed: int, overlap: bool
) -> None:
    check_traffic(config, seed, 120, overlap)


@pytest.mark.parametrize("number", range(20 if NIGHTLY else 1))
def test_long_random_traffic_with_three_groups_gets_the_right_tokens_and_leaks_no_unit(number: int) -> None:
    """By night, each of the 20 cases runs the scheduler loop 50,000 times. Cases with an odd number have tiers."""
    rng = random.Random(number)
    config = config_with_three_groups(rng)
    if number % 2:
        config = build(config, **{name: rng.choice(values) for name, values in TIER_CHOICES.items()})
    check_traffic(config, number, 50_000, overlap=number % 4 < 2, most_turns=50_000 if NIGHTLY else 500)


def check_traffic(config: SchedulerConfig, seed: int, steps: int, overlap: bool, most_turns: float = inf) -> None:
    """Runs random traffic (see drive()). Checks hits after each step, and at the end all outputs and that no unit is in use."""
    rng = random.Random(seed)

    def check(engine: Engine) -> None:
        check_hits(engine, rng)
        engine.plans.clear()  # tens of thousands of plans would fill the memory

    engine = drive(config, seed, steps, overlap, after_turn=check, most_turns=most_turns)
    check_run(engine)
    units = engine.core.memory.units
    assert units is not None
    engine.core.memory.settle_units()
    assert units.num_reserved == units.num_slots == 0
    assert all(pool.num_in_slots == pool.num_lent == len(pool.quarantined) == 0 for pool in units.pools)


def lower(engine: Engine, kinds: set[OperationKind]) -> list[PageOperation]:
    """Returns the planned operations of these kinds."""
    return [operation for plan in engine.plans for operation in plan.operations if operation.kind in kinds]


@pytest.mark.parametrize("kinds", KINDS)
def test_prompt_is_read_from_the_host_after_the_device_was_flushed(kinds: str) -> None:
    engine = tiered(**KINDS[kinds])
    served(engine, 0, [*range(43)])
    engine.control.flush_cache()
    assert served(engine, 1, [*range(43)]) == 40
    assert engine.finishes[1].cached_from == {Tier.DEVICE: 0, Tier.HOST: 40}
    assert {operation.group for operation in lower(engine, {OperationKind.LOAD})} == {0, *range(1, 1 + len(engine.config.groups))}


@pytest.mark.parametrize("kinds", KINDS)
def test_prompt_is_read_from_the_storage_after_device_and_host_were_flushed(kinds: str) -> None:
    engine = tiered(has_storage=True, **KINDS[kinds])
    served(engine, 0, [*range(43)])
    engine.control.flush_cache()
    engine.control.flush_tiers((Tier.HOST,))
    assert served(engine, 1, [*range(43)]) == 40
    assert engine.finishes[1].cached_from == {Tier.DEVICE: 0, Tier.STORAGE: 40}


def test_only_the_state_is_read_when_the_device_has_the_pages() -> None:
    engine = tiered(window=0, spare_states=1, max_running_requests=1, state_interval=64)
    served(engine, 0, [*range(20)], max_new_tokens=1)
    for handle in range(1, 5):
        served(engine, handle, [100 * handle + each for each in range(20)], max_new_tokens=1)
    before = len(engine.plans)
    assert served(engine, 5, [*range(20)], max_new_tokens=1) == 16
    loads = [each for plan in engine.plans[before:] for each in plan.operations if each.kind is OperationKind.LOAD]
    assert [(load.group, len(load.pages)) for load in loads] == [(1, 1)]


def test_shorter_prefix_is_read_when_the_state_at_its_end_was_lost() -> None:
    engine = tiered(window=0, state_interval=16, chunked_prefill_size=16)
    served(engine, 0, [*range(43)], max_new_tokens=1)
    host = engine.core.tiers._host  # type: ignore[union-attr]
    states = [key for key in host._cached if key not in set(page_keys(engine, [*range(43)]))]
    assert len(states) == 3 * PARTS[CacheKind.STATE], "states at the ends of 16, 32 and 40 tokens are in the host tier"
    engine.control.flush_cache()
    last = engine.core.tiers._backups._units.of_page(0, 9, page_keys(engine, [*range(43)])[9])  # type: ignore[union-attr]
    for key in last.keys:
        host._evict_key(key)
    assert served(engine, 1, [*range(43)], max_new_tokens=1) == 32
    assert engine.core.stats().recomputed_pages_total == 2, "the host tier has the two pages before the lost state"


def page_keys(engine: Engine, prompt: list[int]) -> list[bytes]:
    keys = engine.core.tiers._keys  # type: ignore[union-attr]
    return keys.after(keys.root(""), np.array(prompt, dtype=np.int32).tobytes())


@pytest.mark.parametrize("kinds", KINDS)
def test_prefix_is_computed_when_reads_of_units_fail(kinds: str) -> None:
    engine = tiered(**KINDS[kinds])
    served(engine, 0, [*range(43)])
    engine.control.flush_cache()
    engine.executor.pages_moved = lambda operation: len(operation.keys) - (operation.group > 0)
    served(engine, 1, [*range(43)])
    units = engine.core.memory.units
    assert units is not None and all(not pool.quarantined and not pool.num_lent for pool in units.pools)


def test_no_state_is_copied_while_running_requests_reserve_all_states() -> None:
    """Three requests reserve all states. Their states are copied after the requests have ended."""
    short = {"state_interval": 8, "chunked_prefill_size": 8}  # so that states can be copied while their request runs
    engine = tiered(window=0, spare_states=0, max_running_requests=3, context_len=128, **short)
    units = engine.core.memory.units
    assert units is not None and units.states is not None
    num_copied_by_slots = Counter[int]()
    plan = engine.core.plan

    def count_copies(now: float) -> BatchPlan | None:
        planned = plan(now)
        copies = [each for each in planned.operations if each.group] if planned is not None else []
        num_copied_by_slots[units.num_slots] += sum(len(copy.pages) for copy in copies)
        return planned

    engine.core.plan = count_copies  # type: ignore[method-assign]
    serve_different_prompts(engine, 9)
    assert 3 in num_copied_by_slots and num_copied_by_slots[3] == 0 and num_copied_by_slots.total() > 0


@pytest.mark.parametrize("kinds", KINDS)
def test_stats_count_the_units_that_an_import_writes_as_quarantined(kinds: str) -> None:
    engine = tiered(page_moved_s=0.01, **KINDS[kinds])
    served(engine, 0, [*range(43)])
    engine.control.flush_cache()
    engine.submit(1, [*range(43)], max_new_tokens=2, ignore_eos=True)
    quarantined = Counter[str]()
    while 1 not in engine.finishes:
        engine.turn()
        stats = engine.core.stats()
        quarantined["windows"] = max(quarantined["windows"], stats.window_units_quarantined)
        quarantined["states"] = max(quarantined["states"], stats.states_quarantined)
        assert not (stats.window_units_quarantined and stats.window_units_used), "no running request uses a written unit"
        assert not (stats.states_quarantined and stats.states_used), "no running request uses a written state"
    assert quarantined == {"windows": 0 if kinds == "states" else 2, "states": 0 if kinds == "windows" else 1}


@pytest.mark.parametrize("kinds", KINDS)
def test_deleted_salt_has_no_units_in_any_tier(kinds: str) -> None:
    engine = tiered(has_storage=True, **KINDS[kinds])
    served(engine, 0, [*range(43)], salt="tenant")
    engine.control.forget_salt("tenant", (Tier.DEVICE, Tier.HOST, Tier.STORAGE))
    engine.drain()
    done: Future[Deleted] = Future()
    engine.executor.apply(DeleteStored(Selection(engine.core.tiers.tag("tenant")), done))  # type: ignore[union-attr]
    engine.core.ended(Fact(UNASKED, dropped=done.result().dropped), engine.now)
    stats = engine.core.stats()
    assert stats.host_pages_used == stats.storage_pages == 0 and not engine.executor.storage
    assert served(engine, 1, [*range(43)], salt="tenant") == 0


def test_salt_near_its_host_quota_does_not_stop_the_copies_of_other_salts() -> None:
    """The salt has two of 13 pages left, and the state of its second prompt needs three. Pages that wait for the storage stay."""
    engine = tiered(
        window=0,
        has_storage=True,
        hicache_salt_quota=13 * 64 / 1e9,
        hicache_write_policy=WritePolicy.WRITE_THROUGH,
        state_interval=1000,
    )
    transfer = engine.executor.transfer
    engine.executor.transfer = lambda operations: transfer(  # type: ignore[method-assign]
        tuple(each for each in operations if each.kind is not OperationKind.STORE)
    )
    for handle, salt in enumerate(("tenant", "tenant", "", "")):
        before = engine.core.stats().backed_up_pages_total
        engine.submit(handle, [5 + handle] * 18, salt=salt, max_new_tokens=1, ignore_eos=True)
        for _ in range(60):
            engine.turn()
        assert engine.core.stats().backed_up_pages_total > before, handle


def pair_of(kinds: str, page_moved_s: float = 0.0, spare: int = 40, **changes: Any) -> Relayed:
    """Returns a prefill worker and a decode worker with the cache groups of KINDS, and `spare` spare units of each group."""
    given = {"window": 8, "spare_windows": spare, "spare_states": spare, **KINDS[kinds]}
    changes = {"num_pages": 64, "context_len": 128, "state_interval": 16, **changes}
    groups = with_bytes(groups_of(small(**changes).config, **given), 64)
    return Relayed(page_moved_s, {**changes, "groups": groups}, **changes, groups=groups)


@pytest.mark.parametrize("length", [5, 43, 40])
@pytest.mark.parametrize("kinds", KINDS)
def test_decode_worker_reads_pages_and_units_of_the_prompt(kinds: str, length: int) -> None:
    pair, prompt = pair_of(kinds), [*range(length)]
    finish = pair.answer(0, prompt, max_new_tokens=6)
    assert finish.cached_from[Tier.PEER] == finish.cached_tokens == (length - 1) // 4 * 4
    computed = pair.second.plans[0].num_tokens if pair.second.plans[0].num_rows else pair.second.plans[-1].num_tokens
    assert int(computed.sum()) <= 5
    pair.assert_answers_and_ends()


@pytest.mark.parametrize("kinds", KINDS)
def test_prefetched_prompt_is_cached_with_its_units(kinds: str) -> None:
    pair = pair_of(kinds, page_moved_s=0.003)
    pair.begin(0, [*range(75)], max_new_tokens=6)
    finish = pair.finish(0, max_new_tokens=6)
    assert finish.cached_tokens == 72
    pair.assert_answers_and_ends()


@pytest.mark.parametrize("kinds", KINDS)
def test_prompt_is_computed_when_the_reservation_has_ended_before_its_units_are_read(kinds: str) -> None:
    pair, prompt = pair_of(kinds), [*range(43)]
    pair.second.executor.pages_moved = lambda operation: 0 if operation.group else len(operation.keys)
    finish = pair.answer(0, prompt, max_new_tokens=6)
    assert finish.cached_tokens == 0
    pair.assert_answers_and_ends()


@settings(max_examples=100 if NIGHTLY else 4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    kinds=st.sampled_from(list(KINDS)),
    spare=st.sampled_from([2, 12, 40]),
    host_pages=st.sampled_from([0, 60]),
    page_moved_s=st.sampled_from([0.0, 0.001, 0.005]),
)
def test_random_traffic_between_two_workers_gets_the_right_tokens_and_leaks_no_unit(
    seed: int, kinds: str, spare: int, host_pages: int, page_moved_s: float
) -> None:
    pair = drive_pair(seed, kinds, spare, host_pages, page_moved_s)
    pair.assert_answers_and_ends()
    for engine in (pair.first, pair.second):
        units = engine.core.memory.units
        assert units is not None
        engine.core.memory.settle_units()
        assert all(pool.num_in_slots == pool.num_lent == len(pool.quarantined) == 0 for pool in units.pools)


def drive_pair(seed: int, kinds: str, spare: int, host_pages: int, page_moved_s: float) -> Relayed:
    """Runs random requests on a prefill worker and a decode worker, with aborts, failed reads and flushes."""
    rng = random.Random(seed)
    pair = pair_of(kinds, page_moved_s, host_pages=host_pages, spare=spare)
    if rng.random() < 0.5:
        pair.second.executor.pages_moved = lambda operation: rng.choice((len(operation.keys), 0))
    went_on: set[int] = set()

    def go_on() -> None:
        for ended in set(pair.first.finishes) - went_on:
            went_on.add(ended)
            if pair.first.finishes[ended].reason is FinishReason.HANDED_OVER:
                pair.go_on(ended, pair.prompts[ended], max_new_tokens=8)

    def all_have_ended() -> bool:
        go_on()
        return len(pair.first.finishes) == 16 and set(pair.second.submitted) == set(pair.second.finishes)

    for handle in range(16):
        prompt = [rng.randrange(3)] * rng.randrange(1, 50) + [rng.randrange(50) for _ in range(rng.randrange(30))]
        pair.begin(handle, prompt, max_new_tokens=8)
        for _ in range(rng.randrange(8)):
            pair.turn()
            go_on()
        if rng.random() < 0.2:
            pair.first.abort(rng.randrange(handle + 1))
        if rng.random() < 0.2 and (running := set(pair.second.submitted) - set(pair.second.finishes)):
            pair.second.abort(rng.choice(sorted(running)))
        if rng.random() < 0.1:
            rng.choice((pair.first, pair.second)).control.flush_cache()
    pair.until(all_have_ended)
    return pair


@pytest.mark.parametrize("kinds", KINDS)
def test_hit_ends_in_the_host_tier_are_reported_to_the_prefix_index(kinds: str) -> None:
    engine = tiered(context_len=256, num_pages=64, host_pages=400, **KINDS[kinds])
    served(engine, 0, [*range(140)], max_new_tokens=1)
    on_device = {chained(each, END_MARK) for each in engine.index} & engine.index
    assert on_device
    engine.control.flush_cache()
    engine.check()
    blocks = {name for name in engine.below if chained(name, END_MARK) in engine.below}
    assert len(blocks) >= 1 and all(engine.below[chained(block, END_MARK)] is BlockTier.HOST for block in blocks)
    assert {chained(block, END_MARK) for block in blocks} <= on_device
    engine.control.flush_tiers((Tier.HOST,))
    engine.check()
    assert not engine.below


def test_decode_worker_reads_only_the_window_units_that_it_lacks() -> None:
    """The second prompt ends one page after the first one, so that one of its two window units is on the decode worker."""
    pair, first = pair_of("both"), [*range(37)]
    second = [*first[:36], *range(500, 507)]
    pair.answer(0, first, max_new_tokens=6)
    finish = pair.answer(1, second, max_new_tokens=6)
    assert finish.cached_tokens == 40
    pulls = lower(pair.second, {OperationKind.PULL})
    assert [(pull.group, len(pull.pages)) for pull in pulls][-3:] == [(0, 1), (1, 1), (2, 1)]
    assert pulls[-2].pull is not None and pulls[-2].pull.first == PARTS[CacheKind.WINDOW]
    check_hits(pair.second, random.Random(0))
    pair.assert_answers_and_ends()


def test_units_that_are_reserved_for_slots_are_not_lent() -> None:
    engine = tiered(window=0, spare_states=2, max_running_requests=3)
    pins, units = engine.core.memory.unit_pins, engine.core.memory.units
    assert pins is not None and units is not None and pins.num_lendable(0) == 11
    for handle in range(3):
        engine.submit(handle, [*range(handle * 50, handle * 50 + 5)], max_new_tokens=9, ignore_eos=True)
    engine.turn()
    assert units.num_slots == 3 and pins.num_lendable(0) == 2
    engine.drain()
    assert pins.num_lendable(0) == 11


def test_units_of_a_page_end_are_pinned_together_or_not_at_all() -> None:
    engine = tiered(spare_windows=2, host_pages=0, reads_peers=True)
    served(engine, 0, [*range(43)], max_new_tokens=1)
    memory, tokens = engine.core.memory, np.arange(43, dtype=np.int32).tobytes()
    assert memory.unit_pins is not None
    node = memory.match("", tokens, 40)
    found = memory.unit_pins.pin_end(node, 10)
    assert [len(each) for each in found] == [2, 1]
    assert memory.unit_pins.pin_end(node, 5) == [], "no page end inside of the chunk has a state"
    for index, each in enumerate(found):
        memory.unit_pins.unpin(index, each)
    lent = memory.unit_pins.num_lendable(0)
    quarantined = memory.unit_pins.quarantine(0, lent - 1)
    assert memory.unit_pins.pin_end(node, 10) == [], "one of the two window units may not be lent"
    memory.unit_pins.free_quarantined(0, quarantined)


@pytest.mark.parametrize("kinds", KINDS)
def test_reservation_that_grows_pins_its_units_once(kinds: str) -> None:
    """Both requests have the same prompt, so the reservation of the second one pins all cached pages and their units at once.

    The handover pins the same pages and units once more. They must be counted once.
    """
    pair = pair_of(kinds)
    for handle in range(2):
        pair.compute(handle, [*range(43)], max_new_tokens=6)
    units = pair.first.core.memory.units
    assert units is not None
    expected = [2 if pool is units.windows else 1 for pool in units.pools]
    assert [pool.num_lent for pool in units.pools] == [2 * count for count in expected], "two reservations pin the same units"
    pair.assert_answers_and_ends()
    assert not any(pool.num_lent for pool in units.pools)
