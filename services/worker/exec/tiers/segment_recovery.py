"""Recovers a segment when its store is opened: from its index, or from its records if the index is missing or invalid."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from rootstock_llm.services.worker.exec.tiers.segment_file import SegmentFile, SegmentPath
from rootstock_llm.services.worker.exec.tiers.segment_format import index_bytes, key_of, unpack_index


@dataclass(frozen=True, slots=True)
class Recovered:
    """The result of a recovery."""

    segment: SegmentFile | None  # None if the header is invalid, or has another identity, page size or version
    corrupt: int = 0  # number of slots whose checksum is wrong
    failed: int = 0  # number of slots that could not be read because of an error


@dataclass(slots=True)
class _Scan:
    """The result of reading all records of a segment. See Recovered for the counts."""

    keys: list[bytes | None]  # page key per slot up to the last whole record, None for a damaged or unreadable record
    corrupt: int = 0
    failed: int = 0


def recover(place: SegmentPath, capacity: Callable[[bytes], int]) -> Recovered:
    """Recovers a segment.

    If there is a valid index, the segment is sealed, and its pages are checked only when they are read. Otherwise, all pages are
    read and checked, the bytes after the last whole record are cut off, and the segment stays open for appending.

    Args:
        place: path and format.
        capacity: returns the largest number of slots for segments of a tag. Called with the tag in the segment's header.

    Raises:
        OSError: the file cannot be opened or truncated.
    """
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
            assert place.format.segment_bytes(len(keys)) == size, "the file of an indexed segment has only whole records"
            return Recovered(SegmentFile(place, head, keys, 0, None, index_bytes(len(records))))
        disk.unlink(place.folder.index(place.number))
        scan = _scanned(place, header, fd, _whole_slots(place, size))
        disk.truncate(fd, place.format.segment_bytes(len(scan.keys)))
        if place.format.is_direct:
            disk.pass_cache(fd)
        stack.pop_all()
        return Recovered(SegmentFile(place, head, scan.keys, capacity(head.tag), fd), scan.corrupt, scan.failed)


def _whole_slots(place: SegmentPath, size: int) -> int:
    return (size - place.format.header_bytes) // place.format.record_bytes


def _indexed(place: SegmentPath, header: bytes, size: int) -> dict[int, bytes] | None:
    """Returns the page keys by slot from the index, or None if there is no valid index for a segment of this header and size."""
    disk = place.disk
    try:
        fd = disk.open(place.folder.index(place.number), writable=False)
        try:
            packed = bytearray(disk.size(fd))
            read = disk.read(fd, [packed], 0)
        finally:
            disk.close(fd)
    except OSError:  # the index is missing or unreadable; the keys are read from the records instead
        return None
    return unpack_index(bytes(packed[:read]), header, size)


def _scanned(place: SegmentPath, header: bytes, fd: int, slots: int) -> _Scan:
    """Reads and checks all records. Records after a damaged one are also found, because all records have the same size."""
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
    assert len(scan.keys) + bad == slots, "each slot is in the result, or is after the last whole record"
    return scan
