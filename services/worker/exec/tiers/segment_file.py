"""Writes and reads segments. A segment is a file of records: pages are appended until the segment is full, and read by slot.

A segment is *open* while it has a descriptor for appending, and *sealed* when its index is on disk. A full segment whose index
could not be written is neither. When the store is opened, the pages of a segment without an index are all read
(segment_recovery). SegmentStore owns the segments. A SegmentLog has the segments of one tag, the part of a page key that is
derived from the cache salt, so that the pages of one salt can be counted and deleted separately.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Sequence
from dataclasses import dataclass

from rootstock_llm.services.worker.exec.tiers.disk import Disk
from rootstock_llm.services.worker.exec.tiers.segment_format import (
    SegmentFormat,
    SegmentHead,
    index_bytes,
    pack_index,
)
from rootstock_llm.services.worker.exec.tiers.store_folder import StoreFolder


@dataclass(frozen=True, slots=True)
class SegmentPath:
    """The location and the format of a segment."""

    disk: Disk
    folder: StoreFolder
    format: SegmentFormat
    number: int  # number in the file's name


class SegmentFile:
    """A segment on disk."""

    def __init__(
        self,
        place: SegmentPath,
        head: SegmentHead,
        keys: list[bytes | None],
        capacity: int,
        fd: int | None,
        index_bytes: int = 0,
    ) -> None:
        """Represents an existing file.

        Args:
            place: location and format.
            head: fields of the header.
            keys: page key per slot, None if the slot has no whole record.
            capacity: largest number of slots.
            fd: descriptor for appending, which the segment owns; None for a segment that is not appended to.
            index_bytes: size of the index on disk; 0 without one.
        """
        self._place = place
        self._header = place.format.header(head)
        self.head = head
        self._capacity = capacity
        self._fd = fd
        self.keys = keys
        self.index_bytes = index_bytes
        # Offsets of the first byte that this process has appended, and of the first byte of the last append.
        self._appended_from = self._last_append_from = place.format.segment_bytes(len(keys))

    @property
    def is_open(self) -> bool:
        return self._fd is not None

    @property
    def free_slots(self) -> int:
        """Number of records that can be appended."""
        return max(0, self._capacity - len(self.keys)) if self.is_open else 0

    @property
    def bytes_on_disk(self) -> int:
        return self._place.format.segment_bytes(len(self.keys)) + self.index_bytes

    @property
    def charge(self) -> int:
        """Bytes that the segment counts against cap and quota: its own and those of its index, even before the index exists."""
        return self._place.format.bytes_with_index(len(self.keys))

    def append(self, records: Sequence[tuple[bytes, memoryview]]) -> int:
        """Appends (page key, page) records, as many as one call of the disk takes.

        Returns:
            Number of appended records.

        Raises:
            OSError: the disk took no whole record. The segment is unchanged. Bytes that were written after its end are truncated
                now, overwritten by a later append, or removed by recovery.
        """
        assert self._fd is not None and 0 < len(records) <= self.free_slots, "the segment has free slots for the records"
        form = self._place.format
        end, parts = form.segment_bytes(len(self.keys)), list[bytes | memoryview]()
        for key, page in records[: form.records_at_once]:
            assert page.nbytes == form.page_bytes, "every page has the same size"
            parts += (form.record_head(self._header, key, page), page)
        try:
            whole = self._place.disk.write(self._fd, parts, end) // form.record_bytes
            if whole == 0:
                raise OSError(errno.ENOSPC, "the disk has no space for a page")
        except OSError:
            with contextlib.suppress(OSError):  # the bytes stay until a later append or recovery; the first error is raised
                self._place.disk.truncate(self._fd, end)
            raise
        self.keys += [key for key, _ in records[:whole]]
        self._drop_cached(self._last_append_from)
        self._last_append_from = end
        return whole

    def _drop_cached(self, first: int) -> None:
        """Asks the system to drop the bytes from `first` on from the page cache.

        Only bytes that are on the disk are dropped. The bytes of the last append usually are not on the disk yet, so each append
        also drops the bytes of the append before it. Segments in the page cache would displace other files, and count against a
        memory limit of the worker.
        """
        assert self._fd is not None, "the segment is open"
        with contextlib.suppress(OSError):  # the file system does not support it
            self._place.disk.drop_cached(self._fd, first, self._place.format.segment_bytes(len(self.keys)) - first)

    def read(self, wanted: Sequence[tuple[bytes, int]], out: memoryview) -> tuple[int, OSError | None]:
        """Reads pages by (page key, slot) into `out`, one after another.

        Returns:
            The number of pages before the first page that is damaged, has another key or cannot be read. And the error if that
            page cannot be read, otherwise None.
        """
        disk, form = self._place.disk, self._place.format
        head = bytearray(form.head_bytes)
        whole = 0
        try:
            fd = disk.open(self._place.folder.segment(self._place.number), writable=False)
            try:
                for at, (key, slot) in enumerate(wanted):
                    page = out[at * form.page_bytes : (at + 1) * form.page_bytes]
                    size = disk.read(fd, [head, page], form.segment_bytes(slot))
                    if size != form.record_bytes or head != form.record_head(self._header, key, page):
                        break
                    whole += 1
            finally:
                disk.close(fd)
        except OSError as error:
            return whole, error
        return whole, None

    def finish(self) -> None:
        """Ends appending and writes the index. Raises OSError if the index cannot be written; pages can still be read."""
        assert self._fd is not None, "a segment is finished once"
        try:
            self._place.disk.sync(self._fd)
            self._drop_cached(self._appended_from)  # also bytes that were not on the disk at the earlier calls
            self._write_index()
        finally:
            self.close()

    def _write_index(self) -> None:
        disk, folder, number = self._place.disk, self._place.folder, self._place.number
        records = {slot: key for slot, key in enumerate(self.keys) if key is not None}
        packed = pack_index(self._header, self._place.format.segment_bytes(len(self.keys)), records)
        try:
            fd = disk.create(folder.part(number))
            try:
                if disk.write(fd, [packed], 0) != len(packed):
                    raise OSError(errno.ENOSPC, "the disk has no space for an index")
                disk.sync(fd)
            finally:
                disk.close(fd)
            disk.rename(folder.part(number), folder.index(number))
        except OSError:
            disk.unlink(folder.part(number))
            raise
        self.index_bytes = index_bytes(len(records))
        folder.sync()

    def close(self) -> None:
        """Ends appending without an index. Later calls have no effect."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._place.disk.close(fd)

    def remove(self) -> None:
        """Deletes the files.

        Raises:
            OSError: a file could not be deleted. The segment can still be read, and recovery may find it without an index.
        """
        self.close()
        self._place.disk.unlink(self._place.folder.part(self._place.number))
        self._place.disk.unlink(self._place.folder.index(self._place.number))
        self.index_bytes = 0
        self._place.disk.unlink(self._place.folder.segment(self._place.number))


