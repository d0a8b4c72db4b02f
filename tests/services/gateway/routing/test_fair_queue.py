"""Tests of FairQueue: it is bounded, ordered by priority, and fair between API keys by served tokens."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rootstock_llm.services.gateway.routing.fair_queue import FairQueue, Placed, QueueFull


@dataclass(eq=False)
class Item:
    key: str
    tokens: int = 1
    priority: int = 0
    name: str = ""


@dataclass
class Server:
    """Places up to `free_slots` items and charges their tokens, as a dispatcher does."""

    queue: FairQueue[Item]
    free_slots: int = 1_000_000
    skipped: frozenset[str] = frozenset()  # names of items that cannot be placed
    served: list[Item] = field(default_factory=list)

    def place(self, item: Item) -> Placed:
        if not self.free_slots:
            return Placed.STOP
        if item.name in self.skipped:
            return Placed.SKIP
        self.free_slots -= 1
        self.served.append(item)
        self.queue.charge(item.key, item.tokens)
        return Placed.PLACED

    def drain(self, free_slots: int = 1_000_000) -> list[str]:
        """Places up to `free_slots` items of the queue and returns their names."""
        self.free_slots, self.served = free_slots, []
        assert self.queue.drain(self.place) == len(self.served)
        return [item.name for item in self.served]


def filled(*items: Item, capacity: int = 100, weights: Mapping[str, float] | None = None) -> FairQueue[Item]:
    queue: FairQueue[Item] = FairQueue(capacity, weights)
    for item in items:
        assert queue.push(item, item.key, item.priority) is None
    return queue


def named(text: str, tokens: int = 1) -> list[Item]:
    """Returns items by name, such as "a1 b1:5": item a1 has API key a, and item b1 has API key b and priority 5."""
    words = [word.partition(":") for word in text.split()]
    return [Item(name[0], tokens, int(priority or 0), name) for name, _, priority in words]


def names(queue: FairQueue[Item]) -> list[str]:
    return [item.name for item in queue]


@pytest.mark.parametrize(
    ("arrivals", "order"),
    [
        ("a1 a2 a3", "a1 a2 a3"),
        ("a1 a2 a3 b1 b2", "a1 b1 a2 b2 a3"),
        ("a1:0 b1:2 c1:1 b2:2", "b1 b2 c1 a1"),
        ("a1:-1 b1:-5 c1", "c1 a1 b1"),
        ("a1:1 a2:1 b1 b2 a3:0", "a1 a2 b1 b2 a3"),
    ],
    ids=["first in first out", "API keys alternate", "priority first", "priorities below 0", "one counter for all priorities"],
)
def test_queued_items_are_offered_in_fair_order(arrivals: str, order: str) -> None:
    assert Server(filled(*named(arrivals))).drain() == order.split()


def test_queued_items_of_two_api_keys_alternate_when_no_tokens_are_charged() -> None:
    assert Server(filled(*named("a1 a2 a3 b1 b2", tokens=0))).drain() == ["a1", "b1", "a2", "b2", "a3"]


def test_items_without_a_free_slot_stay_in_the_queue_in_order() -> None:
    queue = filled(*named("a1 a2 b1 b2"))
    assert Server(queue).drain(free_slots=2) == ["a1", "b1"] and len(queue) == 2 and names(queue) == ["a2", "b2"]
    assert Server(queue).drain() == ["a2", "b2"] and not len(queue)


def test_skipped_items_keep_the_positions_in_the_queue() -> None:
    queue = filled(*named("a1 a2 a3 b1 b2 c1:-1"))
    assert Server(queue, skipped=frozenset({"a1", "a2", "b1"})).drain() == ["a3", "b2", "c1"]
    assert names(queue) == ["a1", "a2", "b1"] and len(queue) == 3
    assert Server(queue).drain() == ["a1", "b1", "a2"]


def test_skipped_items_of_a_higher_priority_do_not_block_a_lower_priority() -> None:
    queue = filled(*named("a1:1 b1:0"))
    assert Server(queue, skipped=frozenset({"a1"})).drain() == ["b1"]
    assert names(queue) == ["a1"] and Server(queue).drain() == ["a1"]


def test_no_item_is_lost_when_the_placement_of_an_item_raises() -> None:
    queue = filled(*named("a1 a2 b1"))
    asked = []

    def place(item: Item) -> Placed:
        asked.append(item.name)
        if len(asked) == 2:
            raise RuntimeError
        return Placed.SKIP

    with pytest.raises(RuntimeError):
        queue.drain(place)
    assert names(queue) == ["a1", "a2", "b1"] and Server(queue).drain() == ["a1", "b1", "a2"]


def test_removed_item_is_not_in_the_queue() -> None:
    items = named("a1 a2 b1:1")
    queue = filled(*items)
    assert queue.remove(items[0]) and not queue.remove(items[0]) and queue.remove(items[2])
    assert not queue.remove(Item("a")) and names(queue) == ["a2"] and Server(queue).drain() == ["a2"]


def test_item_that_is_in_the_queue_cannot_be_added_again() -> None:
    item = Item("a")
    with pytest.raises(ValueError):
        filled(item).push(item, "b")


@pytest.mark.parametrize(
    ("waiting", "arrival", "displaced"),
    [
        ("a1 a2 a3 a4", "b1:1", "a4"),
        ("a1 a2 a3 a4", "b1", "a4"),
        ("a1 a2 a3 b1", "b2", "a3"),
        ("a1 a2 b1 b2", "a3", None),
        ("a1 a2 a3 a4", "a5", None),
        ("a1 a2 a3 a4", "b1:-1", None),
        ("a1 b1 c1 d1", "e1", None),
        ("a1:1 a2:1 a3:1 b1", "c1:1", "b1"),
        ("a1:1 a2:1 a3:1 b1", "c1", None),
    ],
    ids=[
        "higher priority", "API key without items", "API key with fewer items", "API key with as many items", "same API key",
        "lower priority", "all API keys have one item", "lowest priority before most items",
        "items of higher priority do not count",
    ],
)  # fmt: skip
def test_new_item_displaces_another_item_when_the_queue_is_full(waiting: str, arrival: str, displaced: str | None) -> None:
    queue, (item,) = filled(*named(waiting), capacity=4), named(arrival)
    if displaced is None:
        with pytest.raises(QueueFull):
            queue.push(item, item.key, item.priority)
        assert " ".join(sorted(names(queue))) == " ".join(sorted(word.split(":")[0] for word in waiting.split()))
        return
    out = queue.push(item, item.key, item.priority)
    assert out is not None and out.name == displaced
    assert len(queue) == 4 and item in list(queue) and out not in list(queue)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 1)), max_size=80))
def test_api_keys_share_a_full_queue_evenly(arrivals: list[tuple[str, int]]) -> None:
    """The refused or displaced item has the lowest priority.

    A displaced item belongs to the API key with the most items of this priority. The API key of a refused new item may have one
    item less.
    """
    queue: FairQueue[Item] = FairQueue(8)
    for key, priority in arrivals:
        item, before = Item(key, priority=priority), list(queue)
        try:
            out = queue.push(item, key, priority)
        except QueueFull:
            out = item
        if out is None:
            assert len(before) < 8
            continue
        assert len(before) == 8 and set(queue) | {out} == {*before, item}
        lowest = min(other.priority for other in (*before, item))
        counts = Counter(other.key for other in (*before, item) if other.priority == lowest)
        assert out.priority == lowest and counts[out.key] >= max(counts.values()) - (out is item)


ITEMS = st.tuples(st.sampled_from("abc"), st.integers(0, 2))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(ITEMS, max_size=10), st.lists(ITEMS, min_size=1, max_size=10), st.lists(st.integers(0, 9), min_size=3, max_size=3)
)
@example(
    [("a", 1)] * 3 + [("b", 0)], [("a", 1), ("a", 1), ("b", 1), ("a", 1)], [1, 0, 0]
)  # items of b are displaced, even by an item of b
@example([("a", 1), ("a", 1), *[("b", 0)] * 4], [("a", 1)] * 3 + [("a", 0)], [0, 0, 0])  # two items of b are displaced
def test_several_items_are_added_together_or_the_queue_does_not_change(
    before: list[tuple[str, int]], several: list[tuple[str, int]], served: list[int]
) -> None:
    """push_all() agrees with single calls of push(), also in the order of serving."""
    queue, other = FairQueue[Item](6), FairQueue[Item](6)
    waiting, newcomers = (
        [Item(key, priority=priority, name=str(n)) for n, (key, priority) in enumerate(each)] for each in (before, several)
    )
    for item in waiting:
        for each in (queue, other):
            with suppress(QueueFull):
                each.push(item, item.key, item.priority)
    for key, tokens in zip("abc", served, strict=True):
        for each in (queue, other):
            each.charge(key, tokens)
    assert list(queue) == list(other)
    try:
        displaced = queue.push_all([(item, item.key, item.priority) for item in newcomers])
    except QueueFull:
        assert list(queue) == list(other)
        assert [queue.counter(key) for key in "abc"] == [other.counter(key) for key in "abc"]
        as_it_is, as_it_was = Server(queue), Server(other)
        assert len(as_it_is.drain()) == len(as_it_was.drain())
        by_key = [sorted(each.served, key=lambda item: item.key) for each in (as_it_is, as_it_was)]
        assert by_key[0] == by_key[1]
    else:
        assert displaced == [out for item in newcomers if (out := other.push(item, item.key, item.priority)) is not None]
        assert not set(displaced) & set(newcomers) and list(queue) == list(other)
        assert Server(queue).drain() == Server(other).drain()


def test_api_keys_share_a_full_queue_by_weight() -> None:
    queue = filled(*named("a1 a2 a3 b1 b2 b3"), capacity=6, weights={"a": 3.0})
    out = queue.push(Item("a", name="a4"), "a")
    assert out is not None and out.name == "b3"


def test_queue_refuses_every_item_when_the_capacity_is_0() -> None:
    with pytest.raises(QueueFull):
        FairQueue[Item](0).push(Item("a"), "a", 5)


def test_api_keys_are_served_tokens_in_proportion_to_weights() -> None:
    """Each API key always has waiting items. Half of an item's tokens is charged when it is placed, the rest when it ends."""
    rng, weights = random.Random(3), {"a": 1.0, "b": 2.0, "c": 4.0}
    queue: FairQueue[Item] = FairQueue(1000, weights)
    sizes = {"a": (10, 50), "b": (200, 400), "c": (1, 1000)}
    tokens: Counter[str] = Counter()
    running: deque[Item] = deque()

    def place(item: Item) -> Placed:
        if len(running) == 16:
            return Placed.STOP
        running.append(item)
        queue.charge(item.key, item.tokens / 2)
        return Placed.PLACED

    for key in sizes:
        for _ in range(20):
            queue.push(Item(key, rng.randint(*sizes[key])), key)
    for _ in range(30_000):
        queue.drain(place)
        done = running.popleft()
        queue.charge(done.key, done.tokens / 2)
        tokens[done.key] += done.tokens
        queue.push(Item(done.key, rng.randint(*sizes[done.key])), done.key)
    total = tokens.total()
    for key, weight in weights.items():
        assert tokens[key] / total == pytest.approx(weight / 7, rel=0.03)


