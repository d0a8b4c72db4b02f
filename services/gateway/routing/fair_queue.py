"""Requests that wait for a worker: bounded, by priority, then fair over keys by the tokens that each has been served.

Virtual token counters (Sheng et al. 2024, "Fairness in Serving Large Language Models"): the key that has been served least,
by its weight, is next. Time away earns nothing: a key that comes back is lifted to the least counter of those that wait. What
is served while nobody waits is not held against anyone either.
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
    SKIP = enum.auto()  # this one cannot go now, others may
    STOP = enum.auto()  # nothing can


class QueueFull(Exception):
    """The queue holds as many as it may, and none that should make way."""


@dataclass(slots=True)
class _Account:
    """counter: tokens served over weight. waiting: of its items. listed: it has an entry in the heap of waiting keys."""

    counter: float = 0.0
    waiting: int = 0
    listed: bool = False


@dataclass(frozen=True, slots=True)
class _Place(Generic[T]):
    item: T
    priority: int
    key: str
    ticket: int


class FairQueue(Generic[T]):
    """Items are told apart by identity. All calls from one thread; `place` may call `charge`, and nothing else of the queue."""

    def __init__(self, capacity: int, weights: Mapping[str, float] | None = None, max_keys: int = 10_000) -> None:
        """weights: greater than 0, 1 where there is none; read anew whenever they count. max_keys: counters
        kept of keys that do not wait."""
        self._capacity = capacity
        self._weights = {} if weights is None else weights
        self._max_keys = max_keys
        self._accounts: dict[str, _Account] = {}
        self._waiting_keys: list[tuple[float, str]] = []  # heap; counters in it may be too small
        self._floor = 0.0  # where keys begin when nobody waits
        self._levels: dict[int, FairLevel[T]] = {}
        self._priorities: list[int] = []  # of the levels, rising
        self._places: dict[int, _Place[T]] = {}  # by an item's id
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[T]:
        """By priority, then in order of arrival."""
        for priority in reversed(self._priorities):
            yield from self._levels[priority].in_arrival_order()

    def push(self, item: T, key: str, priority: int = 0) -> T | None:
        """Returns the item that had to make way, if any; raises QueueFull if the queue is full and none has to.

        Room is made by the newest item of the lowest priority's key that has most of them waiting, by weight: for a higher
        priority always, within the same one only for a key that then has no more than that one. So no key can keep others
        out by filling the queue. Raises ValueError for an item that waits already.
        """
        displaced = self.push_all([(item, key, priority)])
        return displaced[0] if displaced else None

    def push_all(self, items: Sequence[tuple[T, str, int]]) -> list[T]:
        """As push() of each with its key and priority, or of none of them: where one would find the queue full, also because
        one of the others would have to make way, it is as it was, and QueueFull is raised."""
        if any(id(item) in self._places for item, _, _ in items):
            raise ValueError("the item waits already")
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
            for place in reversed(displaced):  # each was its key's newest
                if place.ticket <= before:
                    self._add(place, is_back=True)
            raise
        return [place.item for place in displaced]

    def remove(self, item: T) -> bool:
        """False if it does not wait."""
        place = self._places.get(id(item))
        if place is None:
            return False
        self._levels[place.priority].take(place.key, place.ticket)
        self._left(place)
        return True

    def charge(self, key: str, tokens: float) -> None:
        """Tokens served to the key, of prompts or outputs, whether it waits or not."""
        account = self._accounts.get(key) or self._new_account(key)
        if not self._places:
            self._floor = account.counter = max(account.counter, self._floor)
        account.counter += tokens / self._weight(key)

    def counter(self, key: str) -> float:
        """Tokens served over weight, as they count here; 0 for a key that is not known."""
        account = self._accounts.get(key)
        return account.counter if account else 0.0

    def drain(self, place: Callable[[T], Placed]) -> int:
        """Offers items in fair order until there are no more or place() says STOP. Returns how many were placed.

        Fairness is looked at anew after each one, so what place() charges counts at once. If it raises, its item stays.
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
        """The place that is free now."""
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
        """is_back: as if it had never left."""
        self._places[id(place.item)] = place
        account = self._accounts.get(place.key) or self._new_account(place.key)
        if not account.waiting and not is_back:
            account.counter = max(account.counter, self._least_waiting())
        self._activate(account, place.key)
        self._level(place.priority).add(place.key, place.ticket, place.item, account.counter)

    def _take_back(self, floor: float, counters: Mapping[str, float]) -> None:
        """What arrivals that did not happen have lifted."""
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
        """The item is out of its level: forgets it, and what has become empty."""
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
        """The least counter of those that wait; where nobody does, that of who left last."""
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
        """Keeps max_keys of the keys that do not wait: those served most. The others come back lifted to where they were, or
        a little better."""
        idle = sorted((k for k, account in self._accounts.items() if not account.waiting), key=self.counter)
        for key in idle[: max(0, len(idle) - self._max_keys)]:
            del self._accounts[key]
