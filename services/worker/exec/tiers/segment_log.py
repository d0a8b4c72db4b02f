"""The segments that hold one tag's pages, so that these are counted, and go, without any other's. Single owner: SegmentStore."""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.exec.tiers.segment_file import SegmentFile
from services.worker.exec.tiers.segment_format import SegmentFormat


class SegmentLog:
    """segments: oldest first; the last one may be open. capacity: slots of one that is made. num_bytes: their charges."""

    def __init__(self, form: SegmentFormat, capacity: int) -> None:
        self._form = form
        self.capacity = capacity
        self.segments: list[SegmentFile] = []
        self.num_bytes = 0

    def add(self, segment: SegmentFile) -> None:
        self.segments.append(segment)
        self.num_bytes += segment.charge

    def drop(self, segment: SegmentFile) -> None:
        self.segments.remove(segment)
        self.num_bytes -= segment.charge

    def append(self, records: Sequence[tuple[bytes, memoryview]]) -> int:
        """To the one that is writable, as it does."""
        segment = self.segments[-1]
        before = segment.charge
        count = segment.append(records)
        self.num_bytes += segment.charge - before
        return count

    @property
    def writable(self) -> SegmentFile | None:
        """That has room for a page."""
        return self.segments[-1] if self.segments and self.segments[-1].room else None

    def next_append(self, records: int) -> tuple[int, int]:
        """Of so many records: how many one append takes, and the bytes by which the log grows with them."""
        segment, most = self.writable, min(records, self._form.records_at_once)
        if segment is None:
            count = min(most, self.capacity)
            return count, self._form.bytes_with_index(count)
        count = min(most, segment.room)
        return count, self._form.bytes_with_index(len(segment.keys) + count) - segment.charge
