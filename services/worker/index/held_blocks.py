"""The blocks of this worker, and their changes that Redis has not received. Only the asyncio loop uses this pure data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from services.shared.index.block_tier import BlockTier
from services.worker.core.kv.cache_events import CacheEvents


@dataclass(frozen=True, slots=True)
class BlockMove:
    """A change of a block's tier."""

    block: bytes
    before: BlockTier | None  # tier in Redis; unset if Redis does not have the block
    after: BlockTier | None  # present tier; unset if no tier has the block


class HeldBlocks:
    """The blocks of one worker by tier.

    Changes that cancel out are dropped, so that the size is bounded by the cache and the tiers, for however long Redis is away.
    Tiers are stored as plain ints, because the garbage collector does not track dicts of these.
    """

    def __init__(self) -> None:
        self._held: dict[bytes, int] = {}  # tier by block
        self._pending: dict[bytes, int | None] = {}  # changed blocks, with their tier in Redis
        self._published: Counter[int] = Counter()  # number of blocks in Redis, by tier
        self._counts: Counter[int] = Counter()  # number of blocks, by tier

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def num_in(self, tier: BlockTier) -> int:
        return self._counts[tier]

    def num_published(self, tier: BlockTier) -> int:
        """Returns the blocks of the present generation in Redis, provided that every published change has arrived there."""
        return self._published[tier]

    def held(self, tier: BlockTier = BlockTier.DEVICE) -> frozenset[bytes]:
        return frozenset(block for block, where in self._held.items() if where == tier)

    def merge(self, events: CacheEvents) -> None:
        """Applies cache events. After `cleared`, the caller must begin a new generation with restart()."""
        if events.cleared:
            self._held, self._pending = {}, {}
            self._published, self._counts = Counter(), Counter()
        self._put(events.stored, BlockTier.DEVICE)
        self._put(events.host, BlockTier.HOST)
        self._put(events.storage, BlockTier.STORAGE)
        self._put(events.removed, None)

    def _put(self, blocks: Iterable[bytes], tier: BlockTier | None) -> None:
        after = None if tier is None else int(tier)
        for block in blocks:
            before = self._held.get(block)
            if before == after:
                continue
            if before is not None:
                self._counts[before] -= 1
            if after is None:
                del self._held[block]
            else:
                self._held[block] = after
                self._counts[after] += 1
            if self._pending.setdefault(block, before) == after:
                del self._pending[block]

    def restart(self) -> None:
        """Marks all blocks as pending, because a new generation begins, which has no block in Redis."""
        self._pending = dict.fromkeys(self._held)
        self._published = Counter()

    def take(self, limit: int) -> list[BlockMove]:
        """Returns up to `limit` pending changes, oldest first, and counts them as published."""
        pending = islice(self._pending.items(), limit)
        moves = [BlockMove(block, _tier(before), _tier(self._held.get(block))) for block, before in pending]
        for move in moves:
            del self._pending[move.block]
            if move.before is not None:
                self._published[move.before] -= 1
            if move.after is not None:
                self._published[move.after] += 1
        return moves


def _tier(value: int | None) -> BlockTier | None:
    return None if value is None else BlockTier(value)
