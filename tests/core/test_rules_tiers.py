"""Rules for the tiers below the pool: copies, their order and limits, imports and deletions."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootstock_llm.services.worker.core.contracts.messages import Finish
from rootstock_llm.services.worker.core.contracts.transfers import (
    ALL,
    UNASKED,
    Fact,
    OperationKind,
    PageOperation,
    Tier,
    WritePolicy,
)
from rootstock_llm.services.worker.core.tiers.backups import MOST_BACK_UPS
from rootstock_llm.services.worker.core.tiers.page_keys import SECRET_BYTES, PageKeys
from rootstock_llm.services.worker.exec.contracts.operations import DeleteStored
from tests.core.harness import Engine, slow, small

MIB = 1 << 20  # an operation moves at most 16 MiB


def tiered(overlap: bool = True, page_moved_s: float = 0.0, **changes: Any) -> Engine:
    return small(overlap, page_moved_s, **{"host_pages": 64, **changes})


def prompt(number: int, length: int = 40) -> list[int]:
    return [number] * length


def ask(engine: Engine, handle: int, ids: list[int], max_new_tokens: int = 4, **params: Any) -> Finish:
    engine.submit(handle, ids, max_new_tokens=max_new_tokens, ignore_eos=True, **params)
    engine.drain()
    engine.check_answer(handle)
    return engine.finishes[handle]


def moved(engine: Engine, kind: OperationKind) -> list[PageOperation]:
    """Returns the operations of one kind, in the order in which they began."""
    return [operation for plan in engine.plans for operation in plan.operations if operation.kind is kind]


def num_moved(engine: Engine, kind: OperationKind) -> int:
    return sum(len(operation.keys) for operation in moved(engine, kind))


def keys_of(ids: list[int]) -> list[bytes]:
    """Returns the page keys of the whole pages of a prompt without a salt."""
    keys = PageKeys(bytes(SECRET_BYTES), b"", 4)
    return keys.after(keys.root(""), np.array(ids, dtype=np.int32).tobytes())


def num_running(engine: Engine) -> int:
    """Returns the number of running operations that read or write device pages."""
    tiers = engine.core.tiers
    assert tiers is not None
    return tiers.num_running


def turns(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.turn()


class TestImports:
    @pytest.mark.by_day(one_in=2, seed=2)
    @pytest.mark.parametrize("overlap", [True, False])
    def test_evicted_pages_are_loaded_from_the_host(self, overlap: bool) -> None:
        engine = tiered(overlap)
        for number in range(3):
            ask(engine, number, prompt(number))  # each needs more than half of the pool
        finish = ask(engine, 9, prompt(0))
        assert finish.cached_tokens == 36
        assert finish.cached_from == {Tier.DEVICE: 0, Tier.HOST: 36}
        stats = engine.core.stats()
        assert stats.loaded_pages_total == 9 and stats.lost_pages_total == 0 and stats.recomputed_pages_total == 0

    @pytest.mark.by_day(one_in=2, seed=2)
    @pytest.mark.parametrize("overlap", [True, False])
    def test_pages_lost_by_the_host_are_fetched_from_the_storage(self, overlap: bool) -> None:
        engine = tiered(overlap, has_storage=True)
        ask(engine, 0, prompt(0))
        assert engine.core.stats().storage_pages == 10
        engine.control.flush_cache()
        assert engine.control.flush_tiers((Tier.HOST,)) == 10
        assert ask(engine, 1, prompt(0)).cached_from == {Tier.DEVICE: 0, Tier.STORAGE: 36}
        assert engine.core.stats().fetched_pages_total == 9 and num_moved(engine, OperationKind.LOAD) == 0

    def test_pages_of_one_prompt_come_from_the_device_and_the_host_and_the_storage(self) -> None:
        """Of the prompt's ten pages, the device has the first two. The host lacks the last ones, which the storage has."""
        engine = slow(tiered(has_storage=True, host_pages=24, chunked_prefill_size=64))
        for number in range(3):
            ask(engine, number, prompt(number))
        engine.control.flush_cache()
        ask(engine, 8, prompt(0, 9))
        in_host = [key in keys_of(prompt(0)) for key in moved_to_host(engine)].count(True)
        finish = ask(engine, 9, prompt(0))
        assert 2 < in_host < 9
        assert finish.cached_from == {Tier.DEVICE: 8, Tier.HOST: 4 * in_host - 8, Tier.STORAGE: 36 - 4 * in_host}

    def test_pages_on_the_device_are_not_loaded(self) -> None:
        engine = tiered()
        ask(engine, 0, prompt(0))
        assert ask(engine, 1, prompt(0)).cached_from == {Tier.DEVICE: 36}
        assert num_moved(engine, OperationKind.LOAD) == 0

    @settings(max_examples=12, deadline=None)
    @given(asked=st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(0, 1), st.integers(1, 32)), max_size=6))
    def test_request_finds_only_pages_of_the_same_salt(self, asked: list[tuple[str, int, int]]) -> None:
        engine = slow(tiered(has_storage=True, host_pages=400))
        known: dict[str, list[list[int]]] = {"": [], "a": [], "b": []}
        for handle, (salt, number, length) in enumerate(asked):
            ids = prompt(number, length)
            finish = ask(engine, handle, ids, salt=salt)
            shared = max((common_pages(ids[:-1], other) for other in known[salt]), default=0)
            assert finish.cached_tokens == 4 * shared
            known[salt].append(ids + engine.outputs[handle][:-1])
            engine.control.flush_cache()
            if handle % 2:
                engine.control.flush_tiers((Tier.HOST,))

    def test_importing_request_delays_no_other_request(self) -> None:
        engine = tiered(page_moved_s=0.003)
        ask(engine, 0, prompt(0))
        engine.control.flush_cache()
        engine.submit(1, prompt(0), max_new_tokens=4, ignore_eos=True)
        engine.submit(2, [9], max_new_tokens=2, ignore_eos=True)
        turns(engine, 2)
        assert engine.core.stats().num_importing == 1 and engine.outputs[2]
        engine.drain()
        assert engine.finishes[1].cached_tokens == 36


