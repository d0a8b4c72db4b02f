"""The bounded queue of requests that wait for a worker, by priority and then fair between API keys.

Fairness uses virtual token counters (Sheng et al. 2024, "Fairness in Serving Large Language Models"). A counter is the number of
served tokens of an API key, divided by the weight of the API key. The API key with the smallest counter is next.

An API key gains no credit while it has no request in the queue: at its next request, its counter is raised to the smallest
counter of the waiting API keys. Of the tokens that an API key gets while the queue is empty, at most those of its last charge()
count against it. Items of one priority and API key leave in order of arrival.
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

OUTPUT_WEIGHT = 2  # an output token is charged to its API key like this number of prompt tokens

T = TypeVar("T")


class FairLevel(Generic[T]):
    """The waiting items of one priority, by API key and ticket. A ticket is the number of an item in order of arrival.

    Every method except in_arrival_order() takes amortized O(log n) time. The counter of an API key must not decrease while the
    API key has items.
    """

    def __init__(self, weight: Callable[[str], float]) -> None:
        """Makes an empty level. `weight` returns the weight of an API key."""
        self._weight = weight
        self._queues: dict[str, OrderedDict[int, T]] = {}  # by API key, then by ticket; an API key without items has no entry
        self._size = 0  # number of items, including those that are set aside
        self._order = 0  # number of the last entry of _least; among equal counters, the older entry is first
        # Two heaps. An outdated entry is corrected when it reaches the top. The share of an API key is its items per weight.
        self._least: list[tuple[float, int, str]] = []  # (counter, order, API key); an outdated counter is too small
        self._listed: dict[str, float] = {}  # smallest counter of each API key in _least
        self._most: list[tuple[float, str]] = []  # (-share, API key); an outdated share is too large
        self._shares: dict[str, float] = {}  # share of the newest entry of each API key in _most

    def __len__(self) -> int:
        return self._size

    def waiting(self, key: str) -> int:
        return len(self._queues.get(key, ()))

    def add(self, key: str, ticket: int, item: T, counter: float) -> None:
        """Adds an item. `ticket` is greater than all tickets of the API key."""
        queue = self._queues.setdefault(key, OrderedDict())
        queue[ticket] = item
        self._size += 1
        self._push_counter(key, counter)
        self._push_share(key)

    def take(self, key: str, ticket: int) -> T:
        return self._after_take(key, self._queues[key].pop(ticket))

    def take_newest(self, key: str) -> T:
        return self._after_take(key, self._queues[key].popitem()[1])

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
                self._push_share(key)
            else:
                return key

    def in_arrival_order(self) -> Iterator[T]:
        """Returns an iterator over a copy of the items, so that the level may change during the iteration."""
        tickets = sorted((ticket, key) for key, queue in self._queues.items() for ticket in queue)
        return iter([self._queues[key][ticket] for ticket, key in tickets])

    def walk(self, counter: Callable[[str], float]) -> Pass[T]:
        return Pass(self, counter)

    def rotate(self, key: str) -> None:
        """Moves an API key behind the other API keys with the same counter, because an item of the API key was placed."""
        if self._least and self._least[0][2] == key:
            heapq.heapreplace(self._least, (self._least[0][0], self._next_order(), key))

    def set_aside(self, key: str, ticket: int) -> T:
        """Takes an item out of the order until put_back(). The item still counts in the level's length."""
        item = self.take(key, ticket)
        self._size += 1
        return item

    def put_back(self, key: str, items: list[tuple[int, T]], counter: float) -> None:
        """Puts back items that were set aside. They come before the other items of their API key.

        Args:
            items: Tickets and items, in order of rising tickets.
        """
        queue = self._queues.setdefault(key, OrderedDict())
        for ticket, item in reversed(items):
            queue[ticket] = item
            queue.move_to_end(ticket, last=False)
        self._push_counter(key, counter)
        self._push_share(key)

    def _after_take(self, key: str, item: T) -> T:
        if not self._queues[key]:
            del self._queues[key]
        self._size -= 1
        return item

    def _push_counter(self, key: str, counter: float) -> None:
        known = self._listed.get(key)
        if known is None or known > counter:
            self._listed[key] = counter
            heapq.heappush(self._least, (counter, self._next_order(), key))

    def _push_share(self, key: str) -> None:
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
    """A pass over the items of a level, as a context manager. Skipped items are set aside until the end of the block."""

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
    SKIP = enum.auto()  # this item cannot be placed now; other items may be
    STOP = enum.auto()  # no item can be placed now


class QueueFull(Exception):
    """The queue is full, and no item may be removed for the new item. The caller refuses the request."""


