"""Recovers a segment after a start: by its index, or, if the index is missing or invalid, by its records."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from rootstock_llm.services.worker.exec.tiers.segment_file import SegmentFile, SegmentPlace
from rootstock_llm.services.worker.exec.tiers.segment_format import index_bytes, key_of, unpack_index


@dataclass(frozen=True, slots=True)
class Recovered:
    """The result of a recovery."""

    segment: SegmentFile | None  # the segment, None for another identity, page size or version, or without a valid header
    corrupt: int = 0  # slots whose bytes differ from the written ones
    failed: int = 0  # slots that could not be read because of an error


@dataclass(slots=True)
class _Scan:
    """The result of reading all records."""

    keys: list[bytes | None]  # page keys by slot, up to the last whole record, None for a damaged one
    corrupt: int = 0
    failed: int = 0


def recover(place: SegmentPlace, capacity: Callable[[bytes], int]) -> Recovered:
    """Recovers a segment.

    With a valid index, the segment is sealed, and its pages are checked when they are read. Otherwise, all pages are read and
    checked, the bytes after the last whole record are cut off, and the segment is open.

    Args:
        place: path and format.
        capacity: slots of a segment, by tag.

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
    """Returns page keys by slot from the index, None without a valid index for this segment and size."""
    disk = place.disk
    try:
        fd = disk.open(place.folder.index(place.number), writable=False)
        try:
            packed = bytearray(disk.size(fd))
            read = disk.read(fd, [packed], 0)
        finally:
            disk.close(fd)
    except OSError:  # the index is missing or unreadable; the records have the same information
        return None
    return unpack_index(bytes(packed[:read]), header, size)


def _scanned(place: SegmentPlace, header: bytes, fd: int, slots: int) -> _Scan:
    """Reads and checks all pages. A damaged record does not affect the others."""
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
    assert len(scan.keys) + bad == slots, "every slot is in the result, or damaged and after the last whole record"
    return scan
