"""A segment as a process finds it: by its index, or where that is missing or not its own, by its records."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from services.worker.exec.tiers.segment_file import SegmentFile, SegmentPlace
from services.worker.exec.tiers.segment_format import index_bytes, key_of, unpack_index


@dataclass(frozen=True, slots=True)
class Recovered:
    """segment: None if the file is of another identity, page size or version, or cannot be told from one. corrupt, failed: slots
    that are not what was written, or that an error kept from being read."""

    segment: SegmentFile | None
    corrupt: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Scan:
    """keys: up to the last whole record."""

    keys: list[bytes | None]
    corrupt: int = 0
    failed: int = 0


def recover(place: SegmentPlace, capacity: Callable[[bytes], int]) -> Recovered:
    """With a whole index the segment is sealed, and its pages are left to be checked when they are read. Else every page is read
    and checked, what stands behind the last whole one is cut off, and the segment is open. capacity: slots of a segment, by its
    tag. Raises OSError."""
    disk = place.disk
    fd = disk.open(place.folder.segment(place.number), writable=True)
    with ExitStack() as stack:
        stack.callback(disk.close, fd)
        begin = bytearray(place.format.header_bytes)
        disk.read(fd, [begin], 0)
        header = bytes(begin)
        head = place.format.head_of(header, place.number)
        if head is None:
            return Recovered(None)
        size = disk.size(fd)
        records = _indexed(place, header, size)
        if records is not None:
            keys = [records.get(slot) for slot in range(_whole_slots(place, size))]
            assert place.format.segment_bytes(len(keys)) == size, "an indexed segment ends with a record"
            return Recovered(SegmentFile(place, head, keys, 0, None, index_bytes(len(records))))
        disk.unlink(place.folder.index(place.number))
        scan = _scanned(place, header, fd, _whole_slots(place, size))
        disk.truncate(fd, place.format.segment_bytes(len(scan.keys)))
        if place.format.is_direct:
            disk.pass_cache(fd)
        stack.pop_all()
        return Recovered(SegmentFile(place, head, scan.keys, capacity(head.tag), fd), scan.corrupt, scan.failed)


def _whole_slots(place: SegmentPlace, size: int) -> int:
    return (size - place.format.header_bytes) // place.format.record_bytes


def _indexed(place: SegmentPlace, header: bytes, size: int) -> dict[int, bytes] | None:
    """Keys by slot, as the index has them; None without a whole one of the segment and this size."""
    disk = place.disk
    try:
        fd = disk.open(place.folder.index(place.number), writable=False)
        try:
            packed = bytearray(disk.size(fd))
            read = disk.read(fd, [packed], 0)
        finally:
            disk.close(fd)
    except OSError:  # there is none, or none that can be read: the records say the same
        return None
    return unpack_index(bytes(packed[:read]), header, size)


def _scanned(place: SegmentPlace, header: bytes, fd: int, slots: int) -> _Scan:
    """Reads every page. A record that is bad takes no other with it."""
    form = place.format
    head, page = bytearray(form.head_bytes), memoryview(bytearray(form.page_bytes))
    scan, bad = _Scan([]), 0
    for slot in range(slots):
        try:
            whole = place.disk.read(fd, [head, page], form.segment_bytes(slot)) == form.record_bytes
        except OSError:
            scan.failed += 1
            bad += 1
            continue
        if whole and head == form.record_head(header, key_of(head), page):
            scan.keys += [*[None] * bad, key_of(head)]
            bad = 0
        else:
            scan.corrupt += 1
            bad += 1
    assert len(scan.keys) + bad == slots, "a slot is whole, or bad, or behind the last whole one"
    return scan
