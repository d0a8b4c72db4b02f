"""The bounded queue of requests that wait for a worker, by priority and then fair between API keys.

Fairness uses virtual token counters (Sheng et al. 2024, "Fairness in Serving Large Language Models"). The API key with the fewest
served tokens per weight is next. An API key gains no credit while it has no request in the queue: when it returns, its counter is
raised to the least counter of the waiting API keys. Tokens that are served while the queue is empty do not count against an API
key. Items of one priority and API key leave in order of arrival.
"""

from __future__ import annotations

import enum
import heapq
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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

        API keys with equal counters alternate.
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

    def walk(self, counter: Callable[[str], float]) -> Pass[T]:
        return Pass(self, counter)

    def rotate(self, key: str) -> None:
        """Notes that an item of the API key was placed. Other API keys with the same counter come first now."""
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


class Pass(Generic[T]):
    """A pass over a level, as a context manager. Skipped items are set aside until its end, also if the pass raises."""

    def __init__(self, level: FairLevel[T], counter: Callable[[str], float]) -> None:
        self._level, self._counter = level, counter
        self._aside: dict[str, list[tuple[int, T]]] = {}

    def next(self) -> tuple[str, int, T] | None:
        return self._level.first(self._counter)

    def skip(self, key: str, ticket: int) -> None:
        self._aside.setdefault(key, []).append((ticket, self._level.set_aside(key, ticket)))

    def __enter__(self) -> Pass[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for key, items in self._aside.items():
            self._level.put_back(key, items, self._counter(key))


class Placed(enum.Enum):
    PLACED = enum.auto()
    SKIP = enum.auto()  # this item cannot be placed now; others may be
    STOP = enum.auto()  # no item can be placed now


class QueueFull(Exception):
    """The queue is full, and no item may be removed for the new one. The caller refuses the request."""


@dataclass(slots=True)
class _Account:
    """The state of one API key."""

    counter: float = 0.0  # served tokens per weight
    waiting: int = 0  # items in the queue
    listed: bool = False  # the heap of waiting API keys has an entry for this one


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    """An item with its position in the queue."""

    item: T
    priority: int
    key: str
    ticket: int


class FairQueue(Generic[T]):
    """A queue of items, which are compared by identity. All calls come from one thread.

    The callback of drain() may call only charge().
    """

    def __init__(self, capacity: int, weights: Mapping[str, float] | None = None, max_keys: int = 10_000) -> None:
        """Makes an empty queue.

        Args:
            capacity: Largest number of items.
            weights: Weights of API keys, greater than 0; 1 for an API key without one. They are read at every use.
            max_keys: Number of API keys without items whose counters are stored.
        """
        self._capacity = capacity
        self._weights = {} if weights is None else weights
        self._max_keys = max_keys
        self._accounts: dict[str, _Account] = {}
        self._waiting_keys: list[tuple[float, str]] = []  # heap of (counter, API key); counters may be too small
        self._floor = 0.0  # counter at which API keys begin if the queue is empty
        self._levels: dict[int, FairLevel[T]] = {}  # by priority
        self._priorities: list[int] = []  # keys of _levels, rising
        self._entries: dict[int, _Entry[T]] = {}  # by id() of the item
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        """Yields the items by falling priority, then in order of arrival."""
        for priority in reversed(self._priorities):
            yield from self._levels[priority].in_arrival_order()

    def push(self, item: T, key: str, priority: int = 0) -> T | None:
        """Adds an item.

        If the queue is full, the queue removes an item of the lowest priority: the newest one of the API key with the most items
        per weight. If the new item has the same priority, this happens only if the new item's API key then has no more items per
        weight than that API key. So no API key can lock others out by filling the queue.

        Returns:
            The item that was removed; None if the queue was not full.

        Raises:
            QueueFull: The queue is full, and no item may be removed.
            ValueError: The item is in the queue already.
        """
        displaced = self.push_all([(item, key, priority)])
        return displaced[0] if displaced else None

    def push_all(self, items: Sequence[tuple[T, str, int]]) -> list[T]:
        """Adds all items with their API keys and priorities, or no item.

        Returns:
            The items that were removed, as by push().

        Raises:
            QueueFull: No item may be removed for a new one, or an item of this call would be removed. The queue is unchanged.
            ValueError: An item is in the queue already.
        """
        if any(id(item) in self._entries for item, _, _ in items):
            raise ValueError("the item is in the queue already")
        before, displaced = self._tickets, list[_Entry[T]]()
        floor, counters = self._floor, {key: self.counter(key) for _, key, _ in items}
        try:
            for item, key, priority in items:
                if len(self._entries) >= self._capacity:
                    displaced.append(self._displace(key, priority))
                    if displaced[-1].ticket > before:
                        raise QueueFull
                self._tickets += 1
                self._add(_Entry(item, priority, key, self._tickets))
        except QueueFull:
            for item, _, _ in items:
                self.remove(item)
            if self._tickets > before:
                self._take_back(floor, counters)
            for entry in reversed(displaced):  # each was the newest item of its API key
                if entry.ticket <= before:
                    self._add(entry, is_back=True)
            raise
        return [entry.item for entry in displaced]

    def remove(self, item: T) -> bool:
        """Removes an item. Returns False if it is not in the queue."""
        entry = self._entries.get(id(item))
        if entry is None:
            return False
        self._levels[entry.priority].take(entry.key, entry.ticket)
        self._left(entry)
        return True

    def charge(self, key: str, tokens: float) -> None:
        """Counts prompt or output tokens that were served to an API key, whether it has waiting items or not."""
        account = self._accounts.get(key) or self._new_account(key)
        if not self._entries:
            self._floor = account.counter = max(account.counter, self._floor)
        account.counter += tokens / self._weight(key)

    def counter(self, key: str) -> float:
        """Returns the virtual token counter of an API key; 0 for an unknown one."""
        account = self._accounts.get(key)
        return account.counter if account else 0.0

    def drain(self, place: Callable[[T], Placed]) -> int:
        """Offers items to `place` in fair order until the end of the queue or STOP. Returns the number of placed items.

        The order is computed again after each item, so that a charge of `place` has an effect at once. If `place` raises, its
        item stays in the queue.
        """
        placed = 0
        for priority in reversed(list(self._priorities)):
            done, stopped = self._drain_level(priority, place)
            placed += done
            if stopped:
                break
        return placed

    def _drain_level(self, priority: int, place: Callable[[T], Placed]) -> tuple[int, bool]:
        level, placed, stopped = self._levels[priority], 0, False
        with level.walk(self.counter) as walk:
            while not stopped and (head := walk.next()) is not None:
                key, ticket, item = head
                verdict = place(item)
                if verdict is Placed.PLACED:
                    placed += 1
                    level.rotate(key)
                    level.take(key, ticket)
                    self._left(self._entries[id(item)])
                elif verdict is Placed.SKIP:
                    walk.skip(key, ticket)
                stopped = verdict is Placed.STOP
        return placed, stopped

    def _displace(self, key: str, priority: int) -> _Entry[T]:
        """Removes an item for a new one and returns its entry. Raises QueueFull."""
        if not self._priorities or priority < self._priorities[0]:
            raise QueueFull
        lowest = self._priorities[0]
        level = self._levels[lowest]
        longest = level.longest()
        if priority == lowest:
            mine, theirs = level.waiting(key) + 1, level.waiting(longest) - 1
            if mine / self._weight(key) > theirs / self._weight(longest):
                raise QueueFull
        entry = self._entries[id(level.take_newest(longest))]
        self._left(entry)
        return entry

    def _add(self, entry: _Entry[T], is_back: bool = False) -> None:
        """Adds an item at its position.

        Args:
            is_back: The item was removed before; its return does not raise the counter of its API key.
        """
        self._entries[id(entry.item)] = entry
        account = self._accounts.get(entry.key) or self._new_account(entry.key)
        if not account.waiting and not is_back:
            account.counter = max(account.counter, self._least_waiting())
        self._activate(account, entry.key)
        self._level(entry.priority).add(entry.key, entry.ticket, entry.item, account.counter)

    def _take_back(self, floor: float, counters: Mapping[str, float]) -> None:
        """Restores the counters that arrivals have raised, because these arrivals are undone."""
        self._floor = floor
        for key, counter in counters.items():
            if (account := self._accounts.get(key)) is not None:
                account.counter = counter
        self._waiting_keys = [(self.counter(key), key) for _, key in self._waiting_keys]
        heapq.heapify(self._waiting_keys)

    def _level(self, priority: int) -> FairLevel[T]:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = FairLevel(self._weight)
            insort(self._priorities, priority)
        return level

    def _left(self, entry: _Entry[T]) -> None:
        """Updates the state after an item has left its level."""
        del self._entries[id(entry.item)]
        if not len(self._levels[entry.priority]):
            del self._levels[entry.priority]
            self._priorities.remove(entry.priority)
        account = self._accounts[entry.key]
        account.waiting -= 1
        if not self._entries:
            self._floor = max(self._floor, account.counter)
            self._unlist_all()

    def _activate(self, account: _Account, key: str) -> None:
        account.waiting += 1
        if not account.listed:
            account.listed = True
            heapq.heappush(self._waiting_keys, (account.counter, key))

    def _unlist_all(self) -> None:
        for _, key in self._waiting_keys:
            if (account := self._accounts.get(key)) is not None:
                account.listed = False
        self._waiting_keys.clear()

    def _least_waiting(self) -> float:
        """Returns the least counter of the waiting API keys. If the queue is empty, returns the floor."""
        heap = self._waiting_keys
        while heap:
            counter, key = heap[0]
            account = self._accounts.get(key)
            if account is None or not account.waiting:
                heapq.heappop(heap)
                if account is not None:
                    account.listed = False
            elif account.counter != counter:
                heapq.heapreplace(heap, (account.counter, key))
            else:
                return counter
        return self._floor

    def _weight(self, key: str) -> float:
        return self._weights.get(key, 1.0)

    def _new_account(self, key: str) -> _Account:
        if len(self._accounts) >= 2 * self._max_keys:
            self._prune()
        account = self._accounts[key] = _Account()
        return account

    def _prune(self) -> None:
        """Drops counters of API keys without items, the smallest first, until max_keys are left.

        A dropped API key starts again with the least counter of the waiting API keys. So it gains a small advantage at most.
        """
        idle = sorted((k for k, account in self._accounts.items() if not account.waiting), key=self.counter)
        for key in idle[: max(0, len(idle) - self._max_keys)]:
            del self._accounts[key]
