"""One segment: a file of records that is appended to until it is full, and read by slot. Single owner: SegmentStore.

A segment is *open* while it has a descriptor to append with, and *sealed* once its index is on disk. It may be neither: full,
but without an index, because that could not be written; whoever finds it so reads all of it (segment_recovery).
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Sequence
from dataclasses import dataclass

from services.worker.exec.tiers.disk import Disk
from services.worker.exec.tiers.segment_format import (
    SegmentFormat,
    SegmentHead,
    index_bytes,
    pack_index,
)
from services.worker.exec.tiers.store_folder import StoreFolder


@dataclass(frozen=True, slots=True)
class SegmentPlace:
    """Where a segment is and how it is written."""

    disk: Disk
    folder: StoreFolder
    format: SegmentFormat
    number: int


class SegmentFile:
    """keys: by slot, of the records; None where there is no whole one. index_bytes: of the index on disk, 0 without one.
    charge: bytes that it takes up, with the index that it may come to have."""

    def __init__(
        self,
        place: SegmentPlace,
        head: SegmentHead,
        keys: list[bytes | None],
        capacity: int,
        fd: int | None,
        index_bytes: int = 0,
    ) -> None:
        """capacity: slots up to which it is appended to. fd: taken over; None if nothing is to be appended."""
        self._place = place
        self._header = place.format.header(head)
        self.head = head
        self._capacity = capacity
        self._fd = fd
        self.keys = keys
        self.index_bytes = index_bytes
        self._own_from = self._kept_from = place.format.segment_bytes(len(keys))  # what was appended since, or by the last append

    @property
    def is_open(self) -> bool:
        return self._fd is not None

    @property
    def room(self) -> int:
        """Records that can be appended."""
        return max(0, self._capacity - len(self.keys)) if self.is_open else 0

    @property
    def bytes_on_disk(self) -> int:
        return self._place.format.segment_bytes(len(self.keys)) + self.index_bytes

    @property
    def charge(self) -> int:
        return self._place.format.bytes_with_index(len(self.keys))

    def append(self, records: Sequence[tuple[bytes, memoryview]]) -> int:
        """Appends (key, page)s as far as one call of the disk takes them; returns how many. Raises OSError if it takes none; the
        segment is as before, and what has been written behind it goes, or is overwritten, or cut off by whoever scans it."""
        assert self._fd is not None and 0 < len(records) <= self.room, "there is room for what is appended"
        form = self._place.format
        end, parts = form.segment_bytes(len(self.keys)), list[bytes | memoryview]()
        for key, page in records[: form.records_at_once]:
            assert page.nbytes == form.page_bytes, "every page has the same size"
            parts += (form.record_head(self._header, key, page), page)
        try:
            whole = self._place.disk.write(self._fd, parts, end) // form.record_bytes
            if whole == 0:
                raise OSError(errno.ENOSPC, "no room for a page")
        except OSError:
            with contextlib.suppress(OSError):  # see above; the error that counts is on its way
                self._place.disk.truncate(self._fd, end)
            raise
        self.keys += [key for key, _ in records[:whole]]
        self._drop_cached(self._kept_from)
        self._kept_from = end
        return whole

    def _drop_cached(self, first: int) -> None:
        """All from byte `first` on: what an append has just written is on its way then, what the one before has is forgotten.
        Else files would take the memory of all else that the machine reads, and of the worker's own limit where it has one."""
        assert self._fd is not None, "what is appended to is open"
        with contextlib.suppress(OSError):  # a file system that takes no advice keeps them
            self._place.disk.drop_cached(self._fd, first, self._place.format.segment_bytes(len(self.keys)) - first)

    def read(self, wanted: Sequence[tuple[bytes, int]], out: memoryview) -> tuple[int, OSError | None]:
        """Reads (key, slot)s into `out`, a page each. Returns how many of the first are whole and the key's, and the error that
        kept the next one from being read, if it was one."""
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
        """Nothing is appended any more; the index is put beside it. Raises OSError if it cannot be: all else holds."""
        assert self._fd is not None, "a segment is finished once"
        try:
            self._place.disk.sync(self._fd)
            self._drop_cached(self._own_from)  # some may have been on its way to the disk when it was given up
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
                    raise OSError(errno.ENOSPC, "no room for an index")
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
        """Nothing is appended any more. Idempotent."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._place.disk.close(fd)

    def remove(self) -> None:
        """Deletes it. Raises OSError if the file stays; it can then still be read, and is found without an index."""
        self.close()
        self._place.disk.unlink(self._place.folder.part(self._place.number))
        self._place.disk.unlink(self._place.folder.index(self._place.number))
        self.index_bytes = 0
        self._place.disk.unlink(self._place.folder.segment(self._place.number))


def create(place: SegmentPlace, head: SegmentHead, capacity: int) -> SegmentFile:
    """An empty one on disk, open. Raises OSError; a file that is there then has no header, and goes when it is found."""
    header, path = place.format.header(head), place.folder.segment(place.number)
    fd = place.disk.create(path, direct=place.format.is_direct)
    try:
        if place.disk.write(fd, [header], 0) != len(header):
            raise OSError(errno.ENOSPC, "no room for a header")
    except OSError:
        place.disk.close(fd)
        place.disk.unlink(path)
        raise
    return SegmentFile(place, head, [], capacity, fd)
