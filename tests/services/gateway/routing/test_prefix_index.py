"""Tests of PrefixIndex against a model of plain dictionaries, and of cases that the model does not include."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rootstock_llm.services.gateway.routing.prefix_index import PrefixIndex
from rootstock_llm.services.shared.index.prefix_index import BlockTier, end_mark

CHAINS = [[bytes([chain, depth]) + b"block." for depth in range(6)] for chain in range(3)]
BLOCKS = [block for chain in CHAINS for block in chain]


def depths(index: PrefixIndex, hashes: list[bytes]) -> list[int]:
    return [int(depth) for depth in index.match(hashes)]


def model_depth(blocks: set[bytes], hashes: list[bytes]) -> int:
    for depth, block in enumerate(hashes):
        if block not in blocks:
            return depth
    return len(hashes)


class AgainstModel(RuleBasedStateMachine):
    """Compares the index with a model: by live owner, the tier of each block and the expiry time of each speculative block."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.numbers: dict[tuple[str, int], int] = {}
        self.tiers: dict[int, dict[bytes, BlockTier]] = {}
        self.expiries: dict[int, dict[bytes, float]] = {}
        self.now = 0.0

    @rule(worker=st.sampled_from("abc"), generation=st.integers(0, 1))
    def owner(self, worker: str, generation: int) -> None:
        number = self.index.owner(worker, generation)
        if (worker, generation) in self.numbers:
            assert self.numbers[worker, generation] == number
            return
        assert number not in self.tiers
        self.numbers[worker, generation] = number
        self.tiers[number], self.expiries[number] = {}, {}

    @precondition(lambda self: self.tiers)
    @rule(data=st.data(), blocks=st.lists(st.sampled_from(BLOCKS)), tier=st.sampled_from(BlockTier))
    def stored(self, data: st.DataObject, blocks: list[bytes], tier: BlockTier) -> None:
        number = data.draw(st.sampled_from(sorted(self.tiers)))
        self.index.stored(number, iter(blocks), tier)
        self.tiers[number].update(dict.fromkeys(blocks, tier))
        for block in blocks if tier is BlockTier.DEVICE else ():
            self.expiries[number].pop(block, None)

    @precondition(lambda self: self.tiers)
    @rule(data=st.data(), blocks=st.lists(st.sampled_from(BLOCKS)))
    def removed(self, data: st.DataObject, blocks: list[bytes]) -> None:
        number = data.draw(st.sampled_from(sorted(self.tiers)))
        self.index.removed(number, iter(blocks))
        self.tiers[number] = {block: tier for block, tier in self.tiers[number].items() if block not in blocks}

    @precondition(lambda self: self.tiers)
    @rule(data=st.data(), chain=st.sampled_from(CHAINS), depth=st.integers(0, 6), ttl=st.integers(1, 4))
    def speculate(self, data: st.DataObject, chain: list[bytes], depth: int, ttl: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.tiers)))
        self.index.speculate(number, chain[:depth], self.now + ttl)
        ends = self.expiries[number]
        for block in chain[:depth]:
            ends[block] = max(ends.get(block, 0.0), self.now + ttl)

    @rule(step=st.integers(0, 3))
    def expire(self, step: int) -> None:
        self.now += step
        self.index.expire(self.now)
        self.expiries = {n: {b: end for b, end in ends.items() if end > self.now} for n, ends in self.expiries.items()}

    @precondition(lambda self: self.numbers)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.numbers)))
        number = self.numbers.pop(name)
        self.index.retire(number)
        del self.tiers[number], self.expiries[number]
        assert self.index.find(*name) == -1

    @rule(budget=st.integers(0, 5))
    def sweep(self, budget: int) -> None:
        assert self.index.sweep(budget) <= budget

    @invariant()
    def agrees(self) -> None:
        for chain in CHAINS:
            found, deeper = depths(self.index, chain), self.index.reach(chain)
            is_below = any(tier for tiers in self.tiers.values() for tier in tiers.values())
            assert len(deeper) == 3 or not is_below
            for number in range(self.index.num_owners):
                tiers, expected = self.tiers.get(number, {}), set(self.expiries.get(number, {}))
                reached = [model_depth({b for b in tiers if tiers[b] <= tier} | expected, chain) for tier in BlockTier]
                assert found[number] == reached[0] and deeper[:, number].tolist() == reached[: len(deeper)]
        for name, number in self.numbers.items():
            tiers = self.tiers[number]
            assert self.index.find(*name) == number and self.index.num_confirmed(number) == len(tiers)
            assert {b: tier for tier in BlockTier for b in self.index.blocks(number, tier)} == tiers

    def teardown(self) -> None:
        self.index.sweep(1000)
        known = {(BlockTier.DEVICE, block) for ends in self.expiries.values() for block in ends}
        known |= {(tier, block) for tiers in self.tiers.values() for block, tier in tiers.items()}
        assert self.index.num_blocks == len(known) and self.index.num_retired == 0
        for number in self.tiers:
            self.index.retire(number)
        self.index.sweep(1000)
        assert self.index.num_blocks == 0 and len(self.index.reach(CHAINS[0])) == 1, (
            "without blocks, reach() has only the device tier"
        )


