"""Rules for blocks in the lower tiers: a block is reported in the tier of its slowest page while all its pages can be read."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootstock_llm.services.shared.index.prefix_index import BlockTier
from rootstock_llm.services.worker.core.contracts.transfers import (
    UNASKED,
    Fact,
    OperationKind,
    PageOperation,
    Tier,
    TierBlock,
    WritePolicy,
)
from rootstock_llm.services.worker.core.kv import cache_events
from rootstock_llm.services.worker.core.kv.cache_events import CacheEventLog, CacheEvents
from rootstock_llm.services.worker.core.tiers.page_keys import SECRET_BYTES, PageKeys
from tests.core import harness
from tests.core.harness import Engine, chained, slow, small

PAGE_SIZES = pytest.mark.parametrize("page_size", [4, 16, 64, 128, 48])


def tiered(page_size: int = 16, **changes: Any) -> Engine:
    """Returns an engine with a pool of 512 tokens, which is too small for two prompts of 257 tokens."""
    values: dict[str, Any] = {"num_pages": 512 // page_size, "page_size": page_size, "context_len": 384}
    values |= {"chunked_prefill_size": 128, "host_pages": 4096 // page_size, "page_bytes": 16 * page_size}
    return slow(small(**{**values, **changes}))


def prompt(number: int, length: int = 257) -> list[int]:
    return [number, *range(100, 99 + length)]


def ask(engine: Engine, handle: int, ids: list[int], **params: Any) -> dict[str, int]:
    """Runs a request. Returns its cached tokens by tier."""
    engine.submit(handle, ids, max_new_tokens=2, ignore_eos=True, **params)
    engine.drain()
    engine.check_answer(handle)
    return engine.finishes[handle].cached_from


def names_of(ids: list[int], salt: str = "") -> list[bytes]:
    """Returns the names of the prompt's whole blocks."""
    tokens, link, out = np.array(ids, np.int32).tobytes(), f"0:{salt}".encode() if salt else b"", []
    for at in range(0, len(tokens) - 255, 256):
        link = chained(link, tokens[at : at + 256])
        out.append(link)
    return out


def stored(engine: Engine) -> list[PageOperation]:
    return [operation for plan in engine.plans for operation in plan.operations if operation.kind is OperationKind.STORE]


