"""Rules for the deletion of a salt and for quotas: pages that are found, used and copied afterwards."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootstock_llm.services.worker.core.contracts.messages import Finish, SessionTurn
from rootstock_llm.services.worker.core.contracts.transfers import UNASKED, Deleted, Fact, Selection, Tier
from rootstock_llm.services.worker.core.control import SchedulerControl
from rootstock_llm.services.worker.core.kv.radix_cache import STALE_ENTRIES, RadixCache, is_retired, retired_name
from rootstock_llm.services.worker.core.tiers.page_keys import tag_of
from rootstock_llm.services.worker.exec.contracts.operations import DeleteStored
from tests.core.harness import Engine, slow, small
from tests.core.peers import Pair, computed_tokens

EVERYWHERE = (Tier.DEVICE, Tier.HOST, Tier.STORAGE)


def tiered(**changes: Any) -> Engine:
    return small(True, changes.pop("page_moved_s", 0.0), **{"host_pages": 64, "has_storage": True, "num_pages": 48, **changes})


def gb(pages: int, page_bytes: int = 64) -> float:
    return pages * page_bytes / 1e9


def prompt(number: int, length: int = 40) -> list[int]:
    return [number] * length


def ask(engine: Engine, handle: int, ids: list[int], salt: str, **params: Any) -> Finish:
    engine.submit(handle, ids, max_new_tokens=4, ignore_eos=True, salt=salt, **params)
    engine.drain()
    engine.check_answer(handle)
    return engine.finishes[handle]


def delete(engine: Engine, salt: str) -> int:
    """Deletes a salt in every tier, as the control service does. Returns the number of pages deleted from the storage."""
    engine.control.forget_salt(salt, EVERYWHERE)
    done: Future[Deleted] = Future()
    engine.executor.apply(DeleteStored(Selection(tag(engine, salt)), done))
    deleted = done.result(0)
    engine.core.ended(Fact(UNASKED, dropped=deleted.dropped), engine.now)
    engine.check()
    return deleted.pages


def tag(engine: Engine, salt: str) -> bytes:
    found = engine.control.storage_tag(salt)
    assert found is not None
    return found


def kept(engine: Engine, salt: str) -> int:
    """Returns the number of the salt's pages in the host tier plus their number in the storage."""
    tiers = engine.core.tiers
    assert tiers is not None
    in_host = [key for key in tiers._host._cached if tag_of(key) == tag(engine, salt)]
    return len(in_host) + sum(tag_of(key) == tag(engine, salt) for key in engine.executor.storage)


@pytest.mark.parametrize("salt", ["a", ""])
def test_pages_of_a_deleted_salt_are_not_found_and_pages_of_other_salts_stay(salt: str) -> None:
    engine = slow(tiered())
    for handle, each in enumerate(("a", "", "b")):
        ask(engine, handle, prompt(0), each)
    assert delete(engine, salt) == 10 and kept(engine, salt) == 0
    for handle, each in enumerate(("a", "", "b"), 10):
        assert ask(engine, handle, prompt(0), each).cached_tokens == (0 if each == salt else 36)
    assert kept(engine, salt) == 20, "pages of later requests are copied to both tiers"


def test_running_requests_of_a_deleted_salt_leave_no_cached_page() -> None:
    """A decoding request and a waiting request of the salt get their whole output.

    Later requests do not find the pages of these two requests, and the pages are not copied.
    """
    engine = slow(tiered(max_running_requests=1, num_pages=24))
    ask(engine, 0, prompt(0), "a")
    engine.submit(1, prompt(0), max_new_tokens=20, ignore_eos=True, salt="a")
    engine.submit(2, prompt(0), max_new_tokens=4, ignore_eos=True, salt="a")
    for _ in range(6):
        engine.turn()
    assert engine.core.stats().num_running == 1
    delete(engine, "a")
    engine.drain()
    engine.check_answer(1)
    engine.check_answer(2)
    engine.turn()
    assert kept(engine, "a") == 0 and engine.core.memory.tree.num_pages == 0
    assert not any(is_retired(name) for name in engine.core.memory.tree.names())
    assert ask(engine, 3, prompt(0), "a").cached_tokens == 0


