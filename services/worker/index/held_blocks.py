"""What this worker holds and what of it Redis has not been told. Pure; used on the asyncio loop alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from services.shared.index.block_tier import BlockTier
from services.worker.core.kv.cache_events import CacheEvents


@dataclass(frozen=True, slots=True)
class BlockMove:
    """before: where Redis has the block; after: where it is. None: nowhere."""

    block: bytes
    before: BlockTier | None
    after: BlockTier | None


class HeldBlocks:
    """Bounded by what cache and tiers hold, however long nothing can be published: changes that undo each other vanish. Tiers are
    kept as plain ints: dicts of these are invisible to the garbage collector."""

    def __init__(self) -> None:
        self._held: dict[bytes, int] = {}
        self._pending: dict[bytes, int | None] = {}  # of blocks that have changed: where Redis has them
        self._published: Counter[int] = Counter()
        self._counts: Counter[int] = Counter()

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def num_in(self, tier: BlockTier) -> int:
        return self._counts[tier]

    def num_published(self, tier: BlockTier) -> int:
        """Blocks that the current generation has there in Redis, if everything that was taken got there."""
        return self._published[tier]

    def held(self, tier: BlockTier = BlockTier.DEVICE) -> frozenset[bytes]:
        return frozenset(block for block, where in self._held.items() if where == tier)

    def merge(self, events: CacheEvents) -> None:
        """After `cleared` the generation must be another one: see restart()."""
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
        """Under a new generation: nothing is published, everything is pending."""
        self._pending = dict.fromkeys(self._held)
        self._published = Counter()

    def take(self, limit: int) -> list[BlockMove]:
        """Up to `limit` pending changes, the oldest first; they count as published from here on."""
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
