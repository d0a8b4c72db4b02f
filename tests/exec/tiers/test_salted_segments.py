"""Cache salts in the file tier: quotas, evictions, deletions and restarts."""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootstock_llm.services.worker.core.contracts.transfers import Deleted, Selection
from rootstock_llm.services.worker.core.tiers.page_keys import UNSALTED, tag_of
from rootstock_llm.services.worker.exec.tiers import segment_store
from rootstock_llm.services.worker.exec.tiers.segment_file import SegmentFile
from rootstock_llm.services.worker.exec.tiers.segment_format import HEADER_BYTES
from rootstock_llm.services.worker.exec.tiers.segment_store import SegmentStore
from tests.exec.tiers import killed_writer
from tests.exec.tiers.pages import FORMAT, PAGE, SEGMENT, SLOTS, A, B, C, Hours, keys, read, readable, size_of, store, write
from tests.exec.tiers.sick_disks import SickDisk
from tests.night import NIGHTLY

QUOTA = 2 * SEGMENT
ROOT = Path(__file__).resolve().parents[3]


def bytes_by_tag(folder: Path) -> Counter[bytes]:
    """Returns the total size of segments and indexes by the tag in the segments' headers."""
    sizes: Counter[bytes] = Counter()
    for path in folder.glob("segment-*.kv"):
        header = path.read_bytes()[:HEADER_BYTES]
        index = path.with_suffix(".index")
        sizes[header[96:104]] += path.stat().st_size + (index.stat().st_size if index.exists() else 0)
    return sizes


def keys_of(it: SegmentStore, tag: bytes) -> list[bytes]:
    return [key for key in list(it.keys()) if tag_of(key) == tag]


def test_quota_evicts_only_the_oldest_pages_of_the_same_salt(tmp_path: Path) -> None:
    it = store(tmp_path, segments=12, salt_bytes=QUOTA)
    others = keys(*range(4), tag=B) + keys(*range(30, 60))
    write(it, others)
    dropped: list[bytes] = []
    for number in range(40):
        dropped += write(it, keys(number, tag=A)).dropped
        assert bytes_by_tag(tmp_path)[A] <= QUOTA
    held = keys_of(it, A)
    assert held == keys(*range(40), tag=A)[-len(held) :] and dropped == keys(*range(40 - len(held)), tag=A)
    assert len(held) >= 5, "the salt uses most of its quota"
    assert set(readable(it)) == {*held, *others}
    assert (it.use().num_salts, it.use().over_quota_pages) == (2, len(dropped))


def test_quota_does_not_limit_unsalted_pages(tmp_path: Path) -> None:
    it = store(tmp_path, segments=12, salt_bytes=SEGMENT)
    many = keys(*range(5 * SLOTS))
    assert write(it, many).stored == tuple(many) and it.use().num_salts == 0