def test_items_of_a_new_api_key_are_served_before_many_items_of_another_api_key() -> None:
    queue = filled(*[Item("hog", 100, name=f"h{number}") for number in range(50)], *named("b1 b2 b3", tokens=10))
    assert Server(queue).drain(free_slots=5) == ["h0", "b1", "b2", "b3", "h1"]


def test_counter_of_a_returning_api_key_is_raised_to_the_counter_of_waiting_api_keys() -> None:
    queue = filled(*[Item("a", 100, name=f"a{number}") for number in range(12)])
    Server(queue).drain(free_slots=10)
    for item in (late := [Item("b", 100, name=f"b{number}") for number in range(10)]):
        queue.push(item, "b")
    assert queue.counter("b") == queue.counter("a")
    assert set(Server(queue).drain(free_slots=4)) == {"a10", "a11", late[0].name, late[1].name}


def test_counter_of_a_returning_api_key_stays_when_higher_than_other_counters() -> None:
    queue = filled(*named("a1", tokens=500), *named("b1 b2 b3", tokens=100))
    Server(queue).drain(free_slots=2)
    queue.push(Item("a", name="a2"), "a")
    assert Server(queue).drain() == ["b2", "b3", "a2"]


def test_tokens_charged_while_the_queue_is_empty_do_not_delay_the_api_key() -> None:
    queue: FairQueue[Item] = FairQueue(100)
    for _ in range(1000):
        queue.charge("old", 1000)
    for item in named("n1 n2 n3", tokens=1000):
        queue.push(item, "n")
    queue.push(Item("old", 1000, name="o1"), "old")
    assert "o1" in Server(queue).drain(free_slots=3)


