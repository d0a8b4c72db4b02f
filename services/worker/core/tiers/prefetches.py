"""Prompts whose first pages are read from a prefill worker while that computes the rest. What has come is pinned for the request
that will go on with the prompt. Single owner: Tiers.

Nothing depends on it: after a read that brought less than was asked for nothing more of that prompt is read ahead, and what is
not there when the request comes is read or computed then. A prefetch ends when its request comes, with the word that it will not,
with the front end that would say so, and hold_s after the last news of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import inf

from services.worker.core.contracts.reservations import KvReservation, KvSource
from services.worker.core.kv.memory import KVMemory
from services.worker.core.kv.other_tiers import Asker, Wanted
from services.worker.core.kv.tree_node import TOKEN_BYTES
from services.worker.core.tiers.imports import Imports

MOST_PREFETCHES = 1024  # further ones are passed over: their pages are read when their requests come


@dataclass(slots=True, eq=False)
class _Prefetch:
    wanted: Wanted
    until: float = 0.0


class Prefetches:
    """next_look: when expire() has something to do."""

    def __init__(self, imports: Imports, hold_s: float) -> None:
        self._imports, self._hold_s = imports, hold_s
        self._prefetches: dict[Asker, _Prefetch] = {}  # in the order in which they expire
        self.next_look = inf

    def __len__(self) -> int:
        return len(self._prefetches)

    def seqs(self) -> set[int]:
        return {prefetch.wanted.seq for prefetch in self._prefetches.values()}

    def begin(self, asker: Asker, wanted: Wanted, memory: KVMemory, now: float) -> None:
        """wanted: its source has the pages that can be read already; its limit is set here."""
        if asker not in self._prefetches and len(self._prefetches) < MOST_PREFETCHES:
            self._prefetches[asker] = prefetch = _Prefetch(wanted)
            self._look(asker, prefetch, memory, now)

    def more(self, asker: Asker, room: KvReservation, num_pages: int, memory: KVMemory, now: float) -> None:
        """So many pages of the room can be read by now. Of another room than its own, or of no prefetch, it says nothing."""
        prefetch = self._prefetches.get(asker)
        source = None if prefetch is None else prefetch.wanted.source
        if prefetch is not None and isinstance(source, KvSource) and source.room == room:
            prefetch.wanted.source = replace(source, num_pages=max(num_pages, source.num_pages))
            self._look(asker, prefetch, memory, now)

    def take(self, asker: Asker, seq: int) -> Counter[str]:
        """The request has come, by this number: what is kept for it is its own. Returns the pages that came, by tier."""
        prefetch = self._prefetches.pop(asker, None)
        if prefetch is None:
            return Counter()
        self._imports.take_over(prefetch.wanted.seq, seq)
        return prefetch.wanted.arrived

    def leave(self, asker: Asker) -> None:
        """No request will come."""
        if (prefetch := self._prefetches.pop(asker, None)) is not None:
            self._imports.leave(prefetch.wanted.seq)

    def leave_peer(self, peer: int) -> None:
        for asker in [each for each in self._prefetches if each[0] == peer]:
            self.leave(asker)

    def expire(self, now: float) -> None:
        while self._prefetches and (first := next(iter(self._prefetches.items())))[1].until <= now:
            self.leave(first[0])
        self.next_look = next((prefetch.until for prefetch in self._prefetches.values()), inf)

    def clear(self) -> None:
        for asker in list(self._prefetches):
            self.leave(asker)

    def _look(self, asker: Asker, prefetch: _Prefetch, memory: KVMemory, now: float) -> None:
        """After its pages have become more. One that waits for a read finds them when that has ended."""
        wanted, source = prefetch.wanted, prefetch.wanted.source
        assert source is not None, "a prefetch reads from a worker"
        num_tokens = len(wanted.tokens) // TOKEN_BYTES
        wanted.limit = max(0, min(source.num_pages, memory.usable_pages(num_tokens, num_tokens)))
        self._prefetches[asker] = self._prefetches.pop(asker)
        prefetch.until = now + self._hold_s
        self.next_look = min(self.next_look, prefetch.until)
        if not wanted.let_go and not self._imports.is_waiting(wanted.seq):
            self._imports.consider(wanted, memory)
