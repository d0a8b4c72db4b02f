"""The file tier with damaged files: a read returns whole, correct pages or no page, and damage affects few pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootstock_llm.services.worker.exec.tiers.segment_format import HEADER_BYTES
from tests.exec.tiers.pages import FORMAT, SEGMENT, SLOTS, Hours, key, keys, page, read, readable, size_of, store, write
from tests.exec.tiers.sick_disks import SickDisk
from tests.night import NIGHTLY

MANY = keys(*range(2 * SLOTS + 3))
SEALED, OPEN = "segment-00000001.kv", "segment-00000002.kv"
INDEX = "segment-00000001.index"
PAGES_OF = {SEALED: MANY[SLOTS : 2 * SLOTS], OPEN: MANY[2 * SLOTS :]}
STRIDE = 1 if NIGHTLY else 5  # bytes between two bytes that are flipped, one at a time


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder with two sealed segments and an open one."""
    it = store(tmp_path)
    write(it, MANY)
    it.close()
    return tmp_path


def flip(path: Path, at: int, mask: int = 0x10) -> None:
    body = bytearray(path.read_bytes())
    body[at] ^= mask
    path.write_bytes(body)


def swap(path: Path, one: int, other: int) -> None:
    """Swaps two whole records."""
    body = path.read_bytes()
    first, second = (slice(FORMAT.segment_bytes(slot), FORMAT.segment_bytes(slot + 1)) for slot in sorted((one, other)))
    path.write_bytes(body[: first.start] + body[second] + body[first.stop : second.start] + body[first] + body[second.stop :])


def reopened(folder: Path) -> list[bytes]:
    """Opens the store twice, checks that all pages are readable, and returns the page keys."""
    it = store(folder)
    held = readable(it)
    assert it.keys() == held and set(it.take_lost()).isdisjoint(held)
    it.close()
    it = store(folder)
    assert readable(it) == held
    assert write(it, MANY).stored == tuple(key for key in MANY if key not in held)
    it.close()
    return held


class TestFlippedBytes:
    @pytest.mark.by_day(one_in=2, seed=2)
    @pytest.mark.parametrize("name", [SEALED, OPEN])
    def test_damaged_record_loses_one_page_and_a_damaged_header_loses_the_segment(self, folder: Path, name: str) -> None:
        saved = {path: path.read_bytes() for path in folder.iterdir()}
        for at in range(0, len(saved[folder / name]), STRIDE):
            flip(folder / name, at)
            held = set(reopened(folder))
            if at < HEADER_BYTES:
                lost = PAGES_OF[name]
            else:
                slot = (at - HEADER_BYTES) // FORMAT.record_bytes
                lost = PAGES_OF[name][slot : slot + 1]
            assert held == {*MANY} - {*lost}, at
            for path in folder.iterdir():
                path.unlink()
            for path, body in saved.items():
                path.write_bytes(body)

    def test_flipped_byte_of_an_index_loses_no_page(self, folder: Path) -> None:
        saved = (folder / INDEX).read_bytes()
        for at in range(0, len(saved), STRIDE):
            flip(folder / INDEX, at)
            assert reopened(folder) == MANY
            assert (folder / INDEX).read_bytes() == saved, "the damaged index is rewritten"

    @pytest.mark.by_day(one_in=3)
    @pytest.mark.parametrize("number", [1, SLOTS + 1, 2 * SLOTS + 1])
    def test_flipped_byte_in_an_open_store_loses_one_page(self, folder: Path, number: int) -> None:
        it = store(folder)
        flip(folder / f"segment-{number // SLOTS:08d}.kv", FORMAT.segment_bytes(number % SLOTS) + 100)
        assert read(it, MANY) == number
        assert it.take_lost() == (key(number),) and it.counts().corrupt_pages == 1
        assert read(it, MANY[number:]) == 0 and read(it, MANY[number + 1 :]) == len(MANY) - number - 1
        assert write(it, MANY).stored == (key(number),)
        assert read(it, MANY) == len(MANY)
        it.close()
        assert reopened(folder)[-1] == key(number), "the newest of two pages with the same key is used"

    def test_rewritten_page_survives_the_eviction_of_the_damaged_page(self, folder: Path) -> None:
        """The old segment still has the key in its index."""
        it = store(folder)
        flip(folder / "segment-00000000.kv", FORMAT.segment_bytes(1) + 100)
        assert readable(it) == [each for each in MANY if each != key(1)]
        write(it, keys(1))
        it.close()
        it = store(folder)
        assert read(it, MANY) == len(MANY)
        dropped = [each for number in range(100, 100 + 4 * SLOTS) for each in write(it, keys(number)).dropped]
        assert dropped == keys(0, 2, 3) and read(it, MANY[SLOTS:]) == len(MANY) - SLOTS and read(it, keys(1)) == 1

    def test_damaged_page_is_not_in_the_index_when_the_segment_is_sealed_later(self, folder: Path) -> None:
        it = store(folder)
        flip(folder / OPEN, FORMAT.segment_bytes(1) + 100)
        bad = MANY[2 * SLOTS + 1]
        assert read(it, [bad]) == 0
        write(it, keys(100, 101))
        it.close()
        held = store(folder).keys()
        assert bad not in held and len(held) == len(MANY) + 1