def test_new_api_key_begins_at_the_last_counter_when_the_queue_is_empty() -> None:
    queue = filled(*named("a1", tokens=500))
    Server(queue).drain()
    queue.push(Item("b", name="b1"), "b")
    assert queue.counter("b") == queue.counter("a") == 500


def test_new_api_key_begins_at_the_counter_of_a_returned_api_key() -> None:
    first, second = Item("a", name="a1"), Item("b", name="b1")
    queue = filled(first, second)
    queue.remove(second)
    queue.remove(first)
    queue.push(Item("b", name="b2"), "b")
    queue.charge("b", 500)
    queue.push(Item("c", name="c1"), "c")
    assert queue.counter("c") == queue.counter("b") == 500


def test_fair_queue_limits_the_number_of_counters_and_keeps_the_highest_counter() -> None:
    queue: FairQueue[Item] = FairQueue(100, max_keys=10)
    item = Item("waits")
    queue.push(item, "waits")
    queue.charge("heavy", 1e6)
    for number in range(1000):
        queue.charge(f"k{number}", number % 7)
    assert len(queue._accounts) <= 21
    assert queue.counter("heavy") == 1e6 and list(queue) == [item]


def test_fair_queue_limits_the_size_of_the_heaps() -> None:
    queue: FairQueue[Item] = FairQueue(100)
    kept = Item("kept", priority=0)
    queue.push(kept, "kept")
    for number in range(3000):
        item = Item(f"k{number % 5}")
        queue.push(item, item.key)
        queue.remove(item)
    level = queue._levels[0]
    assert len(level._most) < 100 and len(level._least) < 100 and len(queue._waiting_keys) < 100


