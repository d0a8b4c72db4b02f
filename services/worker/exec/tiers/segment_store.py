"""The file tier: pages of KV by key in segment files, which outlive the process. A PageStore; single owner, one thread.

Pages are appended to one segment at a time for each tag, and a segment is of one tag alone: so the pages of one salt are
counted, and deleted, by file. The oldest segment goes, whole, when the next pages have no room under the cap; the oldest of the
tag's own where that has no room under its quota. Which page is where is in memory alone: indexes and records are read when the
store is opened, and quotas are reckoned anew. An error of the disk ends a write, which is then paused for a while, and never a
read of what is there.

The process may die at any call: what is found then is whole segments, some with a torn end, and perhaps some without an index.
Nothing but the end of a segment is synced; after a power cut checksums tell pages from what never reached the disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, takewhile
from pathlib import Path

from services.shared.observe.log_fields import fields
from services.worker.core.contracts.transfers import ALL, Deleted, Selection, StorageUse
from services.worker.core.tiers.page_keys import UNSALTED, tag_of
from services.worker.exec.contracts.page_store import News, StoreCounts, Written
from services.worker.exec.tiers import segment_file
from services.worker.exec.tiers.disk import Disk
from services.worker.exec.tiers.segment_file import SegmentFile, SegmentPlace
from services.worker.exec.tiers.segment_format import MOST_IDENTITY_BYTES, SegmentFormat, SegmentHead
from services.worker.exec.tiers.segment_log import SegmentLog
from services.worker.exec.tiers.segment_recovery import recover
from services.worker.exec.tiers.store_folder import StoreFolder, StoreUnusable
from services.worker.exec.tiers.write_pause import WritePause

logger = logging.getLogger(__name__)
Place = tuple[SegmentFile, int]  # a segment and a slot
LEAST_SEGMENTS = 4  # under the cap, and under a quota that has room for them, so that the loss of one leaves most pages
SALTED_BYTES = 32 << 20  # of a segment with a salt: there may be many of them that have no index yet
MOST_OPEN = 64  # segments without an index, which have to be read whole when the store is opened
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
        salt_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        disk: Disk | None = None,
    ) -> None:
        """segment_bytes: of a file, about; less where the cap asks for it, and room for one page at least. identity: at most 64
        bytes. salt_bytes: the quota, 0 for none. clock: seconds, for pauses. wall: seconds since 1970, for ages. Raises
        StoreBusy, StoreUnusable, and ValueError where the cap has no room for four segments of a page, or a quota for one."""
        if not 0 < page_bytes <= MOST_PAGE_BYTES:
            raise ValueError(f"a page has between 1 and {MOST_PAGE_BYTES} bytes, not {page_bytes}")
        if len(identity) > MOST_IDENTITY_BYTES:
            raise ValueError(f"an identity has at most {MOST_IDENTITY_BYTES} bytes, not {len(identity)}")
        self.page_bytes = page_bytes
        self._format = SegmentFormat(page_bytes, identity)
        self._max_bytes, self._salt_bytes = max_bytes, salt_bytes
        self._capacity = _capacity(self._format, max_bytes, segment_bytes)
        self._salted_capacity = _salted_capacity(self._format, self._capacity, salt_bytes)
        self._disk = disk or Disk()
        self._pause, self._wall = WritePause(clock), wall
        self._segments: list[SegmentFile] = []  # oldest first
        self._logs: dict[bytes, SegmentLog] = {}  # the same, by tag; none is empty
        self._open: dict[SegmentFile, None] = {}  # that have room, the one that was appended to last behind
        self._leftovers: list[SegmentFile] = []  # that hold nothing, and an error kept from being deleted
        self._unread: list[int] = []  # numbers of files that an error kept from being read
        self._deletes_unread = False  # a deletion meant them, and an error kept them from it
        self._places: dict[bytes, Place] = {}  # by key, oldest first
        self._lost: dict[bytes, None] = {}
        self._corrupt_pages = self._failed_reads = self._failed_writes = 0
        self._over_quota_pages = self._deleted_pages = 0
        self._num_charged = 0  # bytes that all segments may come to have
        self._num_on_disk = 0  # bytes of all files, leftovers among them
        self._next_number = 0
        self._folder = StoreFolder(folder, self._disk)
        try:
            self._recover()
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
                for tag, records in _by_tag(fresh.items()):
                    self._append(tag, records, dropped)
                self._pause.worked()
            except OSError as error:
                self._write_failed("pages were not written", error)
        stored = tuple(key for key in fresh if key in self._places)
        held = sum(key in self._places for key in keys if key not in fresh)
        return Written(stored, tuple(key for key in dropped if key not in fresh), held)

    def news(self) -> News:
        return News((), ())

    def delete(self, which: Selection = ALL) -> Deleted:
        before = None if which.older_than_s is None else int((self._wall() - which.older_than_s) * 1000)
        meant = [each for each in self._segments if _is_meant(each.head, which.tag, before)]
        dropped = [key for segment in meant for key in self._drop(segment)]
        self._deleted_pages += len(dropped)
        self._leftovers += meant
        self._deletes_unread = True
        try:
            self._clear()
            self._folder.sync()
        except OSError as error:
            self._write_failed("segments were not deleted", error)
            return Deleted(len(dropped), tuple(dropped), f"files could not be deleted: {error}")
        return Deleted(len(dropped), tuple(dropped))

    def use(self) -> StorageUse:
        salts = len(self._logs) - (UNSALTED in self._logs)
        return StorageUse(self._num_on_disk, salts, self._over_quota_pages, self._deleted_pages)

    def counts(self) -> StoreCounts:
        pages = len(self._places)
        return StoreCounts(self._corrupt_pages, self._failed_reads, self._failed_writes, self._num_on_disk, pages)

    def close(self) -> None:
        for segment in self._segments:
            segment.close()
        self._folder.close()

    def _recover(self) -> None:
        foreign = 0
        for number in self._folder.sweep():
            self._next_number = number + 1
            place = SegmentPlace(self._disk, self._folder, self._format, number)
            try:
                found = recover(place, self._capacity_of)
            except OSError as error:  # of one file: the others may be whole
                self._failed_reads += 1
                self._unread.append(number)
                logger.warning("a segment cannot be read", extra=fields(number=number, error=str(error)))
                continue
            self._corrupt_pages += found.corrupt
            self._failed_reads += found.failed
            if found.segment is None:
                foreign += 1
                self._unlink(number)
            else:
                self._take(found.segment)
        for tag in list(self._logs):
            while self._makes_room(tag, 0, []):
                pass
        if foreign:
            text = "deleted segments that are broken, or of another identity, page size or version"
            logger.warning(text, extra=fields(segments=foreign))

    def _take(self, segment: SegmentFile) -> None:
        """A segment that was found, newer than those before it: of a key that is in several, the newest page counts."""
        before = self._log(segment.head.tag).writable
        self._add(segment)
        for slot, key in enumerate(segment.keys):
            if key is not None:
                self._places.pop(key, None)
                self._places[key] = (segment, slot)
        if before is not None:
            self._finish_found(before)
        if segment.is_open and not segment.room:
            self._finish_found(segment)
        elif len(self._open) > MOST_OPEN:
            self._finish_found(next(iter(self._open)))

    def _append(self, tag: bytes, records: Sequence[tuple[bytes, memoryview]], dropped: list[bytes]) -> None:
        """dropped: grows by the keys that go. Raises OSError; what has been appended by then is held."""
        at = 0
        while at < len(records):
            segment = self._writable(tag, len(records) - at, dropped)
            slot = len(segment.keys)
            with self._measured(segment):
                count = self._logs[tag].append(records[at : at + segment.room])
            self._open.pop(segment)
            self._open[segment] = None
            for key, _ in records[at : at + count]:
                self._places[key] = (segment, slot)
                self._lost.pop(key, None)
                slot += 1
            at += count
            if not segment.room:
                self._finish(segment)

    def _writable(self, tag: bytes, records: int, dropped: list[bytes]) -> SegmentFile:
        """One of the tag's with room for a page, and for as many of so many records as one append takes. Raises OSError."""
        while self._makes_room(tag, self._log(tag).next_append(records)[1], dropped):
            pass
        segment = self._log(tag).writable
        if segment is None:
            if len(self._open) >= MOST_OPEN:
                self._finish(next(iter(self._open)))
            place = SegmentPlace(self._disk, self._folder, self._format, self._next_number)
            head = SegmentHead(self._next_number, tag, max(int(self._wall() * 1000), 0))
            segment = segment_file.create(place, head, self._capacity_of(tag))
            self._next_number += 1
            self._add(segment)
        return segment

    def _makes_room(self, tag: bytes, size: int, dropped: list[bytes]) -> bool:
        """Deletes what is left over, and the oldest segment, if `size` bytes more of that tag are beyond its quota or the cap:
        whether one was, and it is to be asked again. dropped: grows by its keys. Raises OSError."""
        self._clear()
        log = self._logs.get(tag)
        over = log is not None and tag != UNSALTED and 0 < self._salt_bytes < log.num_bytes + size
        if over and log is not None:
            oldest = log.segments[0]
        elif self._num_charged + size > self._max_bytes:
            assert self._segments, "the cap has room for a segment"
            oldest = self._segments[0]
        else:
            return False
        self._open.pop(oldest, None)
        self._remove(oldest)
        gone = self._drop(oldest)
        self._over_quota_pages += len(gone) if over else 0
        dropped += gone
        return True

    def _capacity_of(self, tag: bytes) -> int:
        return self._capacity if tag == UNSALTED else self._salted_capacity

    def _log(self, tag: bytes) -> SegmentLog:
        """Of a tag that has none, an empty one, which nobody keeps."""
        return self._logs.get(tag) or SegmentLog(self._format, self._capacity_of(tag))

    def _add(self, segment: SegmentFile) -> None:
        tag = segment.head.tag
        self._segments.append(segment)
        self._logs.setdefault(tag, self._log(tag)).add(segment)
        self._num_charged += segment.charge
        self._num_on_disk += segment.bytes_on_disk
        if segment.room:
            self._open[segment] = None

    def _drop(self, segment: SegmentFile) -> list[bytes]:
        """It is none of the store's any more. Returns the keys that it held."""
        tag = segment.head.tag
        self._segments.remove(segment)
        self._logs[tag].drop(segment)
        self._num_charged -= segment.charge
        if not self._logs[tag].segments:
            del self._logs[tag]
        self._open.pop(segment, None)
        held = [key for slot, key in enumerate(segment.keys) if key is not None and self._places.get(key) == (segment, slot)]
        for key in held:
            del self._places[key]
        return held

    def _finish(self, segment: SegmentFile) -> None:
        """Raises OSError; nothing is appended to it any more all the same."""
        self._open.pop(segment, None)
        with self._measured(segment):
            segment.finish()

    def _finish_found(self, segment: SegmentFile) -> None:
        try:
            self._finish(segment)
        except OSError as error:
            self._write_failed("an index was not written", error)

    def _lose(self, segment: SegmentFile, key: bytes, error: OSError | None) -> None:
        """A read has found no whole page. error: that kept it from being read, if it was one."""
        if error is None:
            self._corrupt_pages += 1
        else:
            self._failed_reads += 1
        if isinstance(error, FileNotFoundError):  # somebody has deleted the file
            self._lost.update(dict.fromkeys(self._drop(segment)))
            self._leftovers.append(segment)
            try:
                self._clear()
            except OSError as failure:
                self._write_failed("a segment was not deleted", failure)
        else:
            _, slot = self._places.pop(key)
            segment.keys[slot] = None
            self._lost[key] = None

    def _clear(self) -> None:
        """Files that hold nothing, and if a deletion meant them those of which nobody knows what they hold. Raises OSError for
        the first that stays, when all have been tried."""
        failed: OSError | None = None
        for segment in list(self._leftovers):
            try:
                self._remove(segment)
                self._leftovers.remove(segment)
            except OSError as error:
                failed = failed or error
        for number in list(self._unread) if self._deletes_unread else ():
            try:
                self._unlink(number)
                self._unread.remove(number)
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        self._deletes_unread = False

    def _remove(self, segment: SegmentFile) -> None:
        """Its file. Raises OSError if that stays."""
        with self._measured(segment):
            segment.remove()
        self._num_on_disk -= segment.bytes_on_disk

    @contextmanager
    def _measured(self, segment: SegmentFile) -> Iterator[None]:
        """Its size changes, whatever is raised."""
        charge, size = segment.charge, segment.bytes_on_disk
        try:
            yield
        finally:
            self._num_charged += segment.charge - charge
            self._num_on_disk += segment.bytes_on_disk - size

    def _unlink(self, number: int) -> None:
        self._disk.unlink(self._folder.index(number))
        self._disk.unlink(self._folder.segment(number))

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