class TestTruncatedFiles:
    @pytest.mark.by_day(one_in=2)
    @pytest.mark.parametrize("name", [SEALED, OPEN])
    def test_truncated_segment_loses_only_the_cut_records(self, folder: Path, name: str) -> None:
        whole = (folder / name).read_bytes()
        others = [each for each in MANY if each not in PAGES_OF[name]]
        for size in range(0, len(whole), STRIDE):
            (folder / name).write_bytes(whole[:size])
            (folder / INDEX).unlink(missing_ok=True)
            left = PAGES_OF[name][: max(0, size - HEADER_BYTES) // FORMAT.record_bytes]
            it = store(folder)
            assert set(readable(it)) == {*others, *left}
            assert it.counts().corrupt_pages == 0, "a torn end does not count as a corrupt page"
            it.close()
            if left:
                assert (folder / name).stat().st_size == FORMAT.segment_bytes(len(left)), "the torn end is cut off"

    @pytest.mark.by_day(one_in=11, seed=40)
    @pytest.mark.parametrize("name", [SEALED, OPEN])
    @pytest.mark.parametrize("size", [1, 63, 64, 159, 160, 161, 1000])
    @pytest.mark.parametrize("fill", [b"\0", b"\xff", b"RSTKVREC"], ids=["zeros", "ones", "magics"])
    def test_recovery_removes_garbage_after_a_segment(self, folder: Path, name: str, size: int, fill: bytes) -> None:
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(before + (fill * size)[:size])
        it = store(folder)
        assert readable(it) == MANY
        assert (folder / name).read_bytes() == before
        assert size_of(folder) <= 6 * SEGMENT


class TestSwappedRecords:
    def test_swapped_records_are_lost_when_the_segment_has_an_index(self, folder: Path) -> None:
        """At the slot that the index lists for a page key, the file has the record of another page key."""
        swap(folder / SEALED, 1, 2)
        it = store(folder)
        one, two = MANY[SLOTS + 1], MANY[SLOTS + 2]
        assert read(it, [one]) == read(it, [two]) == 0
        assert it.take_lost() == (one, two) and readable(it) == [each for each in MANY if each not in (one, two)]

    def test_swapped_records_are_found_when_the_segment_has_no_index(self, folder: Path) -> None:
        swap(folder / OPEN, 0, 2)
        assert reopened(folder) == [*MANY[: 2 * SLOTS], *MANY[2 * SLOTS :][::-1]]

    def test_record_of_another_segment_is_lost(self, folder: Path) -> None:
        """A disk may return a freed block, whose record is whole but belongs to another segment."""
        at = slice(FORMAT.segment_bytes(0), FORMAT.segment_bytes(1))
        body = bytearray((folder / OPEN).read_bytes())
        body[at] = (folder / SEALED).read_bytes()[at]
        (folder / OPEN).write_bytes(body)
        (folder / SEALED).unlink()
        assert reopened(folder) == [*MANY[:SLOTS], *MANY[2 * SLOTS + 1 :]]

    def test_segment_is_lost_when_the_file_has_another_number(self, folder: Path) -> None:
        (folder / SEALED).rename(folder / "segment-00000007.kv")
        (folder / INDEX).rename(folder / "segment-00000007.index")
        assert reopened(folder) == [*MANY[:SLOTS], *MANY[2 * SLOTS :]]

    def test_index_of_another_segment_is_ignored(self, folder: Path) -> None:
        (folder / INDEX).write_bytes((folder / "segment-00000000.index").read_bytes())
        assert reopened(folder) == MANY

    def test_missing_empty_and_orphaned_indexes_are_replaced(self, folder: Path) -> None:
        (folder / INDEX).rename(folder / f"{INDEX}.part")
        (folder / "segment-00000000.index").write_bytes(b"")
        (folder / "segment-00000009.index").write_bytes(b"of nothing")
        assert reopened(folder) == MANY
        assert sorted(path.suffix for path in folder.iterdir()) == ["", *[".index"] * 2, *[".kv"] * 3]


class Tried:
    """A store, and the keys of the pages that it must have: they were reported as stored, and are not damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = SickDisk()
        self.clock = Hours()
        self.held: list[bytes] = []
        self.damaged = False
        self.store = store(folder, 5, self.disk, self.clock)

    def write(self, first: int, count: int, step: int) -> None:
        wanted = keys(*range(first, first + count * step, step))
        before = list(self.held)
        done = write(self.store, wanted)
        assert set(done.stored) <= {*wanted} - {*before} and set(done.dropped) <= {*before} - {*done.stored}
        self.held = [key for key in before if key not in done.dropped] + list(done.stored)
        self.check()

    def read(self, first: int, count: int, step: int) -> None:
        wanted = keys(*range(first, first + count * step, step))
        held = next((at for at, key in enumerate(wanted) if key not in self.held), count)
        got = read(self.store, wanted)
        lost = self.store.take_lost()
        assert got == held or (self.damaged and got < held and wanted[got] in lost)
        self.held = [key for key in self.held if key not in lost]
        self.check()

    def clear(self) -> None:
        self.store.delete()
        self.held = []
        self.check()

    def reopen(self) -> None:
        """Opens the store twice. The second opening must find the pages of the first one."""
        for _ in range(2):
            self.store.close()
            self.disk.free_bytes = None
            self.store = store(self.folder, 5, self.disk, self.clock)
            if self.damaged:
                self.held = list(self.store.keys())
            self.check()

    def fill_disk(self, free_bytes: int) -> None:
        self.disk.free_bytes = free_bytes

    def wait(self) -> None:
        self.disk.free_bytes = None
        self.clock.pass_by()

    def damage(self, how: Callable[[Path, int], None], which: int, at: int) -> None:
        files = sorted(path for path in self.folder.iterdir() if path.stat().st_size)
        if files:
            self.damaged = True
            how(files[which % len(files)], at)

    def check(self) -> None:
        assert self.store.keys() == self.held
        assert self.damaged or size_of(self.folder) <= 5 * SEGMENT


def flip_any(path: Path, at: int) -> None:
    flip(path, at % path.stat().st_size, 1 << at % 8)


def swap_any(path: Path, at: int) -> None:
    slots = (path.stat().st_size - HEADER_BYTES) // FORMAT.record_bytes
    if path.suffix == ".kv" and slots > 1:
        one, other = at % slots, at // 7 % slots
        if one != other:
            swap(path, one, other)


def cut_any(path: Path, at: int) -> None:
    path.write_bytes(path.read_bytes()[: at % path.stat().st_size])


def append_any(path: Path, at: int) -> None:
    path.write_bytes(path.read_bytes() + page(key(at), at % 400))


def delete(path: Path, at: int) -> None:
    path.unlink()


NUMBER, COUNT, STEP, ANY = st.integers(0, 40), st.integers(0, 12), st.integers(1, 3), st.integers(0, 5000)
DAMAGES = st.tuples(
    st.just(Tried.damage), st.sampled_from([flip_any, flip_any, swap_any, cut_any, append_any, delete]), st.integers(0, 12), ANY
)
HEALTHY = (
    st.tuples(st.just(Tried.write), NUMBER, COUNT, STEP),
    st.tuples(st.just(Tried.read), NUMBER, COUNT, STEP),
    st.tuples(st.just(Tried.reopen)),
    st.tuples(st.just(Tried.fill_disk), st.integers(0, 1500)),
    st.tuples(st.just(Tried.wait)),
    st.tuples(st.just(Tried.clear)),
)
EXAMPLES = 2000 if NIGHTLY else 100
Step = tuple[Any, ...]


def lost(steps: list[Step]) -> list[bytes]:
    """Runs the steps and a restart. Returns the page keys that the store should have and does not have."""
    with TemporaryDirectory() as name:
        tried = Tried(Path(name))
        for call, *arguments in steps:
            call(tried, *arguments)
        tried.reopen()
        out = [] if tried.damaged else [each for each in tried.held if not read(tried.store, [each])]
        tried.store.close()
    return out


@settings(max_examples=EXAMPLES)
@given(st.lists(st.one_of(*HEALTHY), max_size=30))
def test_store_equals_a_dictionary_after_random_steps(steps: list[Step]) -> None:
    assert lost(steps) == []


@settings(max_examples=EXAMPLES)
@given(st.lists(st.one_of(*HEALTHY[:3], DAMAGES), max_size=30))
def test_read_returns_no_wrong_page_after_random_damage(steps: list[Step]) -> None:
    """Tried.read() checks the bytes of each page."""
    assert lost(steps) == []