def test_salt_in_use_can_be_deleted_twice_by_different_controls() -> None:
    """Each deletion gives the retired tree a unique name, whichever SchedulerControl deletes the salt."""
    engine = slow(tiered())
    for handle in range(2):
        engine.submit(handle, prompt(0), max_new_tokens=20, ignore_eos=True, salt="a")
        engine.turn()
        engine.turn()
        SchedulerControl(engine.core).forget_salt("a", EVERYWHERE)
    assert len([name for name in engine.core.memory.tree.names() if is_retired(name)]) == 2
    engine.drain()
    engine.check_answer(0)
    engine.check_answer(1)


def test_retracted_request_of_a_deleted_salt_finishes_and_leaves_no_page() -> None:
    engine = slow(tiered(retract_interval=3))
    engine.submit(0, prompt(0), max_new_tokens=24, ignore_eos=True, salt="a")
    for _ in range(5):
        engine.turn()
    delete(engine, "a")
    engine.submit(1, prompt(0), max_new_tokens=4, ignore_eos=True, salt="a")
    engine.drain()
    engine.check_answer(0)
    engine.check_answer(1)
    assert engine.core.stats().retractions_total > 0
    delete(engine, "a")
    engine.turn()
    assert kept(engine, "a") == 0 and engine.core.memory.tree.num_pages == 0


@settings(max_examples=15, deadline=None)
@given(turns=st.integers(1, 14))
def test_running_page_operations_of_a_deleted_salt_publish_no_page(turns: int) -> None:
    """Running imports, and running copies to the host or the storage, are discarded in whichever step the salt is deleted."""
    engine = slow(tiered(page_moved_s=0.01, chunked_prefill_size=64))
    ask(engine, 0, prompt(0), "a")
    engine.control.flush_cache()
    engine.submit(1, prompt(0, 60), max_new_tokens=1, ignore_eos=True, salt="a")
    engine.submit(2, prompt(1), max_new_tokens=1, ignore_eos=True, salt="a")
    for _ in range(turns):
        engine.turn()
    engine.control.forget_salt("a", EVERYWHERE)
    engine.drain()
    engine.turn()
    stats = engine.core.stats()
    assert (engine.core.memory.tree.num_pages, stats.host_pages_used, stats.num_importing) == (0, 0, 0)
    delete(engine, "a")  # the executor, too, deletes stored pages after all earlier operations
    assert kept(engine, "a") == 0 and engine.core.settled
    engine.check_answer(1)
    engine.check_answer(2)
    assert ask(engine, 3, prompt(0), "a").cached_tokens == 0


def test_session_of_a_deleted_salt_continues() -> None:
    engine = slow(tiered())
    engine.open_session("s")
    ask(engine, 0, prompt(0, 20), "a", session=SessionTurn("s"))
    assert engine.control.forget_salt("a", (Tier.DEVICE,)) > 0
    assert engine.core.memory.tree.num_pages == 0, "pages that the session holds are deleted, too"
    assert ask(engine, 1, prompt(1, 8), "a", session=SessionTurn("s")).cached_tokens in (0, 20)
    assert ask(engine, 2, prompt(2, 4), "a", session=SessionTurn("s")).cached_tokens > 20
    engine.core.close_session("s")
    engine.check()


@pytest.mark.parametrize("turns", [1, 9], ids=["during the computation", "after the computation"])
def test_reservation_of_a_deleted_salt_is_not_read(turns: int) -> None:
    """The salt is deleted on both workers. The request continues without the pages, and no request finds them."""
    pair = Pair()
    for handle, salt in enumerate("ab"):
        pair.first.submit(handle, prompt(0), hand_over=pair.new_reservation(), ignore_eos=True, max_new_tokens=4, salt=salt)
    for _ in range(turns):
        pair.first.turn()
    assert len(pair.first.core.reservations) == (2 if turns > 1 else 0)
    for engine in (pair.first, pair.second):
        engine.control.forget_salt("a", EVERYWHERE)
        engine.drain()
    assert len(pair.first.core.reservations) == 1, "the reservation of the other salt stays"
    for handle, salt in enumerate("ab"):
        pair.go_on(handle, prompt(0), max_new_tokens=4, salt=salt)
    pair.second.drain()
    pair.turn()
    pair.assert_all_is_free()
    cached = [pair.second.finishes[handle].cached_tokens for handle in (0, 1)]
    assert cached == [0, 40] and computed_tokens(pair.second) > 40
    assert ask(pair.first, 3, prompt(0), "a").cached_tokens == 0


