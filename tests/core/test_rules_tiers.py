"""Tiers below the pool: what is copied down, what comes back, and that nothing else is ever read."""

from __future__ import annotations

from typing import Any

import pytest

from services.worker.core.contracts.messages import Finish
from services.worker.core.contracts.transfers import Tier
from tests.core.deployed_config import deployed_config
from tests.core.harness import Engine


def tiered(overlap: bool = True, page_moved_s: float = 0.0, **changes: Any) -> Engine:
    values: dict[str, Any] = {
        "num_pages": 16,
        "page_size": 4,
        "context_len": 64,
        "vocab_size": 1000,
        "max_running_requests": 4,
        "chunked_prefill_size": 16,
        "host_pages": 64,
        "page_bytes": 64,
    }
    return Engine(deployed_config(**{**values, **changes}), overlap, page_moved_s=page_moved_s)


def prompt(number: int, length: int = 40) -> list[int]:
    return [number] * length


def ask(engine: Engine, handle: int, ids: list[int], **params: Any) -> Finish:
    engine.submit(handle, ids, max_new_tokens=4, ignore_eos=True, **params)
    engine.drain()
    engine.check_answer(handle)
    return engine.finishes[handle]


@pytest.mark.parametrize("overlap", [True, False])
def test_what_was_evicted_comes_back_from_the_host(overlap: bool) -> None:
    engine = tiered(overlap)
    for number in range(3):
        ask(engine, number, prompt(number))  # each takes more than half of the pool
    finish = ask(engine, 9, prompt(0))
    assert finish.cached_tokens == 36
    assert finish.cached_from == {Tier.DEVICE: 0, Tier.HOST: 36}
    stats = engine.core.stats()
    assert stats.loaded_pages_total == 9 and stats.lost_pages_total == 0 and stats.recomputed_pages_total == 0