@dataclass(slots=True)
class _Account:
    """The counter of one API key in a FairQueue."""

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

    The callback of drain() may call charge(), and no other method.
    """

    def __init__(self, capacity: int, weights: Mapping[str, float] | None = None, max_keys: int = 10_000) -> None:
        """Makes an empty queue.

        Args:
            capacity: Largest number of items.
            weights: Weights of API keys, greater than 0. An API key that is not in the mapping has weight 1. The mapping is read
                at every use, so a changed weight applies to the next call.
            max_keys: Largest number of API keys without items whose counters _prune() keeps.
        """
        self._capacity = capacity
        self._weights = {} if weights is None else weights
        self._max_keys = max_keys
        self._accounts: dict[str, _Account] = {}
        self._waiting_keys: list[tuple[float, str]] = []  # heap of (counter, API key); counters may be too small
        self._floor = 0.0  # counter at which API keys begin if the queue is empty
        self._levels: dict[int, FairLevel[T]] = {}  # by priority
        self._priorities: list[int] = []  # priorities in _levels, rising
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

        If the queue is full, it removes one item to make space: among the items of the lowest priority, the newest one of the API
        key with the most items per weight. So no API key can lock out other API keys by filling the queue.

        Returns:
            The item that was removed; None if the queue was not full.

        Raises:
            QueueFull: The queue is full, and no item may be removed. Either the new item's priority is lower than all priorities
                in the queue. Or it equals the lowest one, and the new item's API key would have more items per weight than the
                API key that would lose an item.
            ValueError: The item is already in the queue.
        """
        displaced = self.push_all([(item, key, priority)])
        return displaced[0] if displaced else None

    def push_all(self, items: Sequence[tuple[T, str, int]]) -> list[T]:
        """Adds all items with their API keys and priorities, or no item.

        Returns:
            The items that were removed, as by push().

        Raises:
            QueueFull: No item may be removed for a new item, or an item of this call would be removed. The queue is unchanged.
            ValueError: An item is already in the queue.
        """
        if any(id(item) in self._entries for item, _, _ in items):
            raise ValueError("an item can be in a queue only once")
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
                self._restore_counters(floor, counters)
            for entry in reversed(displaced):  # each was the newest item of its API key
                if entry.ticket <= before:
                    self._add(entry, is_restored=True)
            raise
        return [entry.item for entry in displaced]

    def remove(self, item: T) -> bool:
        """Removes an item. Returns False if it is not in the queue."""
        entry = self._entries.get(id(item))
        if entry is None:
            return False
        self._levels[entry.priority].take(entry.key, entry.ticket)
        self._after_removal(entry)
        return True

    def charge(self, key: str, tokens: float) -> None:
        """Adds served prompt or output tokens to the counter of an API key, even if the API key has no items in the queue."""
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

        The order is computed again after each item, so that tokens which `place` charges count at once. If `place` raises, its
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
                    self._after_removal(self._entries[id(item)])
                elif verdict is Placed.SKIP:
                    walk.skip(key, ticket)
                stopped = verdict is Placed.STOP
        return placed, stopped

    def _displace(self, key: str, priority: int) -> _Entry[T]:
        """Removes an item to make space for a new item of the given API key and priority. Raises QueueFull.

        Returns:
            The entry of the removed item.
        """
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
        self._after_removal(entry)
        return entry

    def _add(self, entry: _Entry[T], is_restored: bool = False) -> None:
        """Adds an item at its position.

        Args:
            is_restored: True: the call that removed the item is undone, so the counter of the item's API key is not raised.
        """
        self._entries[id(entry.item)] = entry
        account = self._accounts.get(entry.key) or self._new_account(entry.key)
        if not account.waiting and not is_restored:
            account.counter = max(account.counter, self._least_waiting())
        self._activate(account, entry.key)
        self._level(entry.priority).add(entry.key, entry.ticket, entry.item, account.counter)

    def _restore_counters(self, floor: float, counters: Mapping[str, float]) -> None:
        """Undoes the changes that push_all() has made to counters. `floor` and `counters` are the values before that call."""
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

    def _after_removal(self, entry: _Entry[T]) -> None:
        """Updates all tables of the queue except the item's level, after the level has removed the item."""
        del self._entries[id(entry.item)]
        if not len(self._levels[entry.priority]):
            del self._levels[entry.priority]
            self._priorities.remove(entry.priority)
        account = self._accounts[entry.key]
        account.waiting -= 1
        if not self._entries:
            self._floor = max(self._floor, account.counter)
            self._clear_waiting_keys()

    def _activate(self, account: _Account, key: str) -> None:
        account.waiting += 1
        if not account.listed:
            account.listed = True
            heapq.heappush(self._waiting_keys, (account.counter, key))

    def _clear_waiting_keys(self) -> None:
        for _, key in self._waiting_keys:
            if (account := self._accounts.get(key)) is not None:
                account.listed = False
        self._waiting_keys.clear()

    def _least_waiting(self) -> float:
        """Returns the smallest counter of the waiting API keys. If the queue is empty, returns the start value of counters."""
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

        An API key without a counter starts with the smallest counter of the waiting API keys, so it gains at most a small
        advantage.
        """
        idle = sorted((k for k, account in self._accounts.items() if not account.waiting), key=self.counter)
        for key in idle[: max(0, len(idle) - self._max_keys)]:
            del self._accounts[key]
