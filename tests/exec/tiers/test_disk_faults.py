"""The file tier on a disk that is full, faulty or read-only: no call of an open store raises, and missing pages are counted."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from rootstock_llm.services.worker.exec.contracts.page_store import Written
from rootstock_llm.services.worker.exec.tiers.store_folder import StoreUnusable
from rootstock_llm.services.worker.exec.tiers.write_pause import WritePause
from tests.all_pairs import each_value
from tests.exec.tiers.pages import FORMAT, SEGMENT, SLOTS, Hours, key, keys, read, readable, size_of, store, write
from tests.exec.tiers.sick_disks import SickDisk

NOTHING = Written((), ())
ROOT = Path(__file__).resolve().parents[3]
# A script for a process with a limit on file sizes. The system writes only a part of the record at the limit, and then fails.
LIMITED = """
import resource, sys
from pathlib import Path
from rootstock_llm.services.worker.exec.tiers.segment_format import DIRECT_PAGE_BYTES, SegmentFormat
from rootstock_llm.services.worker.exec.tiers.segment_store import SegmentStore
from tests.exec.tiers.pages import FORMAT, Hours, keys, readable, store, write

folder, clock = Path(sys.argv[1]), Hours()
it = store(folder, clock=clock)
resource.setrlimit(resource.RLIMIT_FSIZE, (FORMAT.segment_bytes(2) + 100, resource.RLIM_INFINITY))
assert write(it, keys(1, 2, 3, 4, 5)).stored == tuple(keys(1, 2))
assert it.counts().failed_writes == 1 and readable(it) == keys(1, 2)
assert (folder / "segment-00000000.kv").stat().st_size == FORMAT.segment_bytes(2)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
clock.pass_by()
assert write(it, keys(1, 2, 3, 4, 5)).stored == tuple(keys(3, 4, 5))
it.close()
assert readable(store(folder)) == keys(1, 2, 3, 4, 5)
large, pages = DIRECT_PAGE_BYTES, keys(1, 2, 3, 4, 5)
form = SegmentFormat(large, b"")
sizes = {"max_bytes": 64 * large, "segment_bytes": 9 * large, "clock": clock}
it = SegmentStore(folder / "large", large, **sizes)
resource.setrlimit(resource.RLIMIT_FSIZE, (form.segment_bytes(2) + 5000, resource.RLIM_INFINITY))
assert write(it, pages).stored == tuple(keys(1, 2))
assert it.counts().failed_writes == 1 and readable(it) == keys(1, 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
clock.pass_by()
assert write(it, pages).stored == tuple(keys(3, 4, 5))
it.close()
assert readable(SegmentStore(folder / "large", large, **sizes)) == pages
print("done")
"""


@pytest.fixture
def disk() -> SickDisk:
    return SickDisk()


@pytest.fixture
def clock() -> Hours:
    return Hours()


class TestWrites:
    @pytest.mark.by_day(one_in=7, seed=2)
    @pytest.mark.parametrize("free_bytes", range(0, SEGMENT + 200, 61))
    def test_write_stores_the_first_pages_when_the_disk_is_full(
        self, tmp_path: Path, disk: SickDisk, clock: Hours, free_bytes: int
    ) -> None:
        """The disk becomes full within a header, a record or an index."""
        it = store(tmp_path, disk=disk, clock=clock)
        disk.free_bytes = free_bytes
        many = keys(*range(2 * SLOTS))
        stored = write(it, many).stored
        assert stored == tuple(many[: len(stored)]) and len(stored) < len(many)
        assert it.counts().failed_writes == 1
        assert readable(it) == list(stored)
        assert it.counts().bytes_on_disk == size_of(tmp_path), "the partial record is removed"
        disk.free_bytes = None
        assert write(it, many) == Written((), (), already_stored=len(stored)), "the store writes nothing during the pause"
        clock.pass_by()
        assert stored + write(it, many).stored == tuple(many)
        it.close()
        it = store(tmp_path)
        assert readable(it) == many and it.counts().corrupt_pages == 0

    @pytest.mark.by_day(one_in=3, seed=21)
    @each_value(
        call=["create", "write", "sync", "rename"], number=[errno.EIO, errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EDQUOT]
    )
    def test_write_counts_an_error_and_is_retried_after_a_pause(
        self, tmp_path: Path, disk: SickDisk, clock: Hours, call: str, number: int
    ) -> None:
        it = store(tmp_path, disk=disk, clock=clock)
        write(it, keys(0))
        disk.broken[call] = number
        many = keys(*range(1, 3 * SLOTS))
        stored = write(it, many).stored
        assert it.counts().failed_writes == 1 and len(stored) in (0, SLOTS - 1)
        assert readable(it) == [key(0), *stored]
        assert not list(tmp_path.glob("*.part"))
        clock.pass_by()
        write(it, many)
        assert it.counts().failed_writes == 2
        disk.broken.clear()
        clock.pass_by()
        write(it, many)
        it.close()
        assert readable(store(tmp_path)) == [key(0), *many]

    def test_write_overwrites_a_partial_record(self, tmp_path: Path, disk: SickDisk, clock: Hours) -> None:
        """The record can neither be completed nor truncated."""
        it = store(tmp_path, disk=disk, clock=clock)
        write(it, keys(1))
        disk.free_bytes, disk.broken = FORMAT.record_bytes - 1, {"truncate": errno.EIO}
        assert write(it, keys(2, 3)) == NOTHING
        assert size_of(tmp_path) == FORMAT.segment_bytes(2) - 1
        disk.free_bytes = None
        clock.pass_by()
        assert write(it, keys(3, 2)).stored == tuple(keys(3, 2))
        it.close()
        assert readable(store(tmp_path)) == keys(1, 3, 2)

    @pytest.mark.parametrize("tail", ["truncated", "left in the file"])
    def test_files_stay_under_the_cap_when_writes_fail(self, tmp_path: Path, disk: SickDisk, clock: Hours, tail: str) -> None:
        it = store(tmp_path, 4, disk, clock)
        for number in range(0, 200, 3):
            disk.free_bytes = 50 * (number % 41) if number % 2 else None
            disk.broken = {} if number % 2 == 0 or tail == "truncated" else {"truncate": errno.EIO}
            write(it, keys(number, number + 1, number + 2))
            assert size_of(tmp_path) <= 4 * SEGMENT
            clock.pass_by()
        assert it.counts().failed_writes > 10
        assert readable(it) == it.keys() != []

    def test_write_stores_nothing_when_the_oldest_segment_cannot_be_deleted(
        self, tmp_path: Path, disk: SickDisk, clock: Hours
    ) -> None:
        it = store(tmp_path, 4, disk, clock)
        many = keys(*range(4 * SLOTS))
        write(it, many)
        disk.broken["unlink"] = errno.EROFS
        assert write(it, keys(100)) == NOTHING
        assert readable(it) == many and size_of(tmp_path) <= 4 * SEGMENT
        disk.broken.clear()
        clock.pass_by()
        assert write(it, keys(100)) == Written(tuple(keys(100)), tuple(many[:SLOTS]))

    @pytest.mark.by_day(one_in=2, seed=2)
    @pytest.mark.parametrize("suffix", [".kv", ".index"])
    def test_store_keeps_a_segment_when_one_file_cannot_be_deleted(self, tmp_path: Path, clock: Hours, suffix: str) -> None:
        """The index is deleted before the segment, because a segment can be read without its index, but not the reverse."""

        class Clinging(SickDisk):
            def unlink(self, path: Path) -> None:
                self.broken = {"unlink": errno.EIO} if path.suffix == suffix else {}
                super().unlink(path)

        it = store(tmp_path, 4, Clinging(), clock)
        many = keys(*range(4 * SLOTS))
        write(it, many)
        assert write(it, keys(100)) == NOTHING
        assert readable(it) == many and it.counts().bytes_on_disk == size_of(tmp_path)
        it.close()
        assert readable(store(tmp_path, 4)) == many

    def test_deletion_removes_a_partial_index_with_the_segment(self, tmp_path: Path, disk: SickDisk) -> None:
        it = store(tmp_path, disk=disk)
        disk.broken = {"rename": errno.EIO, "unlink": errno.EIO}
        assert write(it, keys(*range(SLOTS))).stored == tuple(keys(*range(SLOTS)))
        assert size_of(tmp_path) <= SEGMENT
        disk.broken.clear()
        it.delete()
        assert size_of(tmp_path) == 0

    def test_successful_write_resets_the_length_of_the_pause(self, tmp_path: Path, disk: SickDisk, clock: Hours) -> None:
        it = store(tmp_path, disk=disk, clock=clock)
        for number in range(1, 10):
            disk.broken["write"] = errno.EIO
            assert write(it, keys(number)) == NOTHING
            disk.broken.clear()
            clock.now += 1
            assert write(it, keys(number)).stored == tuple(keys(number))

    def test_write_counts_no_failure_during_a_pause(self, tmp_path: Path, disk: SickDisk, clock: Hours) -> None:
        it = store(tmp_path, disk=disk, clock=clock)
        disk.broken["write"] = errno.EIO
        for _ in range(5):
            assert write(it, keys(1)) == NOTHING
        assert it.counts().failed_writes == 1

    def test_write_stops_at_a_file_size_limit(self, tmp_path: Path) -> None:
        command = [sys.executable, "-c", LIMITED, str(tmp_path / "kv")]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr


class TestPause:
    def test_pause_doubles_up_to_five_minutes_until_a_success(self) -> None:
        clock = Hours()
        pause = WritePause(clock)
        assert pause.over
        assert [pause.failed() for _ in range(11)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
        pause.worked()
        assert pause.over and pause.failed() == 1

    def test_first_pause_ends_after_one_second(self) -> None:
        clock = Hours()
        pause = WritePause(clock)
        pause.failed()
        clock.now = 0.9
        assert not pause.over
        clock.now = 1.0
        assert pause.over


class TestReads:
    @pytest.mark.parametrize("call", ["read", "open"])
    def test_read_loses_a_page_when_the_disk_fails(self, tmp_path: Path, disk: SickDisk, call: str) -> None:
        it = store(tmp_path, disk=disk)
        write(it, keys(1, 2, 3))
        disk.broken[call] = errno.EIO
        assert read(it, keys(1, 2, 3)) == 0
        disk.broken.clear()
        assert it.keys() == keys(2, 3) and it.take_lost() == tuple(keys(1)) and it.take_lost() == ()
        assert (it.counts().failed_reads, it.counts().corrupt_pages) == (1, 0)
        assert write(it, keys(1)).stored == tuple(keys(1))
        assert read(it, keys(1, 2, 3)) == 3

    def test_page_does_not_count_as_lost_when_the_page_is_written_again(self, tmp_path: Path, disk: SickDisk) -> None:
        it = store(tmp_path, disk=disk)
        write(it, keys(1))
        disk.broken["read"] = errno.EIO
        read(it, keys(1))
        disk.broken.clear()
        assert write(it, keys(1)).stored == tuple(keys(1)) and it.take_lost() == ()

    @pytest.mark.parametrize("number", [0, 1], ids=["sealed segment", "open segment"])
    def test_read_loses_a_whole_segment_when_its_file_is_missing(self, tmp_path: Path, number: int) -> None:
        it = store(tmp_path)
        write(it, keys(*range(SLOTS + 2)))
        (tmp_path / f"segment-{number:08d}.kv").unlink()
        missing, left = keys(*range(SLOTS)), keys(SLOTS, SLOTS + 1)
        if number:
            missing, left = left, missing
        assert read(it, missing) == 0
        assert it.keys() == left and it.take_lost() == tuple(missing)
        assert set(write(it, missing).stored) == set(missing)
        assert set(readable(it)) == {*missing, *left}
        assert it.counts().bytes_on_disk == size_of(tmp_path)

    def test_reads_continue_while_writes_pause(self, tmp_path: Path, disk: SickDisk) -> None:
        it = store(tmp_path, disk=disk)
        write(it, keys(1, 2))
        disk.broken["write"] = errno.ENOSPC
        write(it, keys(3))
        assert read(it, keys(1, 2)) == 2


class TestDelete:
    def test_failed_deletion_is_repeated_before_the_next_write(self, tmp_path: Path, disk: SickDisk, clock: Hours) -> None:
        it = store(tmp_path, disk=disk, clock=clock)
        write(it, keys(*range(SLOTS + 1)))
        disk.broken["unlink"] = errno.EIO
        it.delete()
        assert it.keys() == [] and read(it, keys(1)) == 0 and it.counts().bytes_on_disk > 0
        clock.pass_by()
        assert write(it, keys(7)) == NOTHING
        disk.broken.clear()
        clock.pass_by()
        assert write(it, keys(7)).stored == tuple(keys(7))
        it.close()
        assert store(tmp_path).keys() == keys(7)


class TestOpening:
    def test_opening_fails_when_the_folder_is_read_only(self, tmp_path: Path, disk: SickDisk) -> None:
        it = store(tmp_path)
        write(it, keys(1))
        it.close()
        disk.broken["create"] = errno.EROFS
        with pytest.raises(StoreUnusable, match=r"KV pages cannot be stored in .*Read-only file system"):
            store(tmp_path, disk=disk)
        assert readable(store(tmp_path)) == keys(1), "the failed opening has released the lock"

    @pytest.mark.by_day(one_in=2, seed=12)
    @pytest.mark.parametrize("call", ["open", "read", "truncate", "unlink"])
    def test_opening_loses_only_the_pages_of_an_unreadable_segment(self, tmp_path: Path, disk: SickDisk, call: str) -> None:
        it = store(tmp_path)
        write(it, keys(1))
        it.close()
        disk.broken[call] = errno.EIO
        it = store(tmp_path, disk=disk)
        assert readable(it) == [] and it.counts().failed_reads > 0
        del disk.broken[call]
        write(it, keys(2))
        assert readable(it) == keys(2)

    def test_opening_finds_all_pages_when_the_disk_is_full(self, tmp_path: Path, disk: SickDisk) -> None:
        it = store(tmp_path)
        write(it, keys(*range(2 * SLOTS + 1)))
        it.close()
        (tmp_path / "segment-00000000.index").unlink()
        disk.free_bytes = 0
        it = store(tmp_path, disk=disk)
        assert readable(it) == keys(*range(2 * SLOTS + 1)) and it.counts().failed_writes == 1

    def test_opening_loses_only_an_unreadable_page(self, tmp_path: Path) -> None:
        class BadSector(SickDisk):
            def read(self, fd, parts, offset):  # type: ignore[no-untyped-def]
                self.broken = {"read": errno.EIO} if offset == FORMAT.segment_bytes(1) else {}
                return super().read(fd, parts, offset)

        it = store(tmp_path)
        write(it, keys(1, 2, 3))
        it.close()
        it = store(tmp_path, disk=BadSector())
        assert it.keys() == keys(1, 3) and it.counts().failed_reads == 1