def _salted_capacity(form: SegmentFormat, capacity: int, salt_bytes: int) -> int:
    """The same of a segment with a salt. Raises ValueError where a quota has no room for a page."""
    if 0 < salt_bytes < form.bytes_with_index(1):
        raise ValueError(f"a quota of {salt_bytes} bytes has no room for a page: {form.bytes_with_index(1)} is the least")
    size = min(SALTED_BYTES, salt_bytes // LEAST_SEGMENTS) if salt_bytes else SALTED_BYTES
    return min(capacity, max(1, form.slots_within(size)))


def _is_meant(head: SegmentHead, tag: bytes | None, before_ms: int | None) -> bool:
    """A segment's first page is its oldest: with it the younger ones go."""
    return tag in (None, head.tag) and (before_ms is None or head.began_ms <= before_ms)


def _by_tag(records: Iterable[tuple[bytes, memoryview]]) -> Iterator[tuple[bytes, list[tuple[bytes, memoryview]]]]:
    """Those of neighbours together, in their order."""
    for tag, run in groupby(records, key=lambda record: tag_of(record[0])):
        yield tag, list(run)


def _runs(places: dict[bytes, Place], keys: Iterable[bytes]) -> Iterator[tuple[SegmentFile, list[tuple[bytes, int]]]]:
    """(key, slot)s of the first keys that are held, those of neighbours in one segment together."""
    held = takewhile(lambda key: key in places, keys)
    for segment, run in groupby(held, key=lambda key: places[key][0]):
        yield segment, [(key, places[key][1]) for key in run]