def test_pages_of_a_forgotten_salt_leave_the_device_pool_when_the_worker_has_no_tiers() -> None:
    engine = small()
    ask(engine, 0, prompt(0), "a")
    ask(engine, 1, prompt(0, 8), "")
    assert engine.control.forget_salt("a", EVERYWHERE) == 10 and engine.control.storage_tag("a") is None
    assert ask(engine, 2, prompt(0, 8), "").cached_tokens == 4 and ask(engine, 3, prompt(0), "a").cached_tokens == 0


def test_pages_of_the_same_salt_are_evicted_when_a_salt_is_at_its_quota() -> None:
    engine = slow(tiered(has_storage=False, hicache_salt_quota=gb(12), num_pages=24))
    ask(engine, 0, prompt(0), "b")
    for number in range(1, 5):
        ask(engine, number, prompt(number), "a")
    stats = engine.core.stats()
    assert kept(engine, "a") <= 12 and stats.host_over_quota_pages_total > 0 and stats.host_salts == 2
    engine.control.flush_cache()
    assert ask(engine, 10, prompt(0), "b").cached_from == {Tier.DEVICE: 0, Tier.HOST: 36}
    assert ask(engine, 11, prompt(4), "a").cached_from == {Tier.DEVICE: 0, Tier.HOST: 36}, (
        "the quota keeps the most recent pages of the salt"
    )


def test_host_keeps_the_beginning_of_a_prompt_that_exceeds_the_quota() -> None:
    engine = slow(tiered(has_storage=False, hicache_salt_quota=gb(4)))
    tiers = engine.core.tiers
    assert tiers is not None
    ask(engine, 0, prompt(0), "a")
    begin = set(tiers._host._cached)
    for handle in range(1, 3):
        ask(engine, handle, prompt(0), "a")
        assert set(tiers._host._cached) == begin and len(begin) == 4
    engine.control.flush_cache()
    assert ask(engine, 3, prompt(0), "a").cached_from == {Tier.DEVICE: 0, Tier.HOST: 16}


def test_salt_at_quota_does_not_block_copies_of_other_salts() -> None:
    engine = slow(tiered(has_storage=False, hicache_salt_quota=gb(4)))
    ask(engine, 0, prompt(0), "a")
    tiers = engine.core.tiers
    assert tiers is not None
    pinned, engine.checked = tiers._host.pin(list(tiers._host._cached)), False  # the checks do not know this reader
    ask(engine, 1, prompt(1), "a")
    ask(engine, 2, prompt(2), "b")
    assert kept(engine, "b") == 4
    tiers._host.unpin(pinned)
    engine.checked = True
    ask(engine, 3, prompt(1), "a")
    engine.control.flush_cache()
    assert ask(engine, 4, prompt(1), "a").cached_from == {Tier.DEVICE: 0, Tier.HOST: 16}, "the pages are copied at their next use"


@pytest.mark.parametrize("salt", ["a", ""])
def test_storage_keeps_the_beginning_of_a_prompt_that_exceeds_the_quota(salt: str) -> None:
    engine = slow(tiered(hicache_storage_salt_quota=gb(8, 8 << 20), page_bytes=8 << 20))
    ask(engine, 0, prompt(0), salt)
    stored = 4 if salt else 10
    assert len(engine.executor.storage) == stored
    engine.control.flush_cache()
    engine.control.flush_tiers((Tier.HOST,))
    found = ask(engine, 1, prompt(0), salt).cached_from[Tier.STORAGE]
    assert found == 4 * min(stored, 9)


def test_retired_trees_leave_no_entry_in_the_radix_cache() -> None:
    tree = RadixCache(1)
    for number in range(2 * STALE_ENTRIES):
        tree.insert(tree.root("0:a"), np.arange(2, dtype=np.int32).tobytes(), np.arange(2, dtype=np.int32))
        tree.retire("0:a", retired_name("0:a", number))
        assert len(tree.forget_retired()) == 1
        tree.forget_empty()
    assert tree.names() == [] and tree.num_nodes == tree.num_pages == tree.num_evictable == 0
