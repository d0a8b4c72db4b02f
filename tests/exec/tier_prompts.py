"""Prompts that together exceed a small KV pool, and options of the tiers below this pool."""

from __future__ import annotations

from pathlib import Path

from rootstock_llm.services.worker.core.contracts.transfers import Tier
from rootstock_llm.services.worker.exec.contracts.options import TierOptions
from rootstock_llm.services.worker.exec.tiers.segment_store import SegmentStore
from tests.exec.tiered import PAGE_SIZE, SECRET, Answer

POOL_PAGES = 24  # pages for one and a half prompts
PROMPT_TOKENS = 200


def options(storage: Path | None = None, host_bytes: int = 0, host_ratio: float = 4.0) -> TierOptions:
    def opened(page_bytes: int, identity: bytes) -> SegmentStore:
        assert storage is not None
        return SegmentStore(storage, page_bytes, 1 << 30, identity=identity)

    return TierOptions(host_ratio, host_bytes, None if storage is None else opened, SECRET)


def prompt(number: int) -> list[int]:
    return [(number * 37 + at * at) % 90 + 1 for at in range(PROMPT_TOKENS)]


def came_from(answer: Answer, tier: Tier) -> bool:
    """Returns whether most cached tokens came from this tier, after checking that all whole pages of the prompt were cached."""
    assert answer.finish is not None and answer.finish.cached_tokens == PROMPT_TOKENS // PAGE_SIZE * PAGE_SIZE
    return answer.finish.cached_from[tier] > answer.finish.cached_tokens // 2