TestAgainstModel = AgainstModel.TestCase
TestAgainstModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=130), st.integers(0, 40))
def test_prefix_match_has_one_depth_for_each_owner(lengths: list[int], prompt_blocks: int) -> None:
    """The owners' depths differ by few and by many blocks. Some cases have more than 64 owners, too many for one word."""
    prompt = [depth.to_bytes(8, "big") for depth in range(40)]
    index = PrefixIndex()
    for number, length in enumerate(lengths):
        index.stored(index.owner(f"w{number}", 1), prompt[:length])
    assert depths(index, prompt[:prompt_blocks]) == [min(length, prompt_blocks) for length in lengths]


def test_prefix_match_has_depth_0_when_the_prompt_is_empty() -> None:
    index = PrefixIndex()
    assert depths(index, CHAINS[0]) == []
    index.stored(index.owner("a", 1), CHAINS[0])
    assert depths(index, []) == [0]


@given(blocks=st.lists(st.tuples(st.integers(0, 6), st.sets(st.integers(0, 5))), max_size=9), prompt_blocks=st.integers(0, 6))
def test_hit_ends_after_the_last_marked_block_of_the_leading_blocks(
    blocks: list[tuple[int, set[int]]], prompt_blocks: int
) -> None:
    """`blocks` has for each owner the number of leading blocks and the indices of the marked blocks, which the owner may lack."""
    index, chain = PrefixIndex(), CHAINS[0]
    for name, (length, marked) in enumerate(blocks):
        index.stored(index.owner(str(name), 0), [*chain[:length], *(end_mark(chain[at]) for at in marked)])
    expected = [max([at + 1 for at in marked if at < min(length, prompt_blocks)], default=0) for length, marked in blocks]
    assert index.match_ends(chain[:prompt_blocks]).tolist() == expected
    assert depths(index, chain[:prompt_blocks]) == [min(length, prompt_blocks) for length, _ in blocks]


def test_hit_end_counts_in_the_tier_that_has_its_mark_and_blocks() -> None:
    index, chain = PrefixIndex(), CHAINS[0]
    owner = index.owner("a", 1)
    index.stored(owner, [*chain[:3], end_mark(chain[0])])
    assert index.reach_ends(chain).tolist() == [[1]]
    index.stored(owner, [end_mark(chain[1])], BlockTier.HOST)
    index.stored(owner, [chain[3], end_mark(chain[3])], BlockTier.STORAGE)
    assert index.reach_ends(chain).tolist() == [[1], [2], [4]]


def test_number_of_a_retired_owner_is_reused_only_after_the_sweep() -> None:
    index = PrefixIndex()
    old = index.owner("a", 1)
    index.stored(old, CHAINS[0])
    index.retire(old)
    assert index.owner("a", 2) != old
    assert index.sweep(4) == 4 and index.owner("b", 1) != old and index.num_retired == 1
    assert index.sweep(100) == 2 and index.num_retired == 0
    assert index.owner("c", 1) == old
    assert depths(index, CHAINS[0])[old] == 0 and index.num_blocks == 0


