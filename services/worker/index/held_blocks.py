"""What this worker holds and what of it Redis has not been told. Pure; used on the asyncio loop alone."""

from __future__ import annotations

from itertools import islice

from services.worker.core.kv.cache_events import CacheEvents


class HeldBlocks:
    """Bounded by what the cache holds, however long nothing can be published: changes that undo each other vanish."""

    def __init__(self) -> None:
        self._held: dict[bytes, None] = {}
        self._pending: dict[bytes, bool] = {}  # True: to be stored, False: to be removed
        self._num_published = 0

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def num_published(self) -> int:
        """Blocks that the current generation has in Redis, if everything that was taken got there."""
        return self._num_published

    def held(self) -> frozenset[bytes]:
        return frozenset(self._held)

    def merge(self, events: CacheEvents) -> None:
        """After `cleared` the generation must be another one: see restart()."""
        if events.cleared:
            self._held, self._pending, self._num_published = {}, {}, 0
        for block in events.stored:
            if block not in self._held:
                self._held[block] = None
                self._change(block, stored=True)
        for block in events.removed:
            if block in self._held:
                del self._held[block]
                self._change(block, stored=False)

    def _change(self, block: bytes, stored: bool) -> None:
        if self._pending.pop(block, stored) == stored:
            self._pending[block] = stored

    def restart(self) -> None:
        """Under a new generation: nothing is published, everything is pending."""
        self._pending = dict.fromkeys(self._held, True)
        self._num_published = 0

    def take(self, limit: int) -> tuple[list[bytes], list[bytes]]:
        """Up to `limit` pending changes as (stored, removed); they count as published from here on."""
        stored: list[bytes] = []
        removed: list[bytes] = []
        for block, is_stored in list(islice(self._pending.items(), limit)):
            del self._pending[block]
            (stored if is_stored else removed).append(block)
        self._num_published += len(stored) - len(removed)
        return stored, removed
