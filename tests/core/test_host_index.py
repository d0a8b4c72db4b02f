"""The index of host pages, compared with simple models of its content, its eviction order and its operations."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rootstock_llm.services.worker.core.tiers.host_index import I32, HostIndex
from rootstock_llm.services.worker.core.tiers.page_keys import TAG_BYTES, UNSALTED, tag_of

PAGES = 12
KEYS = [bytes([number]) for number in range(20)]

prompts = st.tuples(st.integers(0, len(KEYS) - 1), st.integers(1, 5)).map(lambda at: KEYS[at[0] : at[0] + at[1]])


def filled(*prompts: bytes) -> HostIndex:
    """Returns a full index whose page keys are the letters of the prompts."""
    index = HostIndex(sum(map(len, prompts)))
    for prompt in prompts:
        index.put(keys(prompt), index.take(len(prompt)))
    return index


def keys(prompt: bytes) -> list[bytes]:
    return [prompt[at : at + 1] for at in range(len(prompt))]


def left(index: HostIndex, prompts: bytes) -> bytes:
    return b"".join(key for key in keys(prompts) if key in index)


def test_host_index_evicts_the_end_of_a_prompt_first() -> None:
    index = filled(b"abc", b"def")
    index.take(2)
    assert left(index, b"abcdef") == b"adef"


def test_host_index_evicts_a_page_of_the_same_salt_when_the_salt_is_at_its_quota() -> None:
    index = HostIndex(8, salt_pages=3)
    one, other = ([tag + bytes([at]) for at in range(4)] for tag in (b"a" * TAG_BYTES, b"b" * TAG_BYTES))
    index.put(other[:3], index.take(3, tag_of(other[0])))
    index.put(one[:3], index.take(3, tag_of(one[0])))
    index.touch(one[2:3])
    index.put(one[3:], index.take(1, tag_of(one[0])))
    assert [key in index for key in one] == [True, False, True, True], (
        "the last page of the prompt that was not touched is evicted"
    )
    assert all(key in index for key in other[:3]) and (index.over_quota_total, index.evicted_total) == (1, 1)


def test_host_index_evicts_touched_pages_last() -> None:
    index = filled(b"abc", b"def")
    index.touch(keys(b"ab"))
    index.take(4)
    assert left(index, b"abcdef") == b"ab"
    index.take(1)
    assert left(index, b"abcdef") == b"a"


def test_host_index_keeps_pinned_pages_when_evicting_or_clearing() -> None:
    index = filled(b"abc")
    pages = index.pin(keys(b"bc"))
    first = index.take(3)
    assert len(first) == 1 and left(index, b"abc") == b"bc"
    index.give_back(first)
    assert index.clear() == 2 and left(index, b"abc") == b""
    assert len(index.take(3)) == 1, "pinned pages stay allocated until their reads end"
    index.unpin(pages)
    assert sorted(index.take(3).tolist()) == sorted(pages.tolist())


def test_host_index_keeps_a_page_until_the_last_reader_ends() -> None:
    index = filled(b"a")
    for _ in range(2):
        pages = index.pin(keys(b"a"))
    index.unpin(pages)
    assert not len(index.take(1))
    index.unpin(pages)
    assert len(index.take(1)) == 1


def test_host_index_refuses_to_unpin_a_page_twice() -> None:
    index = filled(b"a")
    pages = index.pin(keys(b"a"))
    index.unpin(pages)
    with pytest.raises(AssertionError, match="without pin"):
        index.unpin(pages)


def test_host_index_keeps_the_first_page_when_a_key_is_inserted_twice() -> None:
    index = HostIndex(4)
    first, second = index.take(1), index.take(1)
    index.put([b"a"], first)
    index.put([b"a"], second)
    assert index.pin([b"a"]).tolist() == first.tolist()
    assert index.num_writing == 0 and len(index.take(4)) == 3


def test_host_index_frees_pages_that_are_given_back() -> None:
    index = HostIndex(2)
    index.give_back(index.take(2))
    assert index.num_writing == 0 and len(index.take(2)) == 2


QUOTA = 4
SALTS = [letter * TAG_BYTES for letter in (b"a", b"b")]
salted = st.sampled_from([*SALTS, UNSALTED])


class UnderAQuota(RuleBasedStateMachine):
    """Two salts with a quota of four of twelve pages each, and pages without a salt."""

    def __init__(self) -> None:
        super().__init__()
        self.index = HostIndex(PAGES, QUOTA)
        self.gone: list[bytes] = []
        self.index.on_gone = self.gone.append
        self.held: dict[bytes, None] = {}
        self.taken: list[tuple[bytes, I32]] = []  # pages of running writes, with their tag
        self.pinned: list[I32] = []
        self.next = 0

    def of(self, tag: bytes) -> list[bytes]:
        return [key for key in self.held if tag_of(key) == tag]

    def num_of(self, tag: bytes) -> int:
        return len(self.of(tag)) + sum(len(pages) for other, pages in self.taken if other == tag)

    @rule(tag=salted, count=st.integers(1, 6))
    def begin_to_write(self, tag: bytes, count: int) -> None:
        self.gone.clear()
        before = self.num_of(tag)
        pages = self.index.take(count, tag)
        own = [key for key in self.gone if tag_of(key) == tag]
        for key in self.gone:
            del self.held[key]
        if tag != UNSALTED:
            assert before - len(own) + len(pages) <= QUOTA
            assert before < QUOTA or len(own) == len(self.gone), "a salt at its quota evicts only its own pages"
        self.taken.append((tag, pages))

    @precondition(lambda self: self.taken)
    @rule(counts=st.booleans())
    def end_of_writing(self, counts: bool) -> None:
        tag, pages = self.taken.pop(0)
        keys = [tag + bytes([self.next + at]) for at in range(len(pages))]
        self.next = (self.next + len(pages)) % 250
        if not counts or any(key in self.held for key in keys):
            self.index.give_back(pages)
            return
        self.index.put(keys, pages)
        self.held |= dict.fromkeys(keys)

    @rule(tag=salted)
    def begin_to_read(self, tag: bytes) -> None:
        self.pinned.append(self.index.pin(self.of(tag)[:2]))

    @precondition(lambda self: self.pinned)
    @rule()
    def end_of_reading(self) -> None:
        self.index.unpin(self.pinned.pop(0))

    @rule(tag=salted)
    def forget(self, tag: bytes) -> None:
        mine = self.of(tag)
        assert self.index.forget_salt(tag) == len(mine)
        for key in mine:
            del self.held[key]

    @invariant()
    def index_has_the_pages_that_were_put(self) -> None:
        assert self.index.num_cached == len(self.held) and all(key in self.index for key in self.held)
        assert self.index.num_salts == len({tag_of(key) for key in self.held} - {UNSALTED})
        assert all(self.num_of(tag) <= QUOTA for tag in SALTS)


UnderAQuota.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestUnderAQuota = UnderAQuota.TestCase


class AgainstAModel(RuleBasedStateMachine):
    """An index, and a model of the index: a list of the cached keys in the order of their eviction."""

    def __init__(self) -> None:
        super().__init__()
        self.index = HostIndex(PAGES)
        self.cold: list[bytes] = []  # cached keys, least recently used first
        self.page_of: dict[bytes, int] = {}
        self.writing: list[tuple[list[bytes], I32]] = []  # keys and pages of running writes
        self.reading: list[tuple[list[bytes], I32]] = []  # keys and pages of running reads
        self.evicted = 0

    def pinned(self) -> set[int]:
        return {page for _, pages in self.reading for page in pages.tolist()}

    def num_forgotten(self) -> int:
        return len(self.pinned() - set(self.page_of.values()))

    def num_writing(self) -> int:
        return sum(len(pages) for _, pages in self.writing)

    def use(self, keys: list[bytes]) -> None:
        for key in reversed([key for key in keys if key in self.page_of]):
            self.cold.remove(key)
            self.cold.append(key)

    @rule(keys=prompts)
    def begin_to_write(self, keys: list[bytes]) -> None:
        free = PAGES - len(self.cold) - self.num_writing() - self.num_forgotten()
        loose = [key for key in self.cold if self.page_of[key] not in self.pinned()]
        taken = self.index.take(len(keys))
        gone = loose[: max(len(taken) - free, 0)]
        assert len(taken) == min(len(keys), free + len(loose))
        for key in gone:
            while self.cold[0] != key:
                self.cold.append(self.cold.pop(0))  # the index moves a pinned page to the end
            del self.cold[0], self.page_of[key]
        if len(taken) < len(keys):
            assert self.pinned().issuperset(self.page_of.values()), "fewer pages are returned only if all other pages are pinned"
        self.evicted += len(gone)
        self.writing.append((keys[: len(taken)], taken))

    @precondition(lambda self: self.writing)
    @rule(count=st.integers(0, 5))
    def end_of_writing(self, count: int) -> None:
        keys, pages = self.writing.pop(0)
        self.index.put(keys[:count], pages[:count])
        self.index.give_back(pages[count:])
        for key, page in zip(keys[:count], pages[:count].tolist(), strict=True):
            if key not in self.page_of:
                self.page_of[key] = page
                self.cold.append(key)
        self.use(keys[:count])

    @rule(keys=prompts)
    def touch(self, keys: list[bytes]) -> None:
        self.index.touch(keys)
        self.use(keys)

    @rule(keys=prompts)
    def begin_to_read(self, keys: list[bytes]) -> None:
        held = [key for key in keys if key in self.page_of]
        pages = self.index.pin(held)
        assert pages.tolist() == [self.page_of[key] for key in held]
        self.reading.append((held, pages))

    @precondition(lambda self: self.reading)
    @rule()
    def end_of_reading(self) -> None:
        _, pages = self.reading.pop(0)
        self.index.unpin(pages)

    @rule()
    def clear(self) -> None:
        """Forgets all keys. Pages that are being read become free when the reads end."""
        assert self.index.clear() == len(self.cold)
        self.cold.clear()
        self.page_of.clear()

    @invariant()
    def states_add_up(self) -> None:
        assert self.index.num_cached == len(self.cold) and self.index.num_writing == self.num_writing()
        assert self.index.num_pinned == len(self.pinned()) and self.index.evicted_total == self.evicted
        assert [key in self.index for key in KEYS] == [key in self.page_of for key in KEYS]
        pages = [*self.page_of.values(), *(page for _, pages in self.writing for page in pages.tolist())]
        assert len(pages) == len(set(pages)) <= PAGES - self.num_forgotten()


AgainstAModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAgainstAModel = AgainstAModel.TestCase
