"""The file tier: pages of KV by key in segment files, which outlive the process. A PageStore; single owner, one thread.

Pages are appended to one segment at a time; the oldest segment goes, whole, when the next one has no room under the cap. Which
page is where is in memory alone: indexes and records are read when the store is opened. An error of the disk ends a write,
which is then paused for a while, and never a read of what is there.

The process may die at any call: what is found then is whole segments, one with a torn end, and perhaps one without an index.
Nothing but the end of a segment is synced; after a power cut checksums tell pages from what never reached the disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, takewhile
from pathlib import Path

from services.shared.observe.log import fields
from services.worker.exec.contracts.page_store import News, StoreCounts, Written
from services.worker.exec.tiers import segment_file
from services.worker.exec.tiers.disk import Disk
from services.worker.exec.tiers.segment_file import SegmentFile, SegmentPlace
from services.worker.exec.tiers.segment_format import MOST_IDENTITY_BYTES, SegmentFormat
from services.worker.exec.tiers.segment_recovery import recover
from services.worker.exec.tiers.store_folder import StoreFolder, StoreUnusable
from services.worker.exec.tiers.write_pause import WritePause

logger = logging.getLogger(__name__)
Place = tuple[SegmentFile, int]  # a segment and a slot
LEAST_SEGMENTS = 4  # under the cap, so that the loss of one leaves most pages
MOST_PAGE_BYTES = 1 << 30  # of the 2 GiB that Linux writes at a time


class SegmentStore:
    """Its files take up no more than max_bytes at any moment, by their sizes. A segment of another identity, page size or version
    is deleted when the store is opened, and its number logged."""

    shared = False

    def __init__(
        self,
        folder: Path,
        page_bytes: int,
        max_bytes: int,
        segment_bytes: int = 256 << 20,
        identity: bytes = b"",
        *,
        clock: Callable[[], float] = time.monotonic,
        disk: Disk | None = None,
    ) -> None:
        """segment_bytes: of a file, about; less where the cap asks for it, and room for one page at least. identity: at most 64
        bytes. clock: seconds, for pauses. Raises StoreBusy, StoreUnusable, and ValueError where the cap has no room for four
        segments of a page."""
        if not 0 < page_bytes <= MOST_PAGE_BYTES:
            raise ValueError(f"a page has between 1 and {MOST_PAGE_BYTES} bytes, not {page_bytes}")
        if len(identity) > MOST_IDENTITY_BYTES:
            raise ValueError(f"an identity has at most {MOST_IDENTITY_BYTES} bytes, not {len(identity)}")
        self.page_bytes = page_bytes
        self._format = SegmentFormat(page_bytes, identity)
        self._max_bytes = max_bytes
        self._capacity = _capacity(self._format, max_bytes, segment_bytes)
        self._disk = disk or Disk()
        self._pause = WritePause(clock)
        self._segments: list[SegmentFile] = []  # oldest first; the last one may be open
        self._leftovers: list[SegmentFile] = []  # that hold nothing, and an error kept from being deleted
        self._places: dict[bytes, Place] = {}  # by key, oldest first
        self._lost: dict[bytes, None] = {}
        self._corrupt_pages = self._failed_reads = self._failed_writes = 0
        self._next_number = 0
        self._folder = StoreFolder(folder, self._disk)
        try:
            self._open()
        except OSError as error:
            self.close()
            raise StoreUnusable(f"pages of KV cannot be kept in {folder}: {error}") from error

    def keys(self) -> Sequence[bytes]:
        return list(self._places)

    def read(self, keys: Sequence[bytes], out: memoryview) -> int:
        assert out.nbytes == len(keys) * self.page_bytes, "a page's room for every key"
        room = out.cast("B")
        whole = 0
        for segment, wanted in _runs(self._places, keys):
            count, error = segment.read(wanted, room[whole * self.page_bytes :])
            whole += count
            if count < len(wanted):
                self._lose(segment, keys[whole], error)
                break
        return whole

    def take_lost(self) -> tuple[bytes, ...]:
        lost = tuple(self._lost)
        self._lost.clear()
        return lost

    def write(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> Written:
        assert all(page.nbytes == self.page_bytes for page in pages), "every page has the same size"
        asked = zip(keys, pages, strict=True)
        fresh = {key: page.cast("B") for key, page in asked if key not in self._places}
        dropped: list[bytes] = []
        if fresh and self._pause.over:
            try:
                self._append(list(fresh.items()), dropped)
                self._pause.worked()
            except OSError as error:
                self._write_failed("pages were not written", error)
        stored = tuple(key for key in fresh if key in self._places)
        return Written(stored, tuple(key for key in dropped if key not in fresh))

    def news(self) -> News:
        return News((), ())

    def clear(self) -> None:
        segments, self._segments = self._segments, []
        self._places.clear()
        for segment in segments:
            self._discard(segment)

    def counts(self) -> StoreCounts:
        size = sum(segment.bytes_on_disk for segment in (*self._leftovers, *self._segments))
        return StoreCounts(self._corrupt_pages, self._failed_reads, self._failed_writes, size, len(self._places))

    def close(self) -> None:
        for segment in self._segments:
            segment.close()
        self._folder.close()

    def _open(self) -> None:
        foreign = 0
        numbers = self._folder.sweep()
        for number in numbers:
            self._next_number = number + 1
            try:
                found = recover(self._place(number), self._capacity)
            except OSError as error:  # of one file: the others may be whole
                self._failed_reads += 1
                logger.warning("a segment cannot be read", extra=fields(number=number, error=str(error)))
                continue
            self._corrupt_pages += found.corrupt
            self._failed_reads += found.failed
            if found.segment is None:
                foreign += 1
                self._disk.unlink(self._folder.index(number))
                self._disk.unlink(self._folder.segment(number))
            else:
                self._take(found.segment, is_last=number == numbers[-1])
        self._make_room(0, [])
        if foreign:
            text = "deleted segments that are broken, or of another identity, page size or version"
            logger.warning(text, extra=fields(segments=foreign))

    def _place(self, number: int) -> SegmentPlace:
        return SegmentPlace(self._disk, self._folder, self._format, number)

    def _take(self, segment: SegmentFile, is_last: bool) -> None:
        """A segment that was found, newer than those before it: of a key that is in several, the newest page counts."""
        self._segments.append(segment)
        for slot, key in enumerate(segment.keys):
            if key is not None:
                self._places.pop(key, None)
                self._places[key] = (segment, slot)
        if segment.is_open and not (is_last and segment.room):
            try:
                segment.finish()
            except OSError as error:
                self._write_failed("an index was not written", error)

    def _append(self, records: Sequence[tuple[bytes, memoryview]], dropped: list[bytes]) -> None:
        """dropped: grows by the keys that go. Raises OSError; what has been appended by then is held."""
        at = 0
        while at < len(records):
            segment = self._writable(dropped)
            slot = len(segment.keys)
            count = segment.append(records[at : at + segment.room])
            for key, _ in records[at : at + count]:
                self._places[key] = (segment, slot)
                self._lost.pop(key, None)
                slot += 1
            at += count
            if not segment.room:
                segment.finish()

    def _writable(self, dropped: list[bytes]) -> SegmentFile:
        """One with room for a page. Raises OSError."""
        if not self._segments or not self._segments[-1].room:
            self._make_room(self._format.bytes_with_index(self._capacity), dropped)
            self._segments.append(segment_file.create(self._place(self._next_number), self._capacity))
            self._next_number += 1
        return self._segments[-1]

    def _make_room(self, size: int, dropped: list[bytes]) -> None:
        """Deletes what is left over, and then the oldest segments until `size` bytes more are within the cap. dropped: grows by
        their keys. Raises OSError."""
        while self._leftovers:
            self._leftovers[-1].remove()
            self._leftovers.pop()
        taken = sum(segment.charge for segment in self._segments)
        while taken + size > self._max_bytes:
            assert self._segments, "the cap has room for a segment"
            oldest = self._segments[0]
            charge = oldest.charge
            oldest.remove()
            del self._segments[0]
            taken -= charge
            dropped += self._forget_all(oldest)

    def _lose(self, segment: SegmentFile, key: bytes, error: OSError | None) -> None:
        """A read has found no whole page. error: that kept it from being read, if it was one."""
        if error is None:
            self._corrupt_pages += 1
        else:
            self._failed_reads += 1
        if isinstance(error, FileNotFoundError):  # somebody has deleted the file
            self._segments.remove(segment)
            self._lost.update(dict.fromkeys(self._forget_all(segment)))
            self._discard(segment)
        else:
            _, slot = self._places.pop(key)
            segment.keys[slot] = None
            self._lost[key] = None

    def _forget_all(self, segment: SegmentFile) -> list[bytes]:
        """Returns the keys that it held."""
        held = [key for slot, key in enumerate(segment.keys) if key is not None and self._places.get(key) == (segment, slot)]
        for key in held:
            del self._places[key]
        return held

    def _discard(self, segment: SegmentFile) -> None:
        """Deletes one that holds nothing."""
        try:
            segment.remove()
        except OSError as error:
            self._leftovers.append(segment)
            self._write_failed("a segment was not deleted", error)

    def _write_failed(self, what: str, error: OSError) -> None:
        self._failed_writes += 1
        seconds = self._pause.failed()
        logger.warning(what, extra=fields(error=str(error), pause_seconds=seconds))


def _capacity(form: SegmentFormat, max_bytes: int, segment_bytes: int) -> int:
    """Slots of a segment. Raises ValueError where the cap has no room for enough segments."""
    most = form.slots_within(max_bytes // LEAST_SEGMENTS)
    if most == 0:
        least = LEAST_SEGMENTS * form.bytes_with_index(1)
        raise ValueError(f"{max_bytes} bytes are too few for pages of {form.page_bytes}: {least} is the least")
    return min(most, max(1, form.slots_within(segment_bytes)))


def _runs(places: dict[bytes, Place], keys: Iterable[bytes]) -> Iterator[tuple[SegmentFile, list[tuple[bytes, int]]]]:
    """(key, slot)s of the first keys that are held, those of neighbours in one segment together."""
    held = takewhile(lambda key: key in places, keys)
    for segment, run in groupby(held, key=lambda key: places[key][0]):
        yield segment, [(key, places[key][1]) for key in run]
