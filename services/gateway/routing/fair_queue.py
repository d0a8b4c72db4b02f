"""The bounded queue of requests that wait for a worker, by priority and then fair between API keys.

Fairness uses virtual token counters (Sheng et al. 2024, "Fairness in Serving Large Language Models"). The API key with the fewest
served tokens per weight is next. An API key earns nothing while it has no request in the queue: when it returns, its counter is
raised to the least counter of the waiting API keys. Tokens that are served while the queue is empty do not count against an API
key.
"""

from __future__ import annotations

import enum
import heapq
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from services.gateway.routing.fair_level import FairLevel

T = TypeVar("T")


class Placed(enum.Enum):
    PLACED = enum.auto()
    SKIP = enum.auto()  # this item cannot be placed now; others may be
    STOP = enum.auto()  # no item can be placed now


class QueueFull(Exception):
    """The queue is full, and no item has to make way for the new one. The caller refuses the request."""


@dataclass(slots=True)
class _Account:
    """The state of one API key."""

    counter: float = 0.0  # served tokens per weight
    waiting: int = 0  # items in the queue
    listed: bool = False  # the heap of waiting API keys has an entry for this one


@dataclass(frozen=True, slots=True)
class _Place(Generic[T]):
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
        self._places: dict[int, _Place[T]] = {}  # by id() of the item
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[T]:
        """Yields the items by falling priority, then in order of arrival."""
        for priority in reversed(self._priorities):
            yield from self._levels[priority].in_arrival_order()

    def push(self, item: T, key: str, priority: int = 0) -> T | None:
        """Adds an item.

        If the queue is full, the newest item of one API key makes way: of the API key that has the most items of the lowest
        priority, per weight. It always makes way for an item of a higher priority. Within the same priority, it makes way only if
        the new item's API key has then no more items per weight. So no API key can lock others out by filling the queue.

        Returns:
            The item that was removed; None if the queue was not full.

        Raises:
            QueueFull: The queue is full, and no item makes way.
            ValueError: The item is in the queue already.
        """
        displaced = self.push_all([(item, key, priority)])
        return displaced[0] if displaced else None

    def push_all(self, items: Sequence[tuple[T, str, int]]) -> list[T]:
        """Adds all items with their API keys and priorities, or no item.

        Returns:
            The items that were removed, as by push().

        Raises:
            QueueFull: An item finds the queue full, or an item of this call would have to make way. The queue is unchanged.
            ValueError: An item is in the queue already.
        """
        if any(id(item) in self._places for item, _, _ in items):
            raise ValueError("the item is in the queue already")
        before, displaced = self._tickets, list[_Place[T]]()
        floor, counters = self._floor, {key: self.counter(key) for _, key, _ in items}
        try:
            for item, key, priority in items:
                if len(self._places) >= self._capacity:
                    displaced.append(self._make_room(key, priority))
                    if displaced[-1].ticket > before:
                        raise QueueFull
                self._tickets += 1
                self._add(_Place(item, priority, key, self._tickets))
        except QueueFull:
            for item, _, _ in items:
                self.remove(item)
            if self._tickets > before:
                self._take_back(floor, counters)
            for place in reversed(displaced):  # each was the newest item of its API key
                if place.ticket <= before:
                    self._add(place, is_back=True)
            raise
        return [place.item for place in displaced]

    def remove(self, item: T) -> bool:
        """Removes an item. Returns False if it is not in the queue."""
        place = self._places.get(id(item))
        if place is None:
            return False
        self._levels[place.priority].take(place.key, place.ticket)
        self._left(place)
        return True

    def charge(self, key: str, tokens: float) -> None:
        """Counts prompt or output tokens that were served to an API key, whether it has waiting items or not."""
        account = self._accounts.get(key) or self._new_account(key)
        if not self._places:
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
        with level.turn(self.counter) as turn:
            while not stopped and (head := turn.next()) is not None:
                key, ticket, item = head
                verdict = place(item)
                if verdict is Placed.PLACED:
                    placed += 1
                    level.rotate(key)
                    level.take(key, ticket)
                    self._left(self._places[id(item)])
                elif verdict is Placed.SKIP:
                    turn.skip(key, ticket)
                stopped = verdict is Placed.STOP
        return placed, stopped

    def _make_room(self, key: str, priority: int) -> _Place[T]:
        """Removes an item for a new one and returns its place. Raises QueueFull."""
        if not self._priorities or priority < self._priorities[0]:
            raise QueueFull
        lowest = self._priorities[0]
        level = self._levels[lowest]
        longest = level.longest()
        if priority == lowest:
            mine, theirs = level.waiting(key) + 1, level.waiting(longest) - 1
            if mine / self._weight(key) > theirs / self._weight(longest):
                raise QueueFull
        place = self._places[id(level.take_newest(longest))]
        self._left(place)
        return place

    def _add(self, place: _Place[T], is_back: bool = False) -> None:
        """Adds an item at its place.

        Args:
            is_back: The item was removed before; its return does not raise the counter of its API key.
        """
        self._places[id(place.item)] = place
        account = self._accounts.get(place.key) or self._new_account(place.key)
        if not account.waiting and not is_back:
            account.counter = max(account.counter, self._least_waiting())
        self._activate(account, place.key)
        self._level(place.priority).add(place.key, place.ticket, place.item, account.counter)

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

    def _left(self, place: _Place[T]) -> None:
        """Updates the state after an item has left its level."""
        del self._places[id(place.item)]
        if not len(self._levels[place.priority]):
            del self._levels[place.priority]
            self._priorities.remove(place.priority)
        account = self._accounts[place.key]
        account.waiting -= 1
        if not self._places:
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
        """Drops the least counters of API keys without items, except for max_keys.

        A dropped API key returns with the least counter of the waiting ones. So it gains a small advantage at most.
        """
        idle = sorted((k for k, account in self._accounts.items() if not account.waiting), key=self.counter)
        for key in idle[: max(0, len(idle) - self._max_keys)]:
            del self._accounts[key]
