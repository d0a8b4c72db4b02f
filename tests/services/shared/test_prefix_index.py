"""Tests of block hashes with golden vectors, because workers and gateways of different versions must agree on every hash."""

from __future__ import annotations

import numpy as np

from rootstock_llm.services.shared.index.prefix_index import BLOCK_TOKENS, HASH_BYTES, block_hash, root_hash
from rootstock_llm.services.worker.core.kv.cache_events import BLOCK_TOKENS as CORE_BLOCK_TOKENS


def block(first: int) -> bytes:
    return np.arange(first, first + BLOCK_TOKENS, dtype="<i4").tobytes()


def test_block_hashes_equal_the_golden_vectors() -> None:
    root = root_hash("demo", "1", "demo", "")
    first = block_hash(root, block(0))
    assert (root.hex(), first.hex()) == ("bbaa0b48df9270d5", "3f94d73737f10ee6")
    assert block_hash(first, block(64)).hex() == "0f9e7c1aa06da231"


def test_root_hash_depends_on_everything_that_changes_kv() -> None:
    parts = ("model", "revision", "tokenizer", "namespace")
    roots = {root_hash(*parts)}
    for place in range(4):
        roots.add(root_hash(*[part + "x" if at == place else part for at, part in enumerate(parts)]))
    roots.add(root_hash("modelrevision", "", "tokenizer", "namespace"))
    assert len(roots) == 6
    assert {len(root) for root in roots} == {HASH_BYTES}


def test_block_hash_depends_on_the_whole_prefix() -> None:
    root = root_hash("m", "", "t", "")
    after_one, after_two = block_hash(root, block(0)), block_hash(root, block(1))
    assert block_hash(after_one, block(64)) != block_hash(after_two, block(64))


def test_scheduler_core_and_prefix_index_have_the_same_block_size() -> None:
    assert CORE_BLOCK_TOKENS == BLOCK_TOKENS