def test_restart_finds_all_pages_and_applies_a_smaller_quota(tmp_path: Path) -> None:
    it = store(tmp_path, segments=12, salt_bytes=QUOTA)
    for number in range(30):
        write(it, keys(number, tag=A))
        write(it, keys(number, tag=B))
    held = set(it.keys())
    it.close()
    it = store(tmp_path, segments=12, salt_bytes=QUOTA)
    assert set(readable(it)) == held
    write(it, keys(100, tag=A))
    assert bytes_by_tag(tmp_path)[A] <= QUOTA and set(keys_of(it, B)) <= held
    it.close()
    it = store(tmp_path, segments=12, salt_bytes=QUOTA // 2)
    assert all(0 < size <= QUOTA // 2 for size in bytes_by_tag(tmp_path).values())
    assert keys_of(it, A)[-1:] == keys(100, tag=A) and set(readable(it)) == set(it.keys())


def test_store_refuses_a_quota_smaller_than_a_page(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"a page needs at least {FORMAT.bytes_with_index(1)}"):
        store(tmp_path, salt_bytes=FORMAT.bytes_with_index(1) - 1)


def test_deletion_removes_the_files_of_one_salt(tmp_path: Path) -> None:
    it = store(tmp_path, segments=12)
    for tag in (A, B, UNSALTED):
        write(it, keys(*range(SLOTS + 2), tag=tag))
    assert it.delete(Selection(A)) == Deleted(SLOTS + 2, tuple(keys(*range(SLOTS + 2), tag=A)))
    assert set(bytes_by_tag(tmp_path)) == {B, UNSALTED} and len(readable(it)) == 2 * (SLOTS + 2)
    assert not any(A in path.read_bytes() for path in tmp_path.iterdir()), "no file contains the salt's tag"
    assert write(it, keys(1, tag=A)).stored == tuple(keys(1, tag=A)), "pages that are written after the deletion stay"
    assert it.delete(Selection(C)) == Deleted(0) and it.use().deleted_pages == SLOTS + 2
    it.close()
    assert set(keys_of(store(tmp_path, segments=12), A)) == set(keys(1, tag=A))


def test_deletion_by_age_removes_whole_files(tmp_path: Path) -> None:
    clock = Hours()
    it = store(tmp_path, segments=12, clock=clock)
    write(it, keys(*range(SLOTS), tag=A))
    write(it, keys(0, tag=B))
    clock.pass_by()
    write(it, keys(SLOTS, tag=A))
    write(it, keys(1, tag=B))
    clock.pass_by()
    it.close()
    it = store(tmp_path, segments=12, clock=clock)
    assert it.delete(Selection(older_than_s=3 * 3600)) == Deleted(0)
    assert it.delete(Selection(C, 0)) == Deleted(0)
    assert it.delete(Selection(A, 2 * 3600)).dropped == tuple(keys(*range(SLOTS), tag=A))
    assert set(it.delete(Selection(older_than_s=3601)).dropped) == set(keys(0, 1, tag=B)), (
        "the whole file is deleted, with its newer page"
    )
    assert readable(it) == keys(SLOTS, tag=A)


def test_deletion_reports_an_error_and_is_retried(tmp_path: Path) -> None:
    disk, clock = SickDisk(), Hours()
    it = store(tmp_path, disk=disk, clock=clock)
    write(it, keys(*range(SLOTS + 1), tag=A))
    write(it, keys(1, tag=B))
    disk.broken["unlink"] = errno.EIO
    deleted = it.delete(Selection(A))
    assert deleted.pages == SLOTS + 1 and "Input/output error" in deleted.pending
    assert read(it, keys(1, tag=A)) == 0 and read(it, keys(1, tag=B)) == 1
    assert it.delete(Selection(A)).pending, "the deletion is still pending"
    disk.broken.clear()
    clock.pass_by()
    assert write(it, keys(2, tag=B)).stored and set(bytes_by_tag(tmp_path)) == {B}, "the pending deletion comes before the write"
    disk.broken["unlink"] = errno.EIO
    it.delete(Selection(B))
    disk.broken.clear()
    assert it.delete(Selection(B)) == Deleted(0) and size_of(tmp_path) == 0


def test_deletion_removes_unreadable_files(tmp_path: Path) -> None:
    """The salt of an unreadable file is unknown, so every deletion includes the file."""
    it = store(tmp_path)
    write(it, keys(1, tag=A))
    it.close()

    class Blind(SickDisk):
        def open(self, path: Path, *, writable: bool) -> int:
            if path.suffix == ".kv":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().open(path, writable=writable)

    it = store(tmp_path, disk=Blind())
    assert it.keys() == [] and size_of(tmp_path) > 0
    assert it.delete(Selection(B)) == Deleted(0) and size_of(tmp_path) == 0


def test_failed_deletion_of_an_unreadable_file_is_retried_before_the_next_write(tmp_path: Path) -> None:
    it = store(tmp_path)
    write(it, keys(1, tag=A))
    it.close()
    disk, clock = SickDisk(), Hours()
    disk.broken["open"] = errno.EIO
    it = store(tmp_path, disk=disk, clock=clock)
    disk.broken.clear()
    assert write(it, keys(1, tag=B)).stored and set(bytes_by_tag(tmp_path)) == {A, B}, "an unreadable file stays until a deletion"
    disk.broken["unlink"] = errno.EIO
    assert it.delete(Selection(C)).pending and it.delete(Selection(B)).pending
    clock.pass_by()
    assert not write(it, keys(2, tag=B)).stored and set(bytes_by_tag(tmp_path)) == {A, B}
    disk.broken.clear()
    clock.pass_by()
    assert write(it, keys(2, tag=B)).stored and set(bytes_by_tag(tmp_path)) == {B} and readable(it) == keys(2, tag=B)


def test_write_does_not_read_the_sizes_of_all_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store updates sums of sizes, and does not add up the sizes of all segments."""
    num_reads = 0

    def counted(name: str) -> property:
        read = getattr(SegmentFile, name).fget

        def read_counted(segment: SegmentFile) -> int:
            nonlocal num_reads
            num_reads += 1
            return int(read(segment))

        return property(read_counted)

    for name in ("charge", "bytes_on_disk"):
        monkeypatch.setattr(SegmentFile, name, counted(name))
    it, most = store(tmp_path, segments=300, salt_bytes=100 * SEGMENT), 0
    for number in range(200):
        num_reads = 0
        write(
            it,
            [*keys(*range(number * SLOTS, (number + 1) * SLOTS), tag=A), *keys(number, tag=struct.pack("<Q", number % 90 + 1))],
        )
        it.use()
        it.counts()
        most = max(most, num_reads) if number < 10 else most
        assert num_reads <= 2 * most
    assert it.counts().bytes_on_disk == size_of(tmp_path) and it.use().num_salts == 91


def test_store_opens_few_files_for_many_salts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_store, "MOST_OPEN", 3)
    it = store(tmp_path, segments=60)
    tags = [struct.pack("<Q", 1 + at) for at in range(8)]
    for turn in range(3):
        for tag in tags:
            write(it, keys(turn, tag=tag))
    files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()]
    assert sum(name.startswith(str(tmp_path)) and name.endswith(".kv") for name in files) <= 3
    assert len(readable(it)) == 3 * len(tags) == it.counts().pages
    it.close()
    it = store(tmp_path, segments=60)
    assert len(readable(it)) == 3 * len(tags) and it.use().num_salts == len(tags)
    assert len(list(tmp_path.glob("*.index"))) >= len(list(tmp_path.glob("*.kv"))) - 3, (
        "all segments but the three open ones have an index"
    )


class Salted:
    """A store with a quota, and the page keys that it must have."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock, self.disk = folder, Hours(), SickDisk()
        self.held: dict[bytes, None] = {}
        self.store = self.opened()

    def opened(self) -> SegmentStore:
        return store(self.folder, 9, self.disk, self.clock, salt_bytes=QUOTA)

    def write(self, tag: bytes, first: int, count: int) -> None:
        wanted = keys(*range(first, first + count), tag=tag)
        full = size_of(self.folder) + count * FORMAT.record_bytes + SEGMENT > 9 * SEGMENT
        done = write(self.store, wanted)
        for key in done.dropped:
            del self.held[key]
        assert full or {tag_of(key) for key in done.dropped} <= {tag}, (
            "while the files are below the cap, a write evicts only pages of its own salt"
        )
        self.held |= dict.fromkeys(done.stored)
        self.check()

    def delete(self, tag: bytes) -> None:
        mine = [key for key in self.held if tag_of(key) == tag]
        assert set(self.store.delete(Selection(tag)).dropped) == set(mine)
        for key in mine:
            del self.held[key]
        assert not bytes_by_tag(self.folder)[tag]
        self.check()

    def fill_disk(self, free_bytes: int) -> None:
        self.disk.free_bytes = free_bytes

    def wait(self) -> None:
        self.disk.free_bytes = None
        self.clock.pass_by()

    def reopen(self) -> None:
        self.disk.free_bytes = None
        self.store.close()
        self.store = self.opened()
        self.check()

    def check(self) -> None:
        assert set(self.store.keys()) == set(self.held)
        sizes = bytes_by_tag(self.folder)
        assert all(size <= QUOTA for tag, size in sizes.items() if tag != UNSALTED) and size_of(self.folder) <= 9 * SEGMENT


TAGS = st.sampled_from([A, B, UNSALTED])
STEPS = st.one_of(
    st.tuples(st.just(Salted.write), TAGS, st.integers(0, 30), st.integers(1, 12)),
    st.tuples(st.just(Salted.write), TAGS, st.integers(0, 30), st.integers(1, 12)),
    st.tuples(st.just(Salted.delete), TAGS),
    st.tuples(st.just(Salted.fill_disk), st.integers(0, 1500)),
    st.tuples(st.just(Salted.wait)),
    st.tuples(st.just(Salted.reopen)),
)


@settings(max_examples=1000 if NIGHTLY else 60, deadline=None)
@given(st.lists(STEPS, max_size=25))
def test_files_stay_under_quotas_after_random_steps(steps: list[tuple[Any, ...]]) -> None:
    with TemporaryDirectory() as name:
        it = Salted(Path(name))
        for call, *arguments in steps:
            call(it, *arguments)
        it.reopen()
        assert set(readable(it.store)) == set(it.held)
        it.store.close()


def test_deleted_pages_stay_deleted_when_the_writer_is_killed(tmp_path: Path) -> None:
    """The files also stay under the quota."""
    reported: dict[bytes, None] = {}
    for life in range(40 if NIGHTLY else 6):
        command = [sys.executable, "-m", "tests.exec.tiers.killed_writer", str(tmp_path), "salted"]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin and process.stdout
            print(life * 1000, file=process.stdin, flush=True)
            pid = int(process.stdout.readline().removeprefix("writer "))
            gone, deletes = set[bytes](), list[bytes]()
            for at, line in enumerate(iter(process.stdout.readline, "gone\n")):
                what, *sets = line[:-1].split(" ")
                stored, dropped = ([bytes.fromhex(each) for each in words.split(",") if each] for words in sets)
                stored, deletes = ([], stored) if what == "deletes" else (stored, [])
                gone = gone.union(dropped) - set(stored)
                for key in dropped:
                    reported.pop(key, None)
                reported |= dict.fromkeys(stored)
                if at == 25 + 7 * life:
                    time.sleep(0.0007 * (life % 5))
                    os.kill(pid, signal.SIGKILL)
            process.stdin.close()
        assert all(size <= killed_writer.QUOTA for tag, size in bytes_by_tag(tmp_path).items() if tag != UNSALTED)
        it = killed_writer.opened(tmp_path, killed_writer.QUOTA)
        held = set(readable(it))
        assert not held & gone and it.counts().corrupt_pages == 0
        lost = [key for key in set(reported) - held if tag_of(key) not in deletes]
        assert len(lost) <= 2 * killed_writer.SEGMENT // killed_writer.PAGE, (
            "the only missing pages are those that the last, unreported write has evicted"
        )
        it.close()
        reported = dict.fromkeys(held)
    assert PAGE and len(reported) > 20