def common_pages(one: list[int], other: list[int]) -> int:
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return same // 4


def moved_to_host(engine: Engine) -> list[bytes]:
    """Returns, for each written page of the fake host memory, the page key that was copied to it last."""
    held: dict[int, bytes] = {}
    for operation in moved(engine, OperationKind.BACK_UP):
        held |= zip(operation.host_pages.tolist(), operation.keys, strict=True)
    return list(held.values())


def test_output_pages_are_found_only_with_the_same_salt() -> None:
    """The prompt does not fill a page, so every whole page also has output tokens."""
    engine = slow(tiered())
    engine.submit(0, [5, 5], salt="a", max_new_tokens=30, ignore_eos=True)
    engine.drain()
    said = [5, 5, *engine.outputs[0]]
    engine.control.flush_cache()
    assert engine.core.stats().host_pages_used == 7
    assert ask(engine, 1, said).cached_tokens == ask(engine, 2, said, salt="b").cached_tokens == 0
    engine.control.flush_cache()
    assert ask(engine, 3, said, salt="a").cached_tokens == 28


class TestCopies:
    def test_write_back_does_not_copy_pages_in_use(self) -> None:
        engine = tiered()
        engine.submit(0, prompt(0), max_new_tokens=8, ignore_eos=True)
        while not engine.finishes:
            assert num_running(engine) == 0
            engine.turn()
        engine.drain()
        assert num_moved(engine, OperationKind.BACK_UP) == 11

    def test_write_back_copies_pages_in_the_order_in_which_requests_end(self) -> None:
        engine = tiered(page_moved_s=0.05, chunked_prefill_size=64, num_pages=64)
        left = [3, 1, 2, 0]
        for number in range(4):
            engine.submit(number, prompt(number, 12), max_new_tokens=2 + 2 * left.index(number), ignore_eos=True)
        engine.drain()
        order = [key for operation in moved(engine, OperationKind.BACK_UP) for key in operation.keys]
        begins = [order.index(keys_of(prompt(number, 12))[0]) for number in left]
        assert begins == sorted(begins)

    @pytest.mark.parametrize("policy", WritePolicy)
    def test_pages_of_a_prefix_are_copied_before_the_following_pages(self, policy: WritePolicy) -> None:
        engine = tiered(hicache_write_policy=policy, page_bytes=8 * MIB, page_moved_s=0.003, num_pages=32)
        tails = [prompt(0, 16) + prompt(number, 16) for number in (1, 2, 1, 1, 2)]
        for handle, ids in enumerate(tails):
            ask(engine, handle, ids)
        order = [key for operation in moved(engine, OperationKind.BACK_UP) for key in operation.keys]
        for ids in tails:
            keys = [key for key in keys_of(ids) if key in order]
            assert keys == keys_of(ids)[: len(keys)] and [order.index(key) for key in keys] == sorted(map(order.index, keys))
        assert len(order) == len(set(order)) >= 7

    def test_write_through_copies_pages_of_running_requests(self) -> None:
        engine = tiered(hicache_write_policy=WritePolicy.WRITE_THROUGH)
        engine.submit(0, prompt(0), max_new_tokens=20, ignore_eos=True)
        while num_moved(engine, OperationKind.BACK_UP) < 10:
            engine.turn()
        assert not engine.finishes
        engine.drain()
        engine.check_answer(0)

    def test_write_through_selective_copies_pages_with_a_second_hit(self) -> None:
        engine = tiered(hicache_write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE)
        copied = []
        for handle in range(3):
            ask(engine, handle, prompt(0))
            copied.append(num_moved(engine, OperationKind.BACK_UP))
        assert copied == [0, 0, 9]

    def test_pages_in_the_host_are_not_copied_again(self) -> None:
        engine = tiered()
        for handle in range(3):
            ask(engine, handle, prompt(0))
            engine.control.flush_cache()
        counts = [moved_to_host(engine).count(key) for key in keys_of(prompt(0))]
        assert counts == [1] * 10

    @pytest.mark.parametrize("policy", [WritePolicy.WRITE_BACK, WritePolicy.WRITE_THROUGH])
    def test_pages_lost_by_the_host_are_copied_again_when_used(self, policy: WritePolicy) -> None:
        engine = slow(tiered(hicache_write_policy=policy))
        ask(engine, 0, prompt(0))
        engine.control.flush_tiers((Tier.HOST,))
        ask(engine, 1, prompt(0))
        engine.control.flush_cache()
        assert ask(engine, 2, prompt(0)).cached_from == {Tier.DEVICE: 0, Tier.HOST: 36}

    def test_waiting_copies_precede_copies_of_a_later_request(self) -> None:
        """Each operation copies one page, and eight operations run at the same time.

        Some pages of the first prompt still wait when the second request ends.
        """
        engine = tiered(page_bytes=16 * MIB, page_moved_s=0.2, num_pages=64, chunked_prefill_size=64)
        for handle in range(2):
            engine.submit(handle, prompt(handle), max_new_tokens=4, ignore_eos=True)
            while handle not in engine.finishes:
                engine.turn()
        assert 0 < len(moved_to_host(engine)) < 10
        engine.drain()
        assert moved_to_host(engine) == [*keys_of(prompt(0)), *keys_of(prompt(1))]

    def test_copies_to_the_host_are_limited(self) -> None:
        engine = tiered(has_storage=True, page_bytes=8 * MIB, page_moved_s=0.02, num_pages=64)
        for number in range(4):
            engine.submit(number, prompt(number, 32), max_new_tokens=4, ignore_eos=True)
        most = 0
        while len(engine.finishes) < 4 or not engine.core.settled:
            engine.turn()
            most = max(most, num_running(engine))
        assert most == MOST_BACK_UPS
        assert {len(operation.keys) for operation in moved(engine, OperationKind.BACK_UP)} == {1, 2}  # 16 MiB at most

    def test_host_keeps_the_beginning_of_a_prompt_larger_than_half_of_the_tier(self) -> None:
        engine = tiered(host_pages=8)
        ask(engine, 0, prompt(0))
        assert engine.core.stats().backed_up_pages_total == 4
        engine.control.flush_cache()
        assert ask(engine, 1, prompt(0)).cached_from == {Tier.DEVICE: 0, Tier.HOST: 16}

    @pytest.mark.parametrize("chunk", [16, 64])
    def test_host_evicts_the_end_of_a_prompt_first(self, chunk: int) -> None:
        """The prompt is copied in three operations, or in one if the chunk is larger."""
        engine = tiered(host_pages=24, chunked_prefill_size=chunk)
        for number in range(3):
            ask(engine, number, prompt(number))
        left = [key in moved_to_host(engine) for key in keys_of(prompt(0))]
        assert left == [True] * 4 + [False] * 6

    def test_pages_evicted_before_a_copy_are_counted_as_lost(self) -> None:
        engine = tiered(page_bytes=16 * MIB, page_moved_s=0.5)
        for number in range(4):
            engine.submit(number, prompt(number), max_new_tokens=4, ignore_eos=True)
        engine.drain()
        for number in range(4):
            engine.check_answer(number)
        stats = engine.core.stats()
        assert stats.lost_pages_total > 0 and engine.core.settled

    def test_flushed_pages_are_forgotten_when_a_running_copy_ends(self) -> None:
        engine = slow(tiered(page_moved_s=0.01, chunked_prefill_size=64))
        engine.submit(0, prompt(0), max_new_tokens=4, ignore_eos=True)
        while not num_running(engine):
            engine.turn()
        engine.control.flush_cache()
        assert engine.core.memory.tree.num_pages == 10, "a running copy keeps the pages in the tree"
        engine.drain()
        assert engine.core.memory.tree.num_pages == engine.core.stats().host_pages_used == 0
        assert ask(engine, 1, prompt(0)).cached_tokens == 0

    def test_remaining_pages_of_a_failed_copy_are_copied_when_the_pages_are_used_again(self) -> None:
        engine = tiered(chunked_prefill_size=64)
        engine.executor.pages_moved = lambda operation: 3 if len(moved(engine, OperationKind.BACK_UP)) == 1 else 0
        ask(engine, 0, prompt(0))
        assert engine.core.stats().host_pages_used == 3
        engine.executor.pages_moved = lambda operation: len(operation.keys)
        ask(engine, 1, prompt(0))
        assert engine.core.stats().host_pages_used == 10

    def test_failed_copy_is_not_repeated_before_the_next_use(self) -> None:
        """The request has three nodes, so at most three copies begin. Two of them run at the same time."""
        engine = tiered()
        engine.executor.pages_moved = lambda operation: 0
        engine.submit(0, prompt(0), max_new_tokens=4, ignore_eos=True)
        turns(engine, 60)
        assert engine.core.settled and len(moved(engine, OperationKind.BACK_UP)) <= 3

    def test_evicted_pages_without_a_copy_count_as_lost(self) -> None:
        engine = tiered(chunked_prefill_size=64)
        engine.executor.pages_moved = lambda operation: 0
        ask(engine, 0, prompt(0))
        engine.control.flush_cache()
        assert engine.core.stats().lost_pages_total == 0, "a flush is no eviction, so no page counts as lost"
        for number in range(1, 3):
            ask(engine, number, prompt(number))
        assert engine.core.stats().lost_pages_total > 0

    def test_pages_not_written_to_the_storage_are_counted(self) -> None:
        engine = tiered(has_storage=True, chunked_prefill_size=64)
        engine.executor.pages_moved = lambda operation: 4 if operation.kind is OperationKind.STORE else len(operation.keys)
        ask(engine, 0, prompt(0))
        stats = engine.core.stats()
        assert (stats.stored_pages_total, stats.unstored_pages_total, stats.storage_pages) == (4, 6, 4)

    def test_pages_are_not_stored_when_too_many_pages_wait_for_the_storage(self) -> None:
        engine = tiered(has_storage=True, host_pages=16, page_moved_s=0.02, num_pages=64)
        tiers, most = engine.core.tiers, 0
        assert tiers is not None
        for number in range(4):
            engine.submit(number, prompt(number, 24), max_new_tokens=4, ignore_eos=True)
        while not (engine.core.idle and engine.core.settled):
            engine.turn()
            most = max(most, tiers.num_storing)
        assert 0 < most <= 8, "at most half of the pages in host memory wait for the storage"
        stats = engine.core.stats()
        assert stats.unstored_pages_total > 0
        assert 0 < stats.stored_pages_total < stats.backed_up_pages_total