@PAGE_SIZES
def test_block_moves_through_the_tiers(page_size: int) -> None:
    engine = tiered(page_size, has_storage=True, num_pages=1024 // page_size)
    ask(engine, 0, prompt(0))
    whole = (257 // page_size * page_size) // 64
    names = names_of(prompt(0))[:whole]
    assert engine.index == set(names) and not engine.below, "a block is reported in its fastest tier only"
    engine.control.flush_cache()
    engine.check()
    assert not engine.index and engine.below == dict.fromkeys(names, BlockTier.HOST)
    engine.control.flush_tiers((Tier.HOST,))
    engine.check()
    assert engine.below == dict.fromkeys(names, BlockTier.STORAGE)
    assert ask(engine, 1, prompt(0))[Tier.STORAGE] > 0
    assert engine.index == set(names) and not engine.below
    engine.control.flush_cache()
    engine.control.flush_tiers((Tier.STORAGE,))
    engine.check()
    assert not engine.index and not engine.below


def test_evicted_block_is_reported_in_the_host_tier() -> None:
    engine = tiered()
    for number in range(4):
        ask(engine, number, prompt(number))
    assert engine.core.stats().lost_pages_total == 0
    gone = set(names_of(prompt(0)))
    assert gone.isdisjoint(engine.index) and {engine.below[name] for name in gone} == {BlockTier.HOST}
    assert ask(engine, 9, prompt(0))[Tier.HOST] == 256
    assert gone <= engine.index and gone.isdisjoint(engine.below)


def test_block_is_reported_in_the_tier_of_the_slowest_page() -> None:
    """The host has evicted the end of the first prompt, in the middle of a block."""
    engine = tiered(has_storage=True, host_pages=42)
    for number in range(3):
        ask(engine, number, prompt(number))
    engine.control.flush_cache()
    engine.check()
    tiers = engine.core.tiers
    assert tiers is not None
    in_host = [sum(key in tiers._host for key in block.keys) for operation in stored(engine)[:2] for block in operation.blocks]
    assert in_host[:4] == [4, 4, 2, 0]
    assert [engine.below[name] for name in names_of(prompt(0))] == [
        BlockTier.HOST,
        BlockTier.HOST,
        BlockTier.STORAGE,
        BlockTier.STORAGE,
    ]


def test_block_is_in_no_tier_when_a_page_is_lost() -> None:
    """A page of the second block is lost. Later blocks are still reported, although no request can find them."""
    engine = tiered(has_storage=True)
    ask(engine, 0, prompt(0))
    engine.control.flush_cache()
    engine.control.flush_tiers((Tier.HOST,))
    keys = [key for operation in stored(engine) for key in operation.keys]
    engine.core.ended(Fact(UNASKED, dropped=(keys[5],)), engine.now)
    engine.check()
    names = names_of(prompt(0))
    assert engine.below == {name: BlockTier.STORAGE for at, name in enumerate(names) if at != 1}


def test_block_is_not_in_the_host_when_the_last_page_is_missing() -> None:
    """A prompt may use 15 of the 30 host pages. The fourth block ends with the prompt's 16th page."""
    engine = tiered(host_pages=30)
    ask(engine, 0, prompt(0))
    engine.control.flush_cache()
    engine.check()
    assert engine.below == dict.fromkeys(names_of(prompt(0))[:3], BlockTier.HOST)


def test_blocks_of_a_shared_storage_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "CacheEventLog", partial(CacheEventLog, reports_storage=False))
    engine = tiered(has_storage=True)
    ask(engine, 0, prompt(0))
    engine.control.flush_cache()
    engine.check()
    assert len(engine.below) == 4 and set(engine.below.values()) == {BlockTier.HOST}
    engine.control.flush_tiers((Tier.HOST,))
    engine.check()
    assert not engine.below and ask(engine, 1, prompt(0))[Tier.STORAGE] == 256, "the shared storage has the pages"


def test_replacing_the_weights_removes_all_reported_blocks() -> None:
    engine = tiered(has_storage=True)
    ask(engine, 0, prompt(0))
    engine.control.replace_weights("r2")
    engine.check()
    assert not engine.index and not engine.below
    assert engine.core.stats().storage_pages == 16, "files of replaced weights stay until they are evicted"


def test_memory_reset_reports_the_blocks_of_lower_tiers_again() -> None:
    engine = tiered()
    ask(engine, 0, prompt(0))
    assert engine.core.take_cache_events() is None
    engine.control.reset_memory()
    events = engine.core.take_cache_events()
    assert events == CacheEvents(True, (), (), tuple(names_of(prompt(0))))


class TestRestart:
    def test_restart_reports_recorded_blocks(self) -> None:
        first, second = tiered(has_storage=True), tiered(has_storage=True)
        ask(first, 0, prompt(0), salt="mine")
        blocks = tuple(block for operation in stored(first) for block in operation.blocks)
        assert [block.name for block in blocks] == names_of(prompt(0), "mine")
        second.executor.storage = first.executor.storage
        second.core.ended(Fact(UNASKED, stored=tuple(first.executor.storage)), 0.0)
        second.check()
        assert not second.below, "page keys without block names report no block"
        second.core.ended(Fact(UNASKED, blocks=blocks), 0.0)
        second.check()
        assert second.below == dict.fromkeys(names_of(prompt(0), "mine"), BlockTier.STORAGE)
        assert ask(second, 0, prompt(0), salt="mine")[Tier.STORAGE] == 256

    def test_restart_ignores_blocks_of_other_weights_and_blocks_with_lost_pages(self) -> None:
        first, second = tiered(has_storage=True), tiered(has_storage=True)
        ask(first, 0, prompt(0))
        blocks = [block for operation in stored(first) for block in operation.blocks]
        other = TierBlock(blocks[0].name, bytes(8), blocks[0].keys)
        held = set(first.executor.storage) - set(blocks[1].keys) - {blocks[2].keys[0]}
        second.core.ended(Fact(UNASKED, stored=tuple(held)), 0.0)
        second.core.ended(Fact(UNASKED, blocks=(other, *blocks[1:])), 0.0)
        second.check()
        assert second.below == {blocks[3].name: BlockTier.STORAGE}
        second.core.ended(Fact(UNASKED, stored=(blocks[2].keys[0],)), 0.0)
        second.check()
        assert second.below == {blocks[2].name: BlockTier.STORAGE, blocks[3].name: BlockTier.STORAGE}, (
            "a block is reported when its missing page arrives"
        )

    def test_blocks_are_reported_in_several_messages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cache_events, "MOST_CHANGES", 3)
        log = CacheEventLog(16, chained, str.encode)
        for number in range(8):
            log.below(bytes([number]), BlockTier.STORAGE)
        pieces = []
        while log.has_more:
            pieces.append(log.take())
        assert [len(piece.storage) for piece in pieces if piece] == [3, 3, 2] and log.take() is None


