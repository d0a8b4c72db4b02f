"""The items of one priority in a FairQueue, first in first out within an API key and by the least counter between API keys."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class FairLevel(Generic[T]):
    """The waiting items of one priority, by API key and ticket.

    Every method except in_arrival_order() takes amortized O(log n) time. The counter of an API key must not fall while it waits.
    """

    def __init__(self, weight: Callable[[str], float]) -> None:
        """Makes an empty level. `weight` returns the weight of an API key."""
        self._weight = weight
        self._queues: dict[str, OrderedDict[int, T]] = {}  # by API key, then by ticket; never empty for a key
        self._size = 0
        self._order = 0
        # Outdated entries of the heaps are corrected when they reach the top.
        self._least: list[tuple[float, int, str]] = []  # (counter, order, API key); counters may be too small
        self._listed: dict[str, float] = {}  # least counter of each API key in _least
        self._most: list[tuple[float, str]] = []  # (-share, API key); shares may be too large
        self._shares: dict[str, float] = {}  # share of the valid entry of each API key in _most

    def __len__(self) -> int:
        return self._size

    def waiting(self, key: str) -> int:
        return len(self._queues.get(key, ()))

    def add(self, key: str, ticket: int, item: T, counter: float) -> None:
        """Adds an item. `ticket` is greater than all tickets of the API key."""
        queue = self._queues.setdefault(key, OrderedDict())
        queue[ticket] = item
        self._size += 1
        self._list(key, counter)
        self._list_share(key)

    def take(self, key: str, ticket: int) -> T:
        return self._taken(key, self._queues[key].pop(ticket))

    def take_newest(self, key: str) -> T:
        return self._taken(key, self._queues[key].popitem()[1])

    def first(self, counter: Callable[[str], float]) -> tuple[str, int, T] | None:
        """Returns API key, ticket and item of the next item in fair order.

        Of API keys with equal counters, the one whose last turn was the earliest comes first.
        """
        heap = self._least
        while heap:
            known, _, key = heap[0]
            queue = self._queues.get(key)
            if queue is None:
                heapq.heappop(heap)
                self._listed.pop(key, None)
                continue
            served = counter(key)
            if served != known:
                self._listed[key] = served
                heapq.heapreplace(heap, (served, self._next_order(), key))
                continue
            ticket = next(iter(queue))
            return key, ticket, queue[ticket]
        return None

    def longest(self) -> str:
        """Returns the API key with the most items per weight. Raises IndexError if there are no items."""
        while True:
            share, key = self._most[0]
            if self._shares.get(key) != -share:
                heapq.heappop(self._most)
            elif key not in self._queues:
                heapq.heappop(self._most)
                del self._shares[key]
            elif self._share(key) != -share:
                heapq.heappop(self._most)
                self._list_share(key)
            else:
                return key

    def in_arrival_order(self) -> Iterator[T]:
        """Returns an iterator over a copy of the items, so that the level may change during the iteration."""
        tickets = sorted((ticket, key) for key, queue in self._queues.items() for ticket in queue)
        return iter([self._queues[key][ticket] for ticket, key in tickets])

    def turn(self, counter: Callable[[str], float]) -> Turn[T]:
        return Turn(self, counter)

    def rotate(self, key: str) -> None:
        """Notes that the API key has had its turn. Other API keys with the same counter come first now."""
        if self._least and self._least[0][2] == key:
            heapq.heapreplace(self._least, (self._least[0][0], self._next_order(), key))

    def set_aside(self, key: str, ticket: int) -> T:
        """Takes an item out of the order until put_back(). It still counts as an item of the level."""
        item = self.take(key, ticket)
        self._size += 1
        return item

    def put_back(self, key: str, items: list[tuple[int, T]], counter: float) -> None:
        """Puts items before the other items of their API key.

        Args:
            items: Tickets and items, by rising ticket.
        """
        queue = self._queues.setdefault(key, OrderedDict())
        for ticket, item in reversed(items):
            queue[ticket] = item
            queue.move_to_end(ticket, last=False)
        self._list(key, counter)
        self._list_share(key)

    def _taken(self, key: str, item: T) -> T:
        if not self._queues[key]:
            del self._queues[key]
        self._size -= 1
        return item

    def _list(self, key: str, counter: float) -> None:
        known = self._listed.get(key)
        if known is None or known > counter:
            self._listed[key] = counter
            heapq.heappush(self._least, (counter, self._next_order(), key))

    def _list_share(self, key: str) -> None:
        share = self._shares[key] = self._share(key)
        heapq.heappush(self._most, (-share, key))
        if len(self._most) > 2 * len(self._queues) + 64:
            self._shares = {key: self._share(key) for key in self._queues}
            self._most = [(-share, key) for key, share in self._shares.items()]
            heapq.heapify(self._most)

    def _share(self, key: str) -> float:
        return len(self._queues[key]) / self._weight(key)

    def _next_order(self) -> int:
        self._order += 1
        return self._order


class Turn(Generic[T]):
    """A pass over a level, as a context manager. Skipped items are set aside until its end, also if the pass raises."""

    def __init__(self, level: FairLevel[T], counter: Callable[[str], float]) -> None:
        self._level, self._counter = level, counter
        self._aside: dict[str, list[tuple[int, T]]] = {}

    def next(self) -> tuple[str, int, T] | None:
        return self._level.first(self._counter)

    def skip(self, key: str, ticket: int) -> None:
        self._aside.setdefault(key, []).append((ticket, self._level.set_aside(key, ticket)))

    def __enter__(self) -> Turn[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for key, items in self._aside.items():
            self._level.put_back(key, items, self._counter(key))