class TestForgetting:
    def test_flushed_host_has_no_pages(self) -> None:
        engine = tiered()
        ask(engine, 0, prompt(0))
        engine.control.flush_cache()
        assert engine.control.flush_tiers((Tier.HOST,)) == 10
        assert engine.core.stats().host_pages_used == 0
        assert ask(engine, 1, prompt(0)).cached_tokens == 0

    def test_flushed_storage_has_no_pages_and_the_host_keeps_pages(self) -> None:
        engine = tiered(has_storage=True)
        ask(engine, 0, prompt(0))
        assert engine.control.flush_tiers((Tier.STORAGE,)) == 10
        engine.control.flush_cache()
        assert ask(engine, 1, prompt(0)).cached_from == {Tier.DEVICE: 0, Tier.HOST: 36}
        engine.control.flush_cache()
        engine.control.flush_tiers((Tier.HOST, Tier.STORAGE))
        assert ask(engine, 2, prompt(0)).cached_tokens == 0

    def test_running_load_continues_when_the_host_is_flushed(self) -> None:
        engine = tiered(page_moved_s=0.003, num_pages=32)
        ask(engine, 0, prompt(0))
        engine.control.flush_cache()
        engine.submit(1, prompt(0), max_new_tokens=4, ignore_eos=True)
        engine.turn()
        assert engine.control.flush_tiers((Tier.HOST,)) == 10
        assert engine.core.stats().host_pages_used == 0
        engine.drain()
        assert engine.finishes[1].cached_tokens == 36
        engine.check_answer(1)

    def test_running_copy_is_discarded_when_the_host_is_flushed(self) -> None:
        engine = slow(tiered(page_moved_s=0.01, chunked_prefill_size=64))
        engine.submit(0, prompt(0), max_new_tokens=4, ignore_eos=True)
        while not num_running(engine):
            engine.turn()
        engine.control.flush_tiers((Tier.HOST,))
        engine.drain()
        assert engine.core.stats().host_pages_used == 0
        assert engine.core.memory.tree.num_pages == 10, "the pages stay in the pool"
        ask(engine, 1, prompt(0))
        assert engine.core.stats().host_pages_used == 10, "the pages are copied at their next use"

    def test_running_store_operation_is_discarded_when_the_storage_is_flushed(self) -> None:
        engine = tiered(page_moved_s=0.01, has_storage=True, chunked_prefill_size=64)
        engine.submit(0, prompt(0), max_new_tokens=4, ignore_eos=True)
        while not moved(engine, OperationKind.STORE):
            engine.turn()
        engine.control.flush_tiers((Tier.STORAGE,))
        engine.drain()
        engine.executor.apply(DeleteStored(ALL, Future()))  # the executor, too, deletes stored pages after all earlier operations
        assert engine.core.stats().storage_pages == 0
        ask(engine, 1, prompt(0))
        assert engine.core.stats().storage_pages == 10, "the pages are stored at their next use"

    def test_node_does_not_count_as_copied_when_every_copy_is_lost(self) -> None:
        """The host loses its copies by a flush, and the storage reports its copies as dropped.

        Also checks that the table of copied nodes has no evicted node.
        """
        engine = tiered(has_storage=True, chunked_prefill_size=64)
        ask(engine, 0, prompt(0))
        (node,) = engine.core.memory.tree.nodes()
        backed = engine.core.tiers.queue.backed  # type: ignore[union-attr]
        assert node.backed and list(backed.values()) == [node]
        engine.control.flush_tiers((Tier.HOST,))
        assert node.backed, "the node is backed by the storage"
        engine.core.ended(Fact(UNASKED, dropped=tuple(keys_of(prompt(0)))), engine.now)
        assert not node.backed and not backed
        ask(engine, 1, prompt(0))
        assert node.backed
        engine.control.flush_cache()
        assert not backed, "an evicted node is forgotten"

    def test_waiting_stores_are_dropped_when_the_host_is_flushed(self) -> None:
        engine = tiered(has_storage=True, page_moved_s=0.01, page_bytes=8 * MIB)
        engine.submit(0, prompt(0), max_new_tokens=4, ignore_eos=True)
        while not engine.core.stats().stored_pages_total:
            engine.turn()
        engine.control.flush_tiers((Tier.HOST,))
        before = num_moved(engine, OperationKind.STORE)
        unstored = engine.core.stats().unstored_pages_total
        assert unstored > 0 and num_moved(engine, OperationKind.STORE) == before

    def test_no_page_in_the_host_is_found_after_the_weights_are_replaced(self) -> None:
        engine = tiered()
        ask(engine, 0, prompt(0))
        engine.control.replace_weights("others")
        assert ask(engine, 1, prompt(0)).cached_tokens == 0

    def test_memory_is_not_reset_during_an_operation(self) -> None:
        engine = slow(tiered(page_moved_s=0.05))
        engine.submit(0, prompt(0), max_new_tokens=4, ignore_eos=True)
        while engine.core.settled:
            engine.turn()
        assert engine.core.idle and engine.prev is None
        with pytest.raises(AssertionError):
            engine.control.reset_memory()
        engine.drain()
        engine.control.reset_memory()
        assert ask(engine, 1, prompt(0)).cached_from == {Tier.DEVICE: 0, Tier.HOST: 36}