def test_new_owner_keeps_its_blocks_when_it_reuses_the_number_of_a_retired_owner() -> None:
    index = PrefixIndex()
    index.speculate(index.owner("a", 1), CHAINS[0], until=10.0)
    index.retire(0)
    index.speculate(0, CHAINS[1], until=10.0)
    index.sweep(100)
    assert index.owner("b", 1) == 0
    index.speculate(0, CHAINS[0], until=20.0)
    assert depths(index, CHAINS[1]) == [0]
    index.expire(10.0)
    assert depths(index, CHAINS[0]) == [6]
    index.expire(20.0)
    assert depths(index, CHAINS[0]) == [0] and index.num_speculative == 0


def test_removal_of_a_block_has_an_immediate_effect_when_the_block_was_speculative() -> None:
    index = PrefixIndex()
    owner = index.owner("a", 1)
    index.speculate(owner, CHAINS[0], until=10.0)
    index.stored(owner, CHAINS[0])
    index.removed(owner, CHAINS[0][3:])
    assert depths(index, CHAINS[0]) == [3]


def test_confirmed_blocks_stay_when_speculative_blocks_expire() -> None:
    index = PrefixIndex()
    owner, other = index.owner("a", 1), index.owner("b", 1)
    index.stored(owner, CHAINS[0])
    index.speculate(owner, CHAINS[0], until=10.0)
    index.speculate(other, CHAINS[0], until=10.0)
    index.expire(10.0)
    assert depths(index, CHAINS[0]) == [6, 0] and index.num_speculative == 0


def test_oldest_speculative_blocks_are_dropped_when_the_limit_is_exceeded() -> None:
    index = PrefixIndex(max_speculative=9)
    owner = index.owner("a", 1)
    index.speculate(owner, CHAINS[0], until=1.0)
    index.speculate(owner, CHAINS[1][:3], until=2.0)
    assert depths(index, CHAINS[0]) == [6] and index.num_speculative == 9
    index.speculate(owner, CHAINS[2][:1], until=3.0)
    assert [depths(index, chain) for chain in CHAINS] == [[0], [3], [1]] and index.num_speculative == 4


def test_speculative_blocks_with_a_later_expiry_are_dropped_last() -> None:
    index = PrefixIndex(max_speculative=9)
    owner = index.owner("a", 1)
    index.speculate(owner, CHAINS[0], until=1.0)
    index.speculate(owner, CHAINS[1][:3], until=2.0)
    index.speculate(owner, CHAINS[0][:4], until=3.0)
    index.speculate(owner, CHAINS[2][:1], until=4.0)
    assert [depths(index, chain) for chain in CHAINS] == [[4], [3], [1]]


def test_only_the_beginning_of_a_long_prompt_is_stored_as_speculative_blocks() -> None:
    index = PrefixIndex(max_speculative=4)
    index.speculate(index.owner("a", 1), CHAINS[0], until=1.0)
    assert depths(index, CHAINS[0]) == [4]


def test_prefix_index_raises_when_the_owner_is_retired_or_unknown() -> None:
    index = PrefixIndex()
    owner = index.owner("a", 1)
    index.retire(owner)
    for call in (lambda: index.stored(owner, BLOCKS), lambda: index.removed(owner, BLOCKS), lambda: index.retire(owner)):
        with pytest.raises(KeyError):
            call()
    with pytest.raises(KeyError):
        index.stored(7, BLOCKS)
    assert index.num_confirmed(owner) == 0 and index.blocks(owner) == frozenset()


def test_garbage_collector_does_not_track_the_blocks_of_the_prefix_index() -> None:
    index = PrefixIndex()
    index.stored(index.owner("a", 1), [number.to_bytes(8, "big") for number in range(1000)])
    index.stored(index.owner("b", 1), [number.to_bytes(8, "big") for number in range(1000)], BlockTier.HOST)
    gc.collect()
    large = [found for found in gc.get_objects() if isinstance(found, dict | set) and len(found) == 1000]
    assert not [found for found in large if (999).to_bytes(8, "big") in found]
