"""A queue of grammars that serves tenants in turn, and the grammars of a tenant in order of arrival. Thread-safe."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque

from services.worker.core.contracts.grammar import GrammarSpec

TENANTS_FULL = 4  # number of tenants with a full queue that fill the lane


class FairLane:
    """The queue. One tenant cannot fill it."""

    def __init__(self, most: int) -> None:
        self._most = most  # grammars of one tenant that may wait
        self._waiting: OrderedDict[bytes, deque[GrammarSpec]] = OrderedDict()  # by tenant; the next tenant is first
        self._size = 0
        self._closed = False
        self._changed = threading.Condition()

    def offer(self, spec: GrammarSpec, tenant: bytes) -> bool:
        """Queues a grammar. Returns False at once if too many grammars wait or the lane is closed."""
        with self._changed:
            own = len(self._waiting.get(tenant, ()))
            if self._closed or own >= self._most or self._size >= self._most * TENANTS_FULL:
                return False
            self._waiting.setdefault(tenant, deque()).append(spec)
            self._size += 1
            self._changed.notify()
            return True

    def take(self) -> tuple[GrammarSpec, bytes] | None:
        """Waits for the next grammar. Returns None if the lane is closed."""
        with self._changed:
            while not self._size and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            tenant, specs = self._waiting.popitem(last=False)
            spec = specs.popleft()
            self._size -= 1
            if specs:
                self._waiting[tenant] = specs  # after all other tenants
            return spec, tenant

    def close(self) -> None:
        """Closes the lane. All present and later calls of take() return None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
