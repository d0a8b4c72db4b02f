"""Grammars that wait to be compiled: one of each tenant in turn, within a tenant in order of arrival. Thread-safe."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque

from services.worker.core.contracts.sampling import GrammarSpec

TENANTS_FULL = 4  # so many tenants may have all that one may have


class FairLane:
    """most: grammars of one tenant that may wait. Nobody can fill the lane alone."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: OrderedDict[bytes, deque[GrammarSpec]] = OrderedDict()  # by tenant, whose turn it is first
        self._size = 0
        self._closed = False
        self._changed = threading.Condition()

    def offer(self, spec: GrammarSpec, tenant: bytes) -> bool:
        """Returns at once. False: too many wait, or the lane is closed."""
        with self._changed:
            own = len(self._waiting.get(tenant, ()))
            if self._closed or own >= self._most or self._size >= self._most * TENANTS_FULL:
                return False
            self._waiting.setdefault(tenant, deque()).append(spec)
            self._size += 1
            self._changed.notify()
            return True

    def take(self) -> tuple[GrammarSpec, bytes] | None:
        """Waits for one. None: the lane is closed."""
        with self._changed:
            while not self._size and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            tenant, specs = self._waiting.popitem(last=False)
            spec = specs.popleft()
            self._size -= 1
            if specs:
                self._waiting[tenant] = specs  # behind the others
            return spec, tenant

    def close(self) -> None:
        """Whoever waits gets None, now and later."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
