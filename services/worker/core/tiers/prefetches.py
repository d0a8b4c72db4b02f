"""Prefetches: the first pages of a prompt are read from a prefill worker while it computes the other pages.

Imported pages are pinned for the request that will arrive with the prompt. If a read returns fewer pages than requested, the
prefetch reads no further pages, and the request reads or computes them. A prefetch ends when its request arrives or is cancelled,
when its gateway stream ends, or `hold_s` seconds after its last message. Tiers is the owner.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import inf

from rootstock_llm.services.shared.index.prefix_index import cache_namespace
from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.messages import Prefetch
from rootstock_llm.services.worker.core.contracts.reservations import KvReservation, KvSource
from rootstock_llm.services.worker.core.kv.memory import KVMemory
from rootstock_llm.services.worker.core.kv.other_tiers import RequestKey, Wanted
from rootstock_llm.services.worker.core.kv.radix_cache import tree_name
from rootstock_llm.services.worker.core.kv.tree_node import TOKEN_BYTES
from rootstock_llm.services.worker.core.tiers.imports import Imports

MOST_PREFETCHES = 1024  # largest number of prefetches; requests without a prefetch read their pages when they arrive


@dataclass(slots=True, eq=False)
class _OpenPrefetch:
    """The prefetch of one expected request."""

    wanted: Wanted
    until: float = 0.0  # time at which it expires


class Prefetches:
    """The prefetches by (peer, handle) of their requests."""

    def __init__(self, imports: Imports, hold_s: float) -> None:
        self._imports, self._hold_s = imports, hold_s
        self._prefetches: dict[RequestKey, _OpenPrefetch] = {}  # in the order in which they expire
        self.next_expiry = inf  # expire() has nothing to do before this time

    def __len__(self) -> int:
        return len(self._prefetches)

    def seqs(self) -> set[int]:
        return {prefetch.wanted.seq for prefetch in self._prefetches.values()}

    def begin(self, request_key: RequestKey, wanted: Wanted, memory: KVMemory, now: float) -> None:
        """Begins a prefetch, unless the request has one already or there are MOST_PREFETCHES of them.

        Sets `wanted.limit` to the number of pages that can be read from the source now and that a prefix hit may cover.
        """
        if request_key not in self._prefetches and len(self._prefetches) < MOST_PREFETCHES:
            self._prefetches[request_key] = prefetch = _OpenPrefetch(wanted)
            self._read_ready(request_key, prefetch, memory, now)

    def read_more(
        self, request_key: RequestKey, reservation: KvReservation, num_pages: int, memory: KVMemory, now: float
    ) -> None:
        """Begins to read further pages, because `num_pages` pages of the reservation can be read now.

        Does nothing if the request has no prefetch from this reservation.
        """
        prefetch = self._prefetches.get(request_key)
        source = None if prefetch is None else prefetch.wanted.source
        if prefetch is not None and isinstance(source, KvSource) and source.reservation == reservation:
            prefetch.wanted.source = replace(source, num_pages=max(num_pages, source.num_pages))
            self._read_ready(request_key, prefetch, memory, now)

    def take(self, request_key: RequestKey, seq: int) -> Counter[str]:
        """Ends the prefetch of a request that has arrived as `seq`, and passes the prefetch's pins to the request.

        Returns:
            The number of imported pages by tier.
        """
        prefetch = self._prefetches.pop(request_key, None)
        if prefetch is None:
            return Counter()
        self._imports.take_over(prefetch.wanted.seq, seq)
        return prefetch.wanted.arrived

    def cancel(self, request_key: RequestKey) -> None:
        """Ends the prefetch of a request that will not arrive."""
        if (prefetch := self._prefetches.pop(request_key, None)) is not None:
            self._imports.cancel(prefetch.wanted.seq)

    def cancel_of_gateway(self, peer: int) -> None:
        for request_key in [each for each in self._prefetches if each[0] == peer]:
            self.cancel(request_key)

    def expire(self, now: float) -> None:
        while self._prefetches and (first := next(iter(self._prefetches.items())))[1].until <= now:
            self.cancel(first[0])
        self.next_expiry = next((prefetch.until for prefetch in self._prefetches.values()), inf)

    def clear(self) -> None:
        for request_key in list(self._prefetches):
            self.cancel(request_key)

    def _read_ready(self, request_key: RequestKey, prefetch: _OpenPrefetch, memory: KVMemory, now: float) -> None:
        """Begins to read the pages that have become readable, and postpones the expiry of the prefetch.

        If a read of this prefetch is running, the new pages are read when it has ended.
        """
        wanted, source = prefetch.wanted, prefetch.wanted.source
        assert source is not None, "a prefetch has a source"
        num_tokens = len(wanted.tokens) // TOKEN_BYTES
        wanted.limit = max(0, min(source.num_pages, memory.usable_pages(num_tokens, num_tokens)))
        self._prefetches[request_key] = self._prefetches.pop(request_key)
        prefetch.until = now + self._hold_s
        self.next_expiry = min(self.next_expiry, prefetch.until)
        if not wanted.given_up and not self._imports.is_waiting(wanted.seq):
            self._imports.consider(wanted, memory)


def wanted_of_prefetch(message: Prefetch, seq: int, config: SchedulerConfig, revision: str) -> Wanted:
    """Creates the Wanted of a prefetch. It has no tokens if the prompt is too long for a request, so that no page is read."""
    namespace = tree_name(revision, cache_namespace(message.lora, message.salt))
    fits = len(message.prompt_ids) < config.context_len
    tokens = message.prompt_ids.tobytes() if fits else b""
    wanted = Wanted(seq, namespace, tokens, 0, config.rank(message.priority), source=message.source, is_prefetch=True)
    wanted.source_end = max(len(tokens) // TOKEN_BYTES - 1, 0) // config.page_size
    if message.page_keys is not None and message.page_keys.tree == namespace:
        wanted.keys = list(message.page_keys.keys)
    return wanted
