"""The segments of one tag, so that its pages can be counted and deleted separately. The single owner is SegmentStore."""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.exec.tiers.segment_file import SegmentFile
from services.worker.exec.tiers.segment_format import SegmentFormat


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
        self.num_bytes = 0  # sum of the segments' charges

    def add(self, segment: SegmentFile) -> None:
        self.segments.append(segment)
        self.num_bytes += segment.charge

    def drop(self, segment: SegmentFile) -> None:
        self.segments.remove(segment)
        self.num_bytes -= segment.charge

    def append(self, records: Sequence[tuple[bytes, memoryview]]) -> int:
        """Appends records to the writable segment, with the result and errors of SegmentFile.append()."""
        segment = self.segments[-1]
        before = segment.charge
        count = segment.append(records)
        self.num_bytes += segment.charge - before
        return count

    @property
    def writable(self) -> SegmentFile | None:
        """The last segment if it has a free slot, otherwise None."""
        return self.segments[-1] if self.segments and self.segments[-1].room else None

    def next_append(self, records: int) -> tuple[int, int]:
        """Returns the number of records that one append takes, and the bytes by which the log grows.

        Args:
            records: number of records to append.
        """
        segment, most = self.writable, min(records, self._form.records_at_once)
        if segment is None:
            count = min(most, self.capacity)
            return count, self._form.bytes_with_index(count)
        count = min(most, segment.room)
        return count, self._form.bytes_with_index(len(segment.keys) + count) - segment.charge