class NaiveQueue:
    """A plain implementation of FairQueue's rules, without levels and heaps, for comparison."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.counters: dict[str, float] = {}
        self.floor = 0.0

    def active(self) -> set[str]:
        return {item.key for item in self.items}

    def push(self, item: Item) -> None:
        active = self.active()
        if item.key not in active:
            least = min((self.counters[key] for key in active), default=self.floor)
            self.counters[item.key] = max(self.counters.get(item.key, 0.0), least)
        self.items.append(item)

    def remove(self, item: Item) -> None:
        self.items.remove(item)
        if not self.items:
            self.floor = max(self.floor, self.counters[item.key])

    def charge(self, key: str, tokens: float) -> None:
        if not self.items:
            self.floor = self.counters[key] = max(self.counters.get(key, 0.0), self.floor)
        self.counters[key] = self.counters.get(key, 0.0) + tokens

    def may_be_next(self, item: Item) -> bool:
        top = max(other.priority for other in self.items)
        level = [other for other in self.items if other.priority == top]
        least = min(self.counters[other.key] for other in level)
        first = next(other for other in level if other.key == item.key)
        return item is first and self.counters[item.key] == least


STEPS = st.one_of(
    st.tuples(st.just("push"), st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 9)),
    st.tuples(st.just("remove"), st.just(""), st.integers(0, 20), st.just(0)),
    st.tuples(st.just("charge"), st.sampled_from("abcd"), st.integers(1, 30), st.just(0)),
    st.tuples(st.just("drain"), st.just(""), st.integers(0, 5), st.just(0)),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_fair_queue_agrees_with_a_naive_model(steps: list[tuple[str, str, int, int]]) -> None:
    queue, naive = FairQueue[Item](1000), NaiveQueue()
    for step, key, number, tokens in steps:
        if step == "push":
            item = Item(key, tokens, number)
            queue.push(item, key, number)
            naive.push(item)
        elif step == "remove" and naive.items:
            item = naive.items[number % len(naive.items)]
            assert queue.remove(item)
            naive.remove(item)
        elif step == "charge":
            queue.charge(key, number)
            naive.charge(key, number)
        elif step == "drain":
            follow_drain(queue, naive, number)
        assert len(queue) == len(naive.items) and set(queue) == set(naive.items)
        assert all(queue.counter(key) == counter for key, counter in naive.counters.items())


def follow_drain(queue: FairQueue[Item], naive: NaiveQueue, free_slots: int) -> None:
    """Drains up to `free_slots` items, and asserts that the naive queue allows each of them next."""
    placed: list[Item] = []

    def place(item: Item) -> Placed:
        if placed:
            naive.remove(placed[-1])
            placed[-1:] = []
            placed_count[0] += 1
        if placed_count[0] == free_slots:
            return Placed.STOP
        assert naive.may_be_next(item)
        queue.charge(item.key, item.tokens)
        naive.charge(item.key, item.tokens)
        placed.append(item)
        return Placed.PLACED

    placed_count = [0]
    queue.drain(place)
    for item in placed:
        naive.remove(item)
