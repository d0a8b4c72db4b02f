"""Rules of the radix cache: order of eviction, shared prefixes, and the events for the prefix index."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootstock_llm.services.shared.index.prefix_index import cache_namespace
from rootstock_llm.services.worker.core.contracts.config import EvictionPolicy
from rootstock_llm.services.worker.core.contracts.messages import Submit
from rootstock_llm.services.worker.core.contracts.plan import SamplingParams
from rootstock_llm.services.worker.core.kv.backup_queue import BackupQueue
from rootstock_llm.services.worker.core.kv.cache_events import BLOCK_TOKENS
from rootstock_llm.services.worker.core.kv.memory import TableUpdates
from rootstock_llm.services.worker.core.kv.radix_cache import RadixCache
from rootstock_llm.services.worker.core.kv.tree_node import TOKEN_BYTES, TreeNode
from tests.core.harness import Engine, chained
from tests.core.test_scheduler_basic import make


def key(*tokens: int) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


class Tree:
    """A radix cache with pages of one token. The number of a page is its token."""

    def __init__(self, policy: EvictionPolicy = EvictionPolicy.LRU) -> None:
        self.cache = RadixCache(1, policy)

    def put(self, *tokens: int, rank: int = 0) -> TreeNode:
        node, _ = self.cache.insert(self.cache.root(""), key(*tokens), np.array(tokens, dtype=np.int32), rank)
        return node

    def use(self, *tokens: int) -> None:
        """Counts a hit on the tokens, as an admission does."""
        self.cache.count_hit(self.cache.match("", key(*tokens)))

    def evicted(self, count: int = 99) -> list[list[int]]:
        """Evicts one page at a time, and returns the evicted edges in order."""
        out: list[list[int]] = []
        while len(out) < count and (freed := self.cache.evict(1)):
            out += [pages.tolist() for pages in freed]
        return out


def test_page_table_updates_omit_the_entries_of_ended_leases() -> None:
    """Two requests with one prompt end together. The second one's slot is then reused by a third request."""
    engine = make(max_running_requests=2, chunked_prefill_size=64)
    for handle in (0, 1):
        engine.submit(handle, list(range(20)), max_new_tokens=1, ignore_eos=True)
    engine.submit(2, list(range(100, 140)), max_new_tokens=5, ignore_eos=True)
    memory, sent = engine.core.memory, list[tuple[int, int]]()
    take = memory.take_table_updates

    def taken() -> TableUpdates:
        slots, firsts, counts, pages = updates = take()
        for slot, first, count in zip(slots, firsts, counts, strict=True):
            sent.extend((int(slot), place) for place in range(first, first + count))
        assert len(set(sent)) == len(sent), "no entry is written twice, because the updates of a step have no order"
        assert len(pages) == len(sent)
        sent.clear()
        return updates

    memory.take_table_updates = taken  # type: ignore[method-assign]
    engine.drain()
    for handle in range(3):
        engine.check_answer(handle)


def test_both_halves_of_a_split_node_stay_marked_as_copied() -> None:
    backups = BackupQueue(False, True, 0)
    cache = RadixCache(1, EvictionPolicy.LRU, backups=backups)
    keys = tuple(bytes([page]) for page in range(4))
    node, _ = cache.insert(cache.root(""), key(0, 1, 2, 3), np.arange(4, dtype=np.int32), 0, keys)
    cache.mark_backed(node)
    upper = cache.match("", key(0, 1, 9))
    assert backups.backed == {keys[1]: upper, keys[3]: node} and upper.backed


