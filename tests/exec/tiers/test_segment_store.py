"""The file tier on a disk without faults: stored pages, their order, the cap, and the bytes of the files."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import xxhash

from rootstock_llm.services.worker.exec.contracts.page_store import StoreCounts, Written
from rootstock_llm.services.worker.exec.tiers.disk import Disk
from rootstock_llm.services.worker.exec.tiers.segment_format import BLOCK_BYTES, DIRECT_PAGE_BYTES
from rootstock_llm.services.worker.exec.tiers.segment_store import LEAST_SEGMENTS, SegmentStore
from rootstock_llm.services.worker.exec.tiers.store_folder import StoreBusy, StoreUnusable
from tests.exec.tiers.pages import (
    FORMAT,
    PAGE,
    SEGMENT,
    SLOTS,
    A,
    Hours,
    in_memory,
    key,
    keys,
    page,
    read,
    readable,
    size_of,
    store,
    write,
)
from tests.exec.tiers.sick_disks import DiaryDisk, MortalDisk, SickDisk


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def has_direct(folder: Path) -> bool:
    """Returns whether the file system supports writes that bypass its page cache."""
    try:
        os.close(os.open(folder / "asked", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


def write_each(into: SegmentStore) -> None:
    """Fills a segment with one page per write."""
    for number in range(SLOTS):
        assert write(into, keys(number)).stored == (key(number),)


class TestPages:
    def test_read_returns_written_pages(self, tmp_path: Path) -> None:
        it = store(tmp_path)
        assert write(it, keys(1, 2, 3)) == Written(tuple(keys(1, 2, 3)), ())
        assert read(it, keys(3, 1, 2, 1)) == 4
        assert it.keys() == keys(1, 2, 3)

    def test_read_stops_at_the_first_missing_page(self, tmp_path: Path) -> None:
        it = store(tmp_path)
        write(it, keys(1, 2, 4, 5))
        assert read(it, keys(1, 2, 3, 4)) == 2
        assert read(it, keys(3, 1)) == 0
        assert it.take_lost() == ()

    def test_read_does_not_write_beyond_the_returned_pages(self, tmp_path: Path) -> None:
        it = store(tmp_path)
        write(it, keys(1))
        out = bytearray(b"x" * 2 * PAGE)
        assert it.read(keys(1, 2), memoryview(out)) == 1
        assert out == page(key(1)) + b"x" * PAGE

    def test_write_stores_each_key_once(self, tmp_path: Path) -> None:
        it = store(tmp_path)
        assert write(it, keys(1, 2, 1)).stored == tuple(keys(1, 2))
        assert write(it, keys(2, 3)).stored == tuple(keys(3))
        assert it.counts().pages == 3

    def test_read_returns_pages_of_several_segments(self, tmp_path: Path) -> None:
        it = store(tmp_path)
        many = keys(*range(3 * SLOTS + 1))
        assert write(it, many).stored == tuple(many)
        assert read(it, many) == len(many)
        assert read(it, many[::-1]) == len(many)

    def test_reading_and_writing_accept_buffers_of_any_shape_and_type(self, tmp_path: Path) -> None:
        it = store(tmp_path)
        pages = [memoryview(page(key(number))).cast("B", (1, PAGE)) for number in (1, 2)]
        assert it.write(keys(1, 2), pages).stored == tuple(keys(1, 2))
        out = bytearray(2 * PAGE)
        assert it.read(keys(1, 2), memoryview(out).cast("i")) == 2
        assert out == b"".join(pages)

    def test_reading_and_writing_accept_an_empty_list_of_pages(self, tmp_path: Path) -> None:
        it = store(tmp_path)
        assert it.read([], memoryview(bytearray())) == 0
        assert it.write([], []) == Written((), ())
        assert names(tmp_path) == ["LOCK"]

    def test_deletion_removes_all_pages(self, tmp_path: Path) -> None:
        it = store(tmp_path)
        write(it, keys(*range(10)))
        it.delete()
        assert it.keys() == [] and read(it, keys(1)) == 0
        assert names(tmp_path) == ["LOCK"]
        assert it.counts() == StoreCounts(0, 0, 0, 0, 0)
        write(it, keys(1, 2))
        assert read(it, keys(1, 2)) == 2


class TestRestart:
    @pytest.mark.parametrize("count", [1, 3 * SLOTS + 2])
    def test_restart_finds_all_pages_in_order(self, tmp_path: Path, count: int) -> None:
        many = keys(*range(count))
        for at, one in enumerate(many):
            it = store(tmp_path)
            assert it.keys() == many[:at]
            write(it, [one])
            it.close()
        it = store(tmp_path)
        assert it.keys() == many and read(it, many) == count
        assert it.counts() == StoreCounts(0, 0, 0, size_of(tmp_path), count)

    def test_restarted_store_continues_to_fill_the_last_segment(self, tmp_path: Path) -> None:
        for number in range(SLOTS):
            it = store(tmp_path)
            write(it, keys(number))
            it.close()
        assert names(tmp_path) == ["LOCK", "segment-00000000.index", "segment-00000000.kv"]

    def test_restart_reads_no_page_of_a_sealed_segment(self, tmp_path: Path) -> None:
        """Damaged pages are only found when they are read."""
        it = store(tmp_path)
        write(it, keys(*range(SLOTS)))
        it.close()
        path = tmp_path / "segment-00000000.kv"
        path.write_bytes(path.read_bytes()[: FORMAT.segment_bytes(0)] + bytes(SLOTS * FORMAT.record_bytes))
        it = store(tmp_path)
        assert it.keys() == keys(*range(SLOTS)) and it.counts().corrupt_pages == 0
        assert readable(it) == [] and it.counts().corrupt_pages == SLOTS

    def test_restart_accepts_another_cap_and_segment_size(self, tmp_path: Path) -> None:
        many = keys(*range(22))
        it = store(tmp_path)
        write(it, many)
        it.close()
        for slots, segments in ((1, 30), (16, 8), (2, 12)):
            cap = segments * FORMAT.bytes_with_index(slots)
            it = SegmentStore(tmp_path, PAGE, cap, FORMAT.bytes_with_index(slots))
            assert size_of(tmp_path) <= cap
            held = list(it.keys())
            assert held == many[-len(held) :] and read(it, held) == len(held)
            more = keys(*range(100 * slots, 100 * slots + 5))
            assert set(write(it, more).stored) == set(more)
            many = list(it.keys())
            it.close()

    def test_files_stay_under_the_cap_when_a_store_reopens_with_a_smaller_cap(self, tmp_path: Path) -> None:
        it = store(tmp_path)
        write(it, keys(*range(4 * SLOTS + 1)))
        it.close()
        cap = 4 * SEGMENT + FORMAT.bytes_with_index(2)
        assert size_of(tmp_path) < cap
        it = SegmentStore(tmp_path, PAGE, cap)
        for number in range(100, 100 + 2 * SLOTS):
            write(it, keys(number))
            assert size_of(tmp_path) <= cap


class TestCap:
    def test_cap_evicts_the_oldest_segment(self, tmp_path: Path) -> None:
        it = store(tmp_path, segments=4)
        assert write(it, keys(*range(4 * SLOTS))).dropped == ()
        assert write(it, keys(100)).dropped == tuple(keys(*range(SLOTS)))
        assert it.keys() == keys(*range(SLOTS, 4 * SLOTS), 100)
        assert readable(it) == it.keys()

    def test_single_write_can_be_larger_than_the_cap(self, tmp_path: Path) -> None:
        """A page that one write stores and evicts is reported neither as stored nor as dropped."""
        it = store(tmp_path, segments=4)
        write(it, keys(1000, 1001))
        many = keys(*range(10 * SLOTS))
        done = write(it, many)
        assert done.dropped == tuple(keys(1000, 1001))
        assert list(done.stored) == it.keys() == many[-len(done.stored) :]
        assert readable(it) == it.keys()

    def test_files_stay_under_the_cap_at_every_call(self, tmp_path: Path) -> None:
        disk, segments = MortalDisk(tmp_path), 5
        for begin in range(0, 200, 50):
            it = store(tmp_path, segments, disk)
            for number in range(begin, begin + 50, 3):
                write(it, keys(number, number + 1, number + 2))
                assert it.counts().bytes_on_disk == size_of(tmp_path)
            it.close()
        assert (segments - 1) * SEGMENT < max(disk.sizes) <= segments * SEGMENT

    def test_segments_are_small_when_the_cap_is_small(self, tmp_path: Path) -> None:
        cap = 9 * SEGMENT
        it = SegmentStore(tmp_path, PAGE, cap)
        write(it, keys(*range(100)))
        assert size_of(tmp_path) <= cap
        assert len(list(tmp_path.glob("*.kv"))) >= LEAST_SEGMENTS
        assert len(readable(it)) >= 9 * SLOTS * 3 // 4

    def test_segment_has_at_least_one_page(self, tmp_path: Path) -> None:
        it = SegmentStore(tmp_path, PAGE, 10 * SEGMENT, segment_bytes=1)
        write(it, keys(1, 2, 3))
        assert len(list(tmp_path.glob("*.kv"))) == 3 and read(it, keys(1, 2, 3)) == 3

    def test_store_refuses_a_cap_below_four_segments(self, tmp_path: Path) -> None:
        least = 4 * FORMAT.bytes_with_index(1)
        with pytest.raises(ValueError, match=f"is {least - 1} bytes; pages of {PAGE} bytes need at least {least}"):
            SegmentStore(tmp_path, PAGE, least - 1)
        it = SegmentStore(tmp_path, PAGE, least)
        write(it, keys(*range(9)))
        assert readable(it) == keys(5, 6, 7, 8)


class TestFolder:
    @pytest.fixture(autouse=True, params=[0o000, 0o022, 0o777], ids=oct)
    def umask(self, request: pytest.FixtureRequest) -> Iterator[None]:
        before = os.umask(request.param)
        yield
        os.umask(before)

    @pytest.mark.by_day(one_in=2, seed=4)
    def test_folder_and_files_are_private(self, tmp_path: Path) -> None:
        folder = tmp_path / "kv"
        it = store(folder)
        write(it, keys(*range(SLOTS + 1)))
        it.close()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == dict.fromkeys(
            ("LOCK", "segment-00000000.kv", "segment-00000000.index", "segment-00000001.kv"), 0o600
        )

    @pytest.mark.by_day(one_in=3)
    def test_existing_folder_becomes_private(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o755)
        store(tmp_path)
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


class TestOneStore:
    def test_second_store_in_the_same_folder_is_refused(self, tmp_path: Path) -> None:
        first = store(tmp_path)
        write(first, keys(1))
        before = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(StoreBusy, match="is in use by another process, or by another store of this process"):
            store(tmp_path)
        assert len(list(Path("/proc/self/fd").iterdir())) == before, "the refused store has closed its files"
        assert read(first, keys(1)) == 1
        first.close()
        assert read(store(tmp_path), keys(1)) == 1

    def test_store_refuses_a_folder_that_cannot_be_created(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(StoreUnusable, match=r"KV pages cannot be stored in .*Not a directory"):
            store(tmp_path / "file" / "kv")

    def test_deletion_keeps_foreign_files(self, tmp_path: Path) -> None:
        for name in ("notes", "segment-1.kv", "segment-00000001.txt", "segment-000000001.kv"):
            (tmp_path / name).write_bytes(b"mine")
        it = store(tmp_path)
        write(it, keys(1))
        it.delete()
        assert names(tmp_path) == ["LOCK", "notes", "segment-000000001.kv", "segment-00000001.txt", "segment-1.kv"]

    @pytest.mark.parametrize(("page_bytes", "identity"), [(0, b""), (1 << 31, b""), (PAGE, b"x" * 65)])
    def test_store_refuses_page_sizes_and_identities_that_the_format_cannot_represent(
        self, tmp_path: Path, page_bytes: int, identity: bytes
    ) -> None:
        with pytest.raises(ValueError, match=r"it must have 1 to|it must have at most"):
            SegmentStore(tmp_path, page_bytes, 1 << 40, identity=identity)


class TestIdentity:
    def test_opening_deletes_pages_of_another_identity(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        it = store(tmp_path, identity=b"a")
        write(it, keys(*range(SLOTS + 1)))
        it.close()
        it = store(tmp_path, identity=b"b")
        assert it.keys() == [] and names(tmp_path) == ["LOCK"]
        assert [getattr(record, "fields", None) for record in caplog.records] == [{"segments": 2}]
        write(it, keys(1))
        it.close()
        assert store(tmp_path, identity=b"a").keys() == []

    def test_opening_deletes_pages_of_another_size(self, tmp_path: Path) -> None:
        it = store(tmp_path)
        write(it, keys(1))
        it.close()
        it = SegmentStore(tmp_path, PAGE + 8, 1 << 20)
        assert it.keys() == [] and names(tmp_path) == ["LOCK"]

    def test_opening_deletes_segments_of_another_version(self, tmp_path: Path) -> None:
        it = store(tmp_path)
        write(it, keys(1))
        it.close()
        path = tmp_path / "segment-00000000.kv"
        body = bytearray(path.read_bytes())
        body[8:12] = struct.pack("<I", 1)
        body[112:128] = xxhash.xxh3_128_digest(bytes(body[:112]))
        path.write_bytes(body)
        assert store(tmp_path).keys() == [] and names(tmp_path) == ["LOCK"]


class TestFiles:
    """The files have exactly the bytes that the tests compute from the documented format."""

    @staticmethod
    def header(number: int, identity: bytes, tag: bytes = bytes(8), began_ms: int = 0) -> bytes:
        fields = b"RSTKVSEG" + struct.pack("<IIQQ", 2, len(identity), PAGE, number) + identity.ljust(64, b"\0")
        fields += tag + struct.pack("<Q", began_ms)
        return fields + xxhash.xxh3_128_digest(fields)

    @staticmethod
    def record(header: bytes, of: bytes) -> bytes:
        fields = b"RSTKVREC" + of
        seed = struct.unpack("<Q", header[-8:])[0]
        return fields + xxhash.xxh3_128_digest(fields + xxhash.xxh3_128_digest(page(of)), seed=seed) + page(of)

    def test_segment_has_the_documented_bytes(self, tmp_path: Path) -> None:
        write(store(tmp_path, identity=b"llama"), keys(*range(SLOTS + 2)))
        header = self.header(1, b"llama")
        expected = header + self.record(header, key(SLOTS)) + self.record(header, key(SLOTS + 1))
        assert (tmp_path / "segment-00000001.kv").read_bytes() == expected

    def test_segment_of_a_salt_has_the_documented_bytes(self, tmp_path: Path) -> None:
        clock = Hours()
        clock.pass_by()
        write(store(tmp_path, clock=clock), keys(1, tag=A))
        header = self.header(0, b"", A, 3_600_000)
        assert (tmp_path / "segment-00000000.kv").read_bytes() == header + self.record(header, key(1, A))

    def test_index_has_the_documented_bytes(self, tmp_path: Path) -> None:
        write(store(tmp_path), keys(*range(SLOTS)))
        header = self.header(0, b"")
        body = b"RSTKVIDX" + struct.pack("<IIQ", 2, SLOTS, FORMAT.segment_bytes(SLOTS)) + header[-16:]
        body += struct.pack("<4I", 0, 1, 2, 3) + b"".join(keys(0, 1, 2, 3))
        assert (tmp_path / "segment-00000000.index").read_bytes() == body + xxhash.xxh3_128_digest(body)

    def test_pages_are_synced_before_the_index_and_the_index_before_the_rename(self, tmp_path: Path) -> None:
        """Recovery relies on this order."""
        disk = DiaryDisk()
        write(store(tmp_path, disk=disk), keys(*range(SLOTS)))
        part, folder = "segment-00000000.index.part", tmp_path.name
        assert disk.calls[-5:] == [
            "sync segment-00000000.kv",
            f"create {part}",
            f"sync {part}",
            "rename segment-00000000.index",
            f"sync {folder}",
        ]

    def test_store_drops_written_bytes_from_the_page_cache(self, tmp_path: Path) -> None:
        """Each append drops its own bytes and those of the append before it. Finishing the segment drops all its bytes.

        If the file system cannot drop bytes from the page cache, no page is lost.
        """
        disk = DiaryDisk()
        write_each(store(tmp_path / "advised", disk=disk))
        ends = [FORMAT.segment_bytes(slots) for slots in range(SLOTS + 1)]
        ranges = [(ends[0], ends[1]), *zip(ends, ends[2:], strict=False), (ends[0], ends[-1])]
        assert disk.dropped == [("segment-00000000.kv", *each) for each in ranges]
        deaf = SickDisk()
        deaf.broken["drop_cached"] = errno.EINVAL
        it = store(tmp_path / "deaf", disk=deaf)
        write_each(it)
        assert readable(it) == keys(*range(SLOTS)) and it.counts().failed_writes == 0

    def test_large_pages_begin_at_block_boundaries(self, tmp_path: Path) -> None:
        """The segment's header and each record's head take a whole block. The memory of the third page is not block-aligned."""
        size, block = DIRECT_PAGE_BYTES, BLOCK_BYTES
        it = SegmentStore(tmp_path, size, 64 * size, 8 * size, wall=Hours())
        for numbers in ((1, 2), (3,)):
            pages = [in_memory(page(key(number), size), offset=number // 3) for number in numbers]
            assert it.write(keys(*numbers), pages).stored == tuple(keys(*numbers))
        whole = (tmp_path / "segment-00000000.kv").read_bytes()
        assert len(whole) == block + 3 * (block + size)
        fields = b"RSTKVSEG" + struct.pack("<IIQQ", 3, 0, size, 0) + bytes(64 + 8 + 8)
        fields = fields.ljust(block - 16, b"\0")
        assert whole[:block] == fields + xxhash.xxh3_128_digest(fields)
        seed = struct.unpack("<Q", whole[block - 8 : block])[0]
        for number in (1, 2, 3):
            head = (b"RSTKVREC" + key(number)).ljust(block - 16, b"\0")
            content = page(key(number), size)
            head += xxhash.xxh3_128_digest(head + xxhash.xxh3_128_digest(content), seed=seed)
            at = block + (number - 1) * (block + size)
            assert whole[at : at + block + size] == head + content
        it.close()
        with (tmp_path / "segment-00000000.kv").open("ab") as file:
            file.write(b"torn")
        disk = DiaryDisk()
        it = SegmentStore(tmp_path, size, 64 * size, 8 * size, disk=disk)
        assert disk.calls[-1] == "pass cache segment-00000000.kv", (
            "the torn record is cut off before the file is dropped from the page cache"
        )
        assert readable(it) == keys(1, 2, 3) and write(it, keys(4)).stored == tuple(keys(4))
        assert readable(it) == keys(1, 2, 3, 4)
        it.close()

    def test_direct_write_bypasses_the_page_cache(self, tmp_path: Path) -> None:
        disk, blocks = Disk(), in_memory(page(key(1), DIRECT_PAGE_BYTES))
        fd = disk.create(tmp_path / "file", direct=True)
        assert is_direct(fd) == has_direct(tmp_path)
        assert disk.write(fd, [bytes(BLOCK_BYTES), blocks], BLOCK_BYTES) == BLOCK_BYTES + blocks.nbytes
        assert is_direct(fd) == has_direct(tmp_path)
        assert (tmp_path / "file").read_bytes() == bytes(2 * BLOCK_BYTES) + blocks
        disk.close(fd)

    def test_direct_write_falls_back_to_the_page_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A disk with larger blocks refuses a direct write with EINVAL."""
        disk, write_to = Disk(), os.pwritev

        def refused(fd: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
            if is_direct(fd):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return write_to(fd, parts, offset)

        monkeypatch.setattr(os, "pwritev", refused)
        fd = disk.create(tmp_path / "file", direct=True)
        assert disk.write(fd, [b"head", memoryview(b"page")], 0) == 8 and not is_direct(fd)
        assert (tmp_path / "file").read_bytes() == b"headpage"
        disk.close(fd)

    def test_lock_file_is_empty(self, tmp_path: Path) -> None:
        write(store(tmp_path), keys(1))
        assert (tmp_path / "LOCK").read_bytes() == b""
