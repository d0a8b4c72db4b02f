"""The items of one priority in a FairQueue: first in, first out within a key; between keys the least counter first."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class FairLevel(Generic[T]):
    """Every method costs O(log n), amortized, but in_arrival_order. Counters never fall while their key waits."""

    def __init__(self, weight: Callable[[str], float]) -> None:
        self._weight = weight
        self._queues: dict[str, OrderedDict[int, T]] = {}  # by key, then by ticket; none is empty
        self._size = 0
        self._order = 0
        # Heaps are mended at their top only. _least: (counter, order, key), counters possibly too small; _listed: the least
        # counter that a key has in there. _most: (-share, key), shares possibly too large.
        self._least: list[tuple[float, int, str]] = []
        self._listed: dict[str, float] = {}
        self._most: list[tuple[float, str]] = []
        self._shares: dict[str, float] = {}  # the one entry of each key in _most that counts

    def __len__(self) -> int:
        return self._size

    def waiting(self, key: str) -> int:
        return len(self._queues.get(key, ()))

    def add(self, key: str, ticket: int, item: T, counter: float) -> None:
        """ticket: greater than any of the key's."""
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
        """Key, ticket and item of the next in fair order. Of equal counters the one whose turn is longest ago."""
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
        """The key with most items by its weight. Raises IndexError if there are no items."""
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
        """A copy: the level may change meanwhile."""
        tickets = sorted((ticket, key) for key, queue in self._queues.items() for ticket in queue)
        return iter([self._queues[key][ticket] for ticket, key in tickets])

    def turn(self, counter: Callable[[str], float]) -> Turn[T]:
        return Turn(self, counter)

    def rotate(self, key: str) -> None:
        """The key has had its turn: others of the same counter come first."""
        if self._least and self._least[0][2] == key:
            heapq.heapreplace(self._least, (self._least[0][0], self._next_order(), key))

    def set_aside(self, key: str, ticket: int) -> T:
        """Out of the order, but one of the level's items still; put_back ends it."""
        item = self.take(key, ticket)
        self._size += 1
        return item

    def put_back(self, key: str, items: list[tuple[int, T]], counter: float) -> None:
        """In front of the key's others. items: with their tickets, in order."""
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
    """One pass over a level. What is skipped stands aside until the pass is over, whatever ends it."""

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