@given(st.integers(-8, 28))
def test_match_up_to_an_offset_equals_the_match_of_a_token_key_cut_at_the_offset(end: int) -> None:
    """The offsets, in bytes, are within a page, at the end of an edge, inside of the next edge, and beyond the token key."""
    whole, alone = Tree(), Tree()
    for tree in (whole, alone):
        tree.put(1, 2, 3)
        tree.put(1, 2, 3, 4, 5, 6)
    asked = key(1, 2, 3, 4, 5)
    beginning = asked[: max(end, 0)]
    (found, pages), (wanted, count) = whole.cache.peek("", asked, end), alone.cache.peek("", beginning)
    assert found and wanted and pages == count == min(max(end, 0) // TOKEN_BYTES, 5) and found.depth == wanted.depth
    hit, expected = whole.cache.match("", asked, end), alone.cache.match("", beginning)
    hit_pages, expected_pages = whole.cache.pages_to(hit).tolist(), alone.cache.pages_to(expected).tolist()
    assert hit_pages == expected_pages == [1, 2, 3, 4, 5][:pages] and hit.depth == pages


class TestEviction:
    @pytest.mark.parametrize(
        ("policy", "order"),
        [
            (EvictionPolicy.LRU, [[2], [3], [1], [4]]),
            (EvictionPolicy.LFU, [[2], [4], [3], [1]]),
            (EvictionPolicy.FIFO, [[1], [2], [3], [4]]),
            (EvictionPolicy.PRIORITY, [[2], [1], [4], [3]]),
        ],
    )
    def test_eviction_order_depends_on_the_policy(self, policy: EvictionPolicy, order: list[list[int]]) -> None:
        """The nodes were inserted as 1, 2, 3, 4 and last used as 2, 3, 1, 4.

        Their numbers of uses are 0 for node 2, 1 for node 4, 2 for node 3 and 3 for node 1.
        """
        tree = Tree(policy)
        for token, rank in ((1, 1), (2, 2), (3, 0), (4, 1)):
            tree.put(token, rank=rank)
        for token in (3, 3, 1, 1, 1, 4):
            tree.use(token)
        assert tree.evicted() == order

    @pytest.mark.by_day(one_in=2, seed=12)
    @pytest.mark.parametrize("policy", EvictionPolicy)
    def test_eviction_takes_leaves_before_parents(self, policy: EvictionPolicy) -> None:
        tree = Tree(policy)
        tree.put(1, 2)
        tree.put(1, 2, 3)
        tree.put(1, 2, 4)
        assert tree.evicted()[-1] == [1, 2]
        assert tree.cache.num_pages == 0

    @pytest.mark.by_day(one_in=2, seed=12)
    @pytest.mark.parametrize("policy", EvictionPolicy)
    def test_eviction_spares_locked_nodes(self, policy: EvictionPolicy) -> None:
        tree = Tree(policy)
        locked = tree.put(1, 2)
        tree.put(1, 2, 3)
        tree.put(5)
        tree.cache.lock(locked)
        assert sorted(tree.evicted()) == [[3], [5]]
        tree.cache.unlock(locked)
        assert tree.evicted() == [[1, 2]]

    @pytest.mark.by_day(one_in=4)
    @pytest.mark.parametrize("policy", EvictionPolicy)
    def test_eviction_takes_nodes_with_a_hold_last(self, policy: EvictionPolicy) -> None:
        tree = Tree(policy)
        held = tree.put(1, rank=9)
        tree.cache.hold(held)
        tree.put(2)
        tree.put(3)
        for token in (2, 3):
            tree.use(token)
        assert tree.evicted()[-1] == [1]

    def test_eviction_ignores_a_hold_that_was_undone(self) -> None:
        tree = Tree()
        held = tree.put(1)
        tree.put(2)
        tree.cache.hold(held)
        tree.cache.unhold(held)
        assert tree.evicted() == [[1], [2]]

    def test_priority_eviction_uses_the_most_urgent_rank_of_each_node(self) -> None:
        tree = Tree(EvictionPolicy.PRIORITY)
        tree.put(1, rank=3)
        tree.put(2, rank=2)
        tree.put(1, rank=1)
        assert tree.evicted() == [[2], [1]]

    def test_insertion_updates_the_last_use_of_the_whole_path(self) -> None:
        tree = Tree()
        above = tree.put(1)
        tree.put(2)
        below, _ = tree.cache.insert(above, key(5), np.array([5], dtype=np.int32))
        assert above.stamp == below.stamp
        assert tree.evicted() == [[2], [5], [1]]

    def test_lfu_eviction_does_not_count_a_match_as_a_use(self) -> None:
        tree = Tree(EvictionPolicy.LFU)
        tree.put(1)
        tree.put(2)
        tree.use(2)
        for _ in range(3):
            tree.cache.match("", key(1))
        assert tree.evicted() == [[1], [2]]

    @pytest.mark.parametrize("full", [False, True])
    def test_admitted_request_counts_as_one_hit_after_many_scheduling_passes(self, full: bool) -> None:
        """If `full`, the memory is full, so the request waits during many passes."""
        engine = make(num_pages=32, eviction_policy=EvictionPolicy.LFU)
        engine.submit(0, [1] * 12, max_new_tokens=1)
        engine.drain()
        (node,) = engine.core.memory.tree.nodes()
        before = node.hits
        if full:
            engine.submit(1, [2] * 60, max_new_tokens=30, ignore_eos=True)
            engine.turn()
        engine.submit(2, [1] * 12 + [3] * 4, max_new_tokens=40, ignore_eos=True)
        for _ in range(8):
            engine.core.queues.batch_is_full = False
            engine.turn()
        assert bool(engine.core.stats().num_waiting) is full
        engine.drain()
        assert node.hits == before + 1

    def test_eviction_removes_whole_edges_of_the_radix_tree(self) -> None:
        tree = Tree()
        tree.put(1, 2, 3)
        tree.put(4, 5)
        assert [pages.tolist() for pages in tree.cache.evict(4)] == [[1, 2, 3], [4, 5]]


class TestNamespaces:
    def test_each_pair_of_adapter_and_salt_has_a_unique_namespace(self) -> None:
        words = ("", "a", "b", "ab", "1:a", "1:b", "2:ab")
        assert len({cache_namespace(lora, salt) for lora in words for salt in words}) == len(words) ** 2

    @pytest.mark.by_day(one_in=2, seed=27)
    @pytest.mark.parametrize(
        ("first", "second", "cached"),
        [
            (("", ""), ("", ""), 28),
            (("x", "y"), ("x", "y"), 28),
            (("", ""), ("", "y"), 0),
            (("", ""), ("x", ""), 0),
            (("x", ""), ("", "x"), 0),
            (("x", "y"), ("x", "z"), 0),
            (("x", "y"), ("z", "y"), 0),
        ],
    )
    def test_requests_share_pages_only_within_a_namespace(
        self, first: tuple[str, str], second: tuple[str, str], cached: int
    ) -> None:
        engine = make()
        for handle, (lora, salt) in enumerate((first, second)):
            message = Submit(
                0, handle, f"r{handle}", np.ones(30, dtype=np.int32), SamplingParams(3, ignore_eos=True), lora=lora, salt=salt
            )
            engine.submitted[handle] = message
            engine.core.submit(message, engine.now)
            engine.drain()
            engine.check_answer(handle)
        assert engine.finishes[1].cached_tokens == cached

    def test_empty_namespaces_are_forgotten(self) -> None:
        engine = make()
        for handle in range(20):
            engine.submit(handle, [1] * 12, salt=f"tenant {handle}", max_new_tokens=1)
        engine.drain()
        engine.control.flush_cache()
        engine.core.plan(engine.now)
        assert not engine.core.memory.tree._roots

    def test_namespace_is_not_forgotten_while_a_root_is_in_use(self) -> None:
        """The root is empty at unlock(), so it becomes a candidate for forget_empty(). It gets a node before forget_empty() runs.

        If the namespace were forgotten, a second root would be made for it, and the pages below the first root would be lost.
        """
        tree = RadixCache(1)
        empty = tree.match("", b"")
        tree.lock(empty)
        tree.unlock(empty)
        node, _ = tree.insert(empty, bytes(8), np.arange(2, dtype=np.int32))
        assert tree.match("", bytes(8)) is node
        tree.hold(empty)
        tree.unhold(empty)
        tree.forget_empty()
        assert tree.nodes() == [node]


def blocks(tokens: list[int], salt: str = "") -> list[bytes]:
    """Returns the names of the whole blocks of a cached prefix, in order."""
    link, out = cache_namespace("", salt).encode(), []
    for at in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        link = chained(link, np.array(tokens[at : at + BLOCK_TOKENS], dtype=np.int32).tobytes())
        out.append(link)
    return out


EACH_PAGE = pytest.mark.parametrize("page_size", [1, 64, 128])  # part of a block, one block, two blocks
PART_OR_TWO = pytest.mark.parametrize("page_size", [1, 128])  # no code is specific to pages of exactly one block


class TestEvents:
    @staticmethod
    def engine(page_size: int) -> Engine:
        return make(page_size=page_size, num_pages=4096 // page_size, context_len=1024, chunked_prefill_size=256)

    def run(self, engine: Engine, handle: int, tokens: list[int], salt: str = "") -> set[bytes]:
        """Computes the tokens as a prompt, and returns the names of the whole blocks in the prompt's whole pages."""
        engine.submit(handle, tokens, salt=salt, max_new_tokens=1)
        engine.drain()
        page = engine.config.page_size
        return set(blocks(tokens[: len(tokens) // page * page], salt))

    @pytest.mark.by_day(one_in=2)
    @PART_OR_TWO
    def test_events_report_each_whole_block_when_the_block_is_computed(self, page_size: int) -> None:
        engine = self.engine(page_size)
        tokens = list(range(300))
        wanted = self.run(engine, 0, tokens)
        assert len(wanted) == 300 // max(page_size, 64) * max(page_size, 64) // 64
        assert engine.index == wanted

    @pytest.mark.by_day(one_in=3)
    @EACH_PAGE
    def test_events_report_the_same_blocks_for_the_shared_prefix_of_two_prompts(self, page_size: int) -> None:
        engine = self.engine(page_size)
        first = self.run(engine, 0, list(range(400)))
        second = self.run(engine, 1, [*range(200), *range(500, 700)])
        assert len(first & second) == 200 // 64
        assert engine.index == first | second

    @pytest.mark.by_day(one_in=2)
    @PART_OR_TWO
    def test_events_report_evicted_blocks(self, page_size: int) -> None:
        engine = self.engine(page_size)
        self.run(engine, 0, list(range(400)))
        engine.control.flush_cache()
        engine.check()
        assert engine.index == set()
        assert engine.index | self.run(engine, 1, list(range(400))) == engine.index

    @pytest.mark.by_day(one_in=3, seed=4)
    @EACH_PAGE
    def test_events_report_a_reset_when_a_flush_removes_most_blocks(self, page_size: int) -> None:
        engine = self.engine(page_size)
        for handle in range(3):
            self.run(engine, handle, list(range(handle, 400 + handle)))
        kept = list(range(2, 402))
        engine.submit(3, kept, max_new_tokens=90, ignore_eos=True)
        engine.turn()
        engine.turn()
        assert engine.core.take_cache_events() is None
        engine.control.flush_cache()
        events = engine.core.take_cache_events()
        assert events is not None and events.cleared and not events.removed
        assert 0 < len(events.stored) <= 400 // 64
        engine.index = set(events.stored)
        engine.drain()
        engine.check_answer(3)

    @pytest.mark.by_day(one_in=2, seed=2)
    @EACH_PAGE
    def test_events_list_the_removed_blocks_when_a_flush_removes_few(self, page_size: int) -> None:
        engine = self.engine(page_size)
        self.run(engine, 0, list(range(400)))
        self.run(engine, 1, list(range(200, 330)))
        engine.submit(2, list(range(400)), max_new_tokens=90, ignore_eos=True)
        engine.turn()
        engine.turn()
        engine.control.flush_cache()
        events = engine.core.take_cache_events()
        assert events is not None and not events.cleared and not events.stored and len(events.removed) in (1, 2)
        engine.index -= set(events.removed)
        engine.drain()

    @pytest.mark.by_day(one_in=2)
    @PART_OR_TWO
    def test_names_of_blocks_differ_between_namespaces(self, page_size: int) -> None:
        engine = self.engine(page_size)
        first = self.run(engine, 0, list(range(400)))
        second = self.run(engine, 1, list(range(400)), salt="tenant")
        assert not first & second and engine.index == first | second

    @pytest.mark.by_day(one_in=2, seed=2)
    @PART_OR_TWO
    def test_events_report_a_reset_when_the_memory_is_reset(self, page_size: int) -> None:
        engine = self.engine(page_size)
        self.run(engine, 0, list(range(400)))
        engine.turn()
        engine.control.reset_memory()
        events = engine.core.take_cache_events()
        assert events is not None and events.cleared and not events.stored and not events.removed

    @pytest.mark.by_day(one_in=2)
    @PART_OR_TWO
    def test_events_omit_a_block_that_was_cached_and_evicted_between_two_messages(self, page_size: int) -> None:
        engine = self.engine(page_size)
        tree = engine.core.memory.tree
        tokens = np.arange(256, dtype=np.int32)
        tree.insert(tree.root(""), tokens.tobytes(), engine.core.memory.pages.alloc(256 // page_size))
        engine.control.flush_cache()
        assert engine.core.take_cache_events() is None
