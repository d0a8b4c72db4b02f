"""Window and state units in the core, checked with FakeExecutor and with an oracle that knows only token prefixes."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rootstock_llm.services.worker.core.contracts.cache_groups import (
    CacheGroup,
    CacheKind,
    draft_window_tokens,
    states_per_slot,
    window_pages,
)
from rootstock_llm.services.worker.core.contracts.config import EvictionPolicy, SchedulePolicy, SchedulerConfig
from rootstock_llm.services.worker.core.contracts.messages import FinishReason
from rootstock_llm.services.worker.core.kv.cache_units import CacheUnits
from rootstock_llm.services.worker.core.kv.unit_pool import NO_UNIT
from tests.core.fake_grammar import spec
from tests.core.harness import Engine, small
from tests.core.test_scheduler_properties import check_run, config_of, drive
from tests.night import NIGHTLY

TOKEN = 4  # bytes of a token in a token key


@dataclass(frozen=True)
class CachedPage:
    """The window unit and the state unit of a page in the tree; -1: the page has no such unit."""

    window: int
    state: int


class PrefixOracle:
    """All cached prefixes of one engine, each in full, by namespace. Hits are found by trying every length."""

    def __init__(self, engine: Engine) -> None:
        self._config = engine.config
        kinds = [group.kind for group in engine.config.groups]
        self.pages: dict[tuple[str, bytes], CachedPage] = {}
        for node in engine.core.memory.tree.nodes():
            parts, walk = [], node
            while walk.parent is not None:
                parts.append(walk.key)
                walk = walk.parent
            namespace, path = walk.key.decode(), b"".join(parts[::-1])
            size = self._config.page_size * TOKEN
            units = {kind: node.units[index].tolist() for index, kind in enumerate(kinds)}
            for at in range(len(node.pages)):
                end = len(path) - len(node.key) + (at + 1) * size
                found = [units[kind][at] if kind in units else -1 for kind in (CacheKind.WINDOW, CacheKind.STATE)]
                self.pages[namespace, path[:end]] = CachedPage(*found)

    def hit(self, namespace: str, key: bytes, limit: int) -> int:
        """Returns the number of tokens of the longest hit.

        A hit has at most `limit` tokens, and leaves at least one token of `key` to compute.
        """
        size, groups = self._config.page_size, {group.kind: group for group in self._config.groups}
        pages: list[CachedPage] = []
        for at in range(1, min(len(key) // TOKEN - 1, limit) // size + 1):
            page = self.pages.get((namespace, key[: at * size * TOKEN]))
            if page is None:
                break
            pages.append(page)
        for end in range(len(pages), 0, -1):
            if CacheKind.STATE in groups and pages[end - 1].state < 0:
                continue
            if CacheKind.WINDOW in groups:
                # The first token that the token after the hit attends to.
                first_seen = end * size - groups[CacheKind.WINDOW].window + 1
                if any(page.window < 0 for page in pages[max(first_seen, 0) // size : end]):
                    continue
            return end * size
        return 0

    def check_contents(self, engine: Engine) -> None:
        """Checks that each cached window unit has the tokens of its page, and each cached state the state after its prefix."""
        executor, size = engine.executor, self._config.page_size
        for (_, prefix), page in self.pages.items():
            if page.state >= 0:
                assert executor.states[page.state] == zlib.crc32(prefix), "a cached state is the state after the whole prefix"
            if page.window >= 0:
                assert executor.window_kv[page.window].tobytes() == prefix[-size * TOKEN :], "a window unit has its page's tokens"


def check_hits(engine: Engine, rng: random.Random) -> None:
    """Checks that the engine finds the same hits as the oracle.

    Tests a random beginning of the tokens of at most four open requests and of one cached prefix.
    """
    oracle, memory = PrefixOracle(engine), engine.core.memory
    oracle.check_contents(engine)
    requests = [*engine.core.queues.by_key.values()]
    known = [(request.namespace, request.kv.token_key) for request in rng.sample(requests, min(4, len(requests)))]
    known += [rng.choice(list(oracle.pages))] if oracle.pages else []
    for namespace, key in known:
        key = key[: rng.randrange(len(key) // TOKEN) * TOKEN + TOKEN] + np.int32(7).tobytes()
        for limit in (1 << 30, rng.randrange(len(key) // TOKEN + 1)):
            assert memory.peek(namespace, key, limit)[1] == (
                oracle.hit(namespace, key, limit) if engine.config.enable_radix_cache else 0
            )


def groups_of(config: SchedulerConfig, window: int, spare_windows: int, spare_states: int) -> tuple[CacheGroup, ...]:
    """Returns groups with the window units of one prompt, the states of all slots, and spare units.

    Args:
        window: tokens of the window; 0 for no windows.
        spare_windows: window units beyond those of one prompt.
        spare_states: states beyond those of the slots; negative for no states.
    """
    groups = []
    if window:
        tokens = window + max(config.max_chunk, draft_window_tokens(config.max_drafts))
        pages = window_pages(tokens, config.page_size, config.max_pages_per_request)
        groups.append(CacheGroup(CacheKind.WINDOW, pages + spare_windows, window))
    if spare_states >= 0:
        groups.append(
            CacheGroup(CacheKind.STATE, states_per_slot(config.max_drafts) * config.max_running_requests + spare_states)
        )
    return tuple(groups)


def hybrid(window: int = 8, spare_windows: int = 40, spare_states: int = 12, state_interval: int = 16, **changes: Any) -> Engine:
    """Returns an engine with chunks of four pages of four tokens, a window of two pages, and states."""
    plain = small(**{"num_pages": 64, **changes}).config
    groups = groups_of(plain, window, spare_windows, spare_states)
    return small(groups=groups, state_interval=state_interval, **{"num_pages": 64, **changes})


def build(config: SchedulerConfig, window: int, spare_windows: int, spare_states: int, interval: int) -> SchedulerConfig:
    groups = groups_of(config, window, spare_windows, spare_states)
    return replace(config, groups=groups, state_interval=max(interval, config.page_size))


PLAIN_CHOICES: dict[str, Sequence[Any]] = {  # values of the fields of a configuration without groups
    "page_size": (1, 4, 16),
    "pool_tokens": (96, 128, 256, 640),
    "slots": range(1, 7),
    "chunk": (0, 16, 32),
    "enable_mixed_chunk": (False, True),
    "enable_radix_cache": (True, True, True, False),
    "retract_interval": (0, 0, 1, 5),
    "running_timeout_s": (0.0, 0.0, 0.3),
    "schedule_conservativeness": (0.3, 1.0),
    "schedule_policy": [*SchedulePolicy],
    "eviction_policy": [*EvictionPolicy],
    "enable_priority_scheduling": (False, True),
    "priority_preemption_threshold": (0, 1, 2),
    "adaptive_chunk_rows": (0, 1, 64),
    "prefill_max_requests": (0, 1, 2),
    "max_prompt_logprob_tokens": (16, 4096),
    "max_sessions": (1, 2, 3),
    "max_drafts": (0, 1, 3, 7),
    "drafts_by_model": (False, True),
    "speculative_adaptive": (False, True),
    "host_pages": (0,),
}
GROUP_CHOICES: dict[str, Sequence[int]] = {  # arguments of build()
    "window": (0, 1, 5, 16, 40, 200),
    "spare_windows": (0, 3, 20, 200),
    "spare_states": (-1, 0, 1, 4, 40),
    "interval": (1, 16, 64),
}
plain_configs = st.builds(config_of, **{name: st.sampled_from(values) for name, values in PLAIN_CHOICES.items()})
configs = st.builds(build, plain_configs, **{name: st.sampled_from(values) for name, values in GROUP_CHOICES.items()}).filter(
    lambda config: bool(config.groups)
)


def config_with_three_groups(rng: random.Random) -> SchedulerConfig:
    """Returns a random configuration with pages, windows and states."""
    plain = config_of(**{name: rng.choice(values) for name, values in PLAIN_CHOICES.items()})
    least = {"window": 1, "spare_states": 0}
    chosen = {
        name: rng.choice([value for value in values if value >= least.get(name, value)]) for name, values in GROUP_CHOICES.items()
    }
    return build(plain, **chosen)


@settings(max_examples=200 if NIGHTLY else 5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=configs, seed=st.integers(0, 2**32), overlap=st.booleans())
def test_random_traffic_gets_the_right_tokens_and_leaks_no_cache_unit(config: SchedulerConfig, seed: int, overlap: bool) -> None:
    rng = random.Random(seed)
    engine = drive(config, seed, 120, overlap, after_turn=lambda engine: check_hits(engine, rng))
    check_run(engine)
    units = engine.core.memory.units
    assert units is not None
    engine.core.memory.settle_units()
    assert units.num_reserved == 0 and all(pool.num_in_slots == 0 for pool in units.pools)


def test_preemption_displaces_no_request_when_the_urgent_request_would_lack_window_units_anyway() -> None:
    """Two urgent requests need 16 of 11 units, so that the second one waits for the first, with or without the other request."""
    urgent, other = 0, 5
    engine = hybrid(
        window=8,
        spare_windows=3,
        spare_states=-1,
        num_pages=64,
        max_running_requests=4,
        enable_priority_scheduling=True,
        schedule_low_priority_values_first=True,
        priority_preemption_threshold=0,
    )
    engine.submit(0, [5] * 40, priority=urgent, max_new_tokens=24, ignore_eos=True)
    engine.turn()
    engine.submit(1, [6] * 4, priority=other, max_new_tokens=12, ignore_eos=True)
    for _ in range(4):
        engine.turn()
    engine.submit(2, [7] * 40, priority=urgent, max_new_tokens=4, ignore_eos=True)
    engine.drain()
    assert engine.core.counters.preemptions_total == 0
    for handle in range(3):
        engine.check_answer(handle)


def served(engine: Engine, handle: int, prompt: list[int], **params: Any) -> int:
    """Runs a request to its end. Returns the number of cached prompt tokens."""
    engine.submit(handle, prompt, **{"max_new_tokens": 2, "ignore_eos": True, **params})
    engine.drain()
    assert engine.finishes[handle].reason is FinishReason.LENGTH
    engine.check_answer(handle)
    return engine.finishes[handle].cached_tokens


KINDS = {"windows": {"spare_states": -1}, "states": {"window": 0}, "both": {}}


@pytest.mark.parametrize("kinds", KINDS)
def test_repeated_prompt_is_cached_up_to_the_end_of_the_last_whole_page(kinds: str) -> None:
    engine = hybrid(**KINDS[kinds])
    assert served(engine, 0, [*range(43)]) == 0
    assert served(engine, 1, [*range(43)]) == 40
    assert served(engine, 2, [*range(40)]) == (36 if kinds == "windows" else 32)


@pytest.mark.parametrize("kinds", KINDS)
def test_third_prompt_hits_the_prefix_that_the_first_two_prompts_share(kinds: str) -> None:
    engine = hybrid(context_len=128, state_interval=64, **KINDS[kinds])
    shared = [*range(50)]
    assert served(engine, 0, [*shared, *range(100, 140)]) == 0
    served(engine, 1, [*shared, *range(200, 240)])
    assert served(engine, 2, [*shared, *range(300, 340)]) == 48


@pytest.mark.parametrize("kinds", KINDS)
def test_next_turn_of_a_chat_recomputes_at_most_one_page_of_the_old_context(kinds: str) -> None:
    engine, context = hybrid(context_len=128, **KINDS[kinds]), [*range(21)]
    for turn in range(6):
        cached = served(engine, turn, context, max_new_tokens=7)
        assert not turn or cached >= len(context) - 5 - 4, "the new message and at most a page of the old context are computed"
        context = [*context, *engine.outputs[turn], *range(900, 905)]


def test_short_prompt_reserves_no_window_units_for_a_whole_chunk() -> None:
    """The pool has 12 window units: enough for two prompts with 6 units each, and not for two whole chunks with 8 units each."""
    engine = hybrid(spare_windows=4, spare_states=-1)
    for handle in range(2):
        engine.submit(handle, [100 * handle + token for token in range(5)], max_new_tokens=2, ignore_eos=True)
    engine.drain()
    assert engine.plans[0].num_extend == 2, "the first step computes both prompts"


@pytest.mark.parametrize("kinds", KINDS)
def test_slot_of_an_aborted_prompt_keeps_no_page_end(kinds: str) -> None:
    engine = hybrid(**KINDS[kinds])
    engine.submit(0, [*range(43)], max_new_tokens=2, ignore_eos=True)
    engine.turn()
    units = engine.core.memory.units
    assert units is not None and units.slots_with_ends(), "the first chunk is not committed"
    engine.abort(0)
    engine.drain()
    assert not units.slots_with_ends()


@pytest.mark.parametrize("kinds", KINDS)
def test_retracted_request_recomputes_at_most_one_page(kinds: str) -> None:
    engine = hybrid(retract_interval=9, **KINDS[kinds])
    engine.submit(0, [*range(30)], max_new_tokens=30, ignore_eos=True)
    engine.drain()
    engine.check_answer(0)
    extends = [plan.num_tokens[: plan.num_extend].sum() for plan in engine.plans if plan.num_extend]
    retractions = engine.core.counters.retractions_total
    assert retractions >= 2 and sum(extends) <= 30 + retractions * (engine.config.page_size + 1)


def drafting(**changes: Any) -> Engine:
    """Returns an engine with pages of 16 tokens whose decode rows always have draft tokens, about half of which are right."""
    sizes = {"page_size": 16, "num_pages": 64, "context_len": 256, "chunked_prefill_size": 64, "window": 24}
    return hybrid(**{**sizes, "max_drafts": 7, "speculative_adaptive": False, "state_interval": 64, **changes})


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("kinds", KINDS)
def test_retracted_request_with_draft_tokens_recomputes_at_most_32_tokens(kinds: str, overlap: bool) -> None:
    engine = drafting(overlap=overlap, retract_interval=9, **KINDS[kinds])
    engine.submit(0, [*range(30)], max_new_tokens=180, ignore_eos=True)
    engine.drain()
    engine.check_answer(0)
    extends = [int(plan.num_tokens[: plan.num_extend].sum()) for plan in engine.plans if plan.num_extend]
    assert engine.core.counters.accepted_tokens_total > 60 and len(extends) > 4
    assert max(extends[1:]) <= 32


@pytest.mark.parametrize("kinds", KINDS)
def test_next_turn_of_a_chat_with_draft_tokens_recomputes_at_most_32_tokens(kinds: str) -> None:
    engine, context = drafting(**KINDS[kinds]), [*range(21)]
    for turn in range(7):
        cached = served(engine, turn, context, max_new_tokens=23)
        assert not turn or cached >= len(context) - 5 - 32, (
            "the new message and at most 32 tokens of the old context are computed"
        )
        context = [*context, *engine.outputs[turn], *range(900, 905)]


def test_slot_with_draft_tokens_has_at_most_four_states() -> None:
    engine = drafting(spare_states=0, max_running_requests=3, page_size=4, num_pages=256, chunked_prefill_size=16)
    units, slots = engine.core.memory.units, engine.core.memory.slots
    assert units is not None and units.states is not None and units.states.num_units == 12
    for handle in range(5):
        engine.submit(handle, [handle * 50 + each for each in range(40)], max_new_tokens=50, ignore_eos=True)
    most = 0
    while len(engine.finishes) < 5:
        engine.turn()
        sizes = [(slot, int(slots.num_shared[slot]), int(slots.num_pages[slot])) for slot in range(3)]
        most = max(most, *(len(units.slot_units(*each)[units.states.index]) for each in sizes))
    for handle in range(5):
        engine.check_answer(handle)
    assert most == states_per_slot(7) == 4


def test_grammar_that_replaces_draft_tokens_undoes_the_states_of_the_row_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = []
    drop_row = CacheUnits.drop_row

    def record(units: CacheUnits, slot: int, num_committed: int) -> None:
        assert units.slot_states is not None
        positions = units.slot_states._at
        before = int(positions[slot])
        drop_row(units, slot, num_committed)
        dropped.append(before - int(positions[slot]))

    monkeypatch.setattr(CacheUnits, "drop_row", record)
    engine = drafting(max_running_requests=4)
    for handle in range(24):
        engine.submit(handle, [handle, *range(40)], max_new_tokens=40, grammar=spec(handle % 4, 25))
    engine.drain()
    for handle in range(24):
        engine.check_answer(handle)
    assert any(dropped), "a row in flight has read accepted tokens that the grammar has replaced"


def test_requests_with_the_same_prompt_compute_the_prompt_once() -> None:
    engine = hybrid(max_running_requests=4, num_pages=128, context_len=128, chunked_prefill_size=128, spare_windows=200)
    for handle in range(4):
        engine.submit(handle, [*range(75)], max_new_tokens=2, ignore_eos=True)
    engine.drain()
    computed = sum(int(plan.num_tokens[: plan.num_extend].sum()) for plan in engine.plans)
    assert computed == 75 + 3 * 3


def test_long_prompt_is_served_with_few_window_units() -> None:
    engine = hybrid(window=8, spare_windows=0, context_len=256, num_pages=128, max_running_requests=1)
    units = engine.core.memory.units
    assert units is not None and units.windows is not None
    served(engine, 0, [*range(200)], max_new_tokens=20)
    assert units.windows.num_units == (8 + 16) // 4 + 2


def test_slot_of_a_prompt_of_32768_tokens_holds_a_window_and_a_chunk_and_three_states() -> None:
    """The sizes are those of Gemma 3 1B, where 22 of 26 layers have a window of 512 tokens."""
    page, window, chunk, length = 16, 512, 2048, 32_768
    engine = hybrid(
        window, page_size=page, num_pages=2060, context_len=length + 64, chunked_prefill_size=chunk, max_running_requests=1
    )
    engine.checked = False
    units, slots = engine.core.memory.units, engine.core.memory.slots
    assert units is not None and units.states is not None
    engine.submit(0, [each * 7 % 1000 for each in range(length)], max_new_tokens=40, ignore_eos=True)
    most_windows = most_states = most_pages = 0
    while 0 not in engine.finishes:
        engine.turn()
        most_windows = max(most_windows, int((units.slot_windows.table[0] != NO_UNIT).sum()))
        sizes = int(slots.num_shared[0]), int(slots.num_pages[0])
        most_states = max(most_states, len(units.slot_units(0, *sizes)[units.states.index]))
        most_pages = max(most_pages, sizes[1])
    assert most_pages > length // page and most_states <= states_per_slot(0)
    assert window // page < most_windows <= (window + chunk) // page + 2
    of_all_layers = 26 * most_pages
    assert 4 * most_pages + 22 * most_windows <= 0.25 * of_all_layers, "windows reduce the KV of the slot to a quarter"


def test_no_slot_holds_a_unit_after_random_submits_and_aborts() -> None:
    count = 10_000 if NIGHTLY else 100
    rng, engine = random.Random(8), hybrid(num_pages=128, context_len=128)
    engine.checked = False
    units = engine.core.memory.units
    assert units is not None
    for handle in range(count):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 100))]
        engine.submit(handle, tokens, max_new_tokens=rng.randrange(1, 20), ignore_eos=True)
        for _ in range(rng.randrange(4)):
            engine.turn()
        if rng.random() < 0.5:
            engine.abort(rng.randrange(max(0, handle - 8), handle + 1))
    engine.drain()
    engine.core.memory.settle_units()
    assert len(engine.finishes) == count and units.num_reserved == 0 and not units.slots_with_ends()
    assert all(pool.num_in_slots == 0 for pool in units.pools)
    assert (units.slot_windows.table == NO_UNIT).all()


def serve_different_prompts(engine: Engine, count: int) -> None:
    """Serves requests whose prompts of 40 tokens share no prefix, and checks their answers."""
    for handle in range(count):
        engine.submit(handle, [handle * 50 + each for each in range(40)], max_new_tokens=12, ignore_eos=True)
    engine.drain()
    for handle in range(count):
        engine.check_answer(handle)


def test_requests_get_the_right_tokens_when_the_pool_has_no_spare_units() -> None:
    engine = hybrid(spare_windows=0, spare_states=0, max_running_requests=3, context_len=128)
    serve_different_prompts(engine, 5)
    units = engine.core.memory.units
    assert units is not None and units.num_slots == units.num_reserved == 0


def test_reused_prompt_stays_cached_longer_than_an_unused_prompt() -> None:
    engine = hybrid(window=0, spare_states=2, max_running_requests=1, state_interval=64)
    first, second = [*range(20)], [*range(100, 120)]
    for handle, prompt in enumerate([first, second, first]):
        served(engine, handle, prompt, max_new_tokens=1)
    for handle in range(3, 9):
        served(engine, handle, [handle * 100 + each for each in range(20)], max_new_tokens=1)
        assert served(engine, handle + 100, first, max_new_tokens=1) == 16
    assert served(engine, 500, second, max_new_tokens=1) == 0


def test_pages_are_evicted_first_when_the_state_of_the_prompt_was_evicted() -> None:
    engine = hybrid(
        window=0,
        spare_states=1,
        num_pages=40,
        context_len=128,
        max_running_requests=1,
        state_interval=64,
        eviction_policy=EvictionPolicy.FIFO,
    )
    prompts = [[100 * number + each for each in range(20)] for number in range(4)]
    order = [1, 0, 2, 1, 3]  # prompt 1 was cached first, and its state was used next to last
    for handle, number in enumerate(order):
        served(engine, handle, prompts[number], max_new_tokens=1)

    def num_cached(number: int) -> int:
        return engine.core.memory.cached("", np.array(prompts[number], dtype=np.int32).tobytes(), 1 << 30)[1] // 4

    assert [num_cached(number) for number in range(4)] == [4, 4, 4, 4]
    assert engine.core.memory.peek("", np.array(prompts[0], dtype=np.int32).tobytes(), 1 << 30)[1] == 0, (
        "the state of the prompt was evicted"
    )
    served(engine, 9, [*range(500, 600)], max_new_tokens=1)
    assert num_cached(0) == 0 and num_cached(1) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spare_windows": -1}, "the group window has 7 units; it needs at least 8"),
        (
            {"window": 0, "spare_states": 0, "groups": (CacheGroup(CacheKind.STATE, 11),)},
            "the group state has 11 units; it needs at least 12",
        ),
        ({"host_pages": 8}, "tiers and remote workers need the bytes of the units"),
        ({"state_interval": 3}, "state_interval 3 is below page_size 4"),
    ],
    ids=["window units", "states", "tiers", "interval"],
)
def test_configuration_refuses_invalid_settings_for_cache_groups(changes: dict[str, Any], message: str) -> None:
    given = dict(changes)
    sizes = {name: given.pop(name) for name in ("window", "spare_windows", "spare_states") if name in given}
    plain = small(num_pages=64).config
    groups = groups_of(plain, **{"window": 8, "spare_windows": 40, "spare_states": 12, **sizes})
    with pytest.raises(ValueError, match=message):
        replace(plain, **{"groups": groups, "state_interval": 16, **given})