class TestFacts:
    def test_completion_of_an_unknown_operation_is_refused(self) -> None:
        with pytest.raises(AssertionError, match="belongs to a running operation"):
            tiered().core.ended(Fact(7), 0.0)

    def test_second_completion_of_an_operation_is_refused(self) -> None:
        engine = tiered()
        ask(engine, 0, prompt(0))
        with pytest.raises(AssertionError, match="belongs to a running operation"):
            engine.core.ended(Fact(moved(engine, OperationKind.BACK_UP)[0].op_id, 10), engine.now)

    def test_worker_without_tiers_refuses_the_completion_of_an_operation(self) -> None:
        with pytest.raises(AssertionError, match="only workers with tiers"):
            tiered(host_pages=0).core.ended(Fact(UNASKED), 0.0)

    def test_pages_of_another_worker_are_found_when_the_storage_reports_the_pages(self) -> None:
        other = tiered(has_storage=True)
        ask(other, 0, prompt(0))
        engine = tiered(has_storage=True)
        engine.executor.storage = other.executor.storage
        assert ask(engine, 0, prompt(1)).cached_tokens == 0
        engine.core.ended(Fact(UNASKED, stored=tuple(other.executor.storage)), engine.now)
        assert ask(engine, 1, prompt(0)).cached_from == {Tier.DEVICE: 0, Tier.STORAGE: 36}

    def test_pages_dropped_by_the_storage_are_not_fetched(self) -> None:
        engine = tiered(has_storage=True)
        ask(engine, 0, prompt(0))
        engine.control.flush_cache()
        engine.control.flush_tiers((Tier.HOST,))
        engine.core.ended(Fact(UNASKED, dropped=tuple(keys_of(prompt(0))[5:])), engine.now)
        assert ask(engine, 1, prompt(0)).cached_from == {Tier.DEVICE: 0, Tier.STORAGE: 20}