def create(place: SegmentPath, head: SegmentHead, capacity: int) -> SegmentFile:
    """Creates an empty, open segment on disk.

    Raises:
        OSError: the header could not be written. If the file remains, recovery deletes it, because it has no valid header.
    """
    header, path = place.format.header(head), place.folder.segment(place.number)
    fd = place.disk.create(path, direct=place.format.is_direct)
    try:
        if place.disk.write(fd, [header], 0) != len(header):
            raise OSError(errno.ENOSPC, "the disk has no space for a header")
    except OSError:
        place.disk.close(fd)
        place.disk.unlink(path)
        raise
    return SegmentFile(place, head, [], capacity, fd)


class SegmentLog:
    """The segments of one tag."""

    def __init__(self, form: SegmentFormat, capacity: int) -> None:
        """Starts without segments.

        Args:
            form: format of the segments.
            capacity: slots of a new segment.
        """
        self._form = form
        self.capacity = capacity
        self.segments: list[SegmentFile] = []  # oldest first; only the last one may be open
        self.num_bytes = 0  # sum of SegmentFile.charge of the segments

    def add(self, segment: SegmentFile) -> None:
        self.segments.append(segment)
        self.num_bytes += segment.charge

    def drop(self, segment: SegmentFile) -> None:
        self.segments.remove(segment)
        self.num_bytes -= segment.charge

    def append(self, records: Sequence[tuple[bytes, memoryview]]) -> int:
        """Appends records to the last segment, which must be writable. Result and errors are those of SegmentFile.append()."""
        segment = self.segments[-1]
        before = segment.charge
        count = segment.append(records)
        self.num_bytes += segment.charge - before
        return count

    @property
    def writable(self) -> SegmentFile | None:
        """The last segment if it has a free slot, otherwise None."""
        return self.segments[-1] if self.segments and self.segments[-1].free_slots else None

    def next_append(self, records: int) -> tuple[int, int]:
        """Returns the number of records that the next append takes, and the bytes by which num_bytes then grows.

        Args:
            records: number of records to append.
        """
        segment, most = self.writable, min(records, self._form.records_at_once)
        if segment is None:
            count = min(most, self.capacity)
            return count, self._form.bytes_with_index(count)
        count = min(most, segment.free_slots)
        return count, self._form.bytes_with_index(len(segment.keys) + count) - segment.charge