SALTS = ["", "a"]
ASKED = st.tuples(st.sampled_from(SALTS), st.integers(0, 2), st.sampled_from([40, 130, 257, 300]))
CHANCES = st.one_of(ASKED, st.sampled_from(["flush", "host", "drop"]))


@settings(max_examples=25, deadline=None)
@given(st.lists(CHANCES, max_size=10), st.sampled_from([4, 16, 48, 128]), st.sampled_from(list(WritePolicy)), st.booleans())
def test_reported_blocks_match_the_tiers(happens: list[Any], page_size: int, policy: WritePolicy, has_storage: bool) -> None:
    """After each random event, compares the reported tiers of all blocks so far with the tiers of their pages.

    A small host evicts some of the pages.
    """
    engine = tiered(page_size, has_storage=has_storage, host_pages=800 // page_size, hicache_write_policy=policy)
    tiers = engine.core.tiers
    assert tiers is not None
    keys_of = PageKeys(bytes(SECRET_BYTES), b"", page_size)
    pages: dict[bytes, list[bytes]] = {}
    for handle, what in enumerate(happens):
        if what == "flush":
            engine.control.flush_cache()
        elif what == "host":
            engine.control.flush_tiers((Tier.HOST,))
        elif what == "drop":
            engine.core.ended(Fact(UNASKED, dropped=tuple(engine.executor.storage)[::3]), engine.now)
        else:
            salt, number, length = what
            ids = prompt(number, length)
            ask(engine, handle, ids, salt=salt)
            ids += engine.outputs[handle]
            keys = keys_of.after(keys_of.root(f"0:{salt}" if salt else ""), np.array(ids, np.int32).tobytes())
            for at, name in enumerate(names_of(ids, salt)):
                if (end := -(-(at + 1) * 64 // page_size)) <= len(keys):
                    pages[name] = keys[at * 64 // page_size : end]
        engine.check()
        expected = {name: tier for name, its in pages.items() if (tier := slowest(tiers, its, page_size)) is not None}
        assert engine.below.items() <= expected.items(), "every reported block can be read"
        assert {name for name in expected if name not in engine.index} == engine.below.keys(), (
            "every block that can be read is reported"
        )


def slowest(tiers: Any, keys: list[bytes], page_size: int) -> BlockTier | None:
    if not keys or not all(key in tiers._host or key in tiers._stored for key in keys):
        return None
    return BlockTier.HOST if all(key in tiers._host for key in keys) else BlockTier.STORAGE
