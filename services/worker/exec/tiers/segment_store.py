"""The file tier: a PageStore with KV pages in segment files, which outlive the process. It has one owner and runs on one thread.

A tag is the part of a page key that is derived from the cache salt. Each segment has pages of one tag only, and pages are
appended to one segment per tag at a time. So the pages of one cache salt can be counted and deleted by file. If new pages would
exceed the cap (max_bytes), the oldest segment is deleted as a whole. If they would exceed the quota of their cache salt, the
oldest segment of their tag is deleted. The segment and slot of each page are in memory only. When the store is opened, they are
read from indexes and records, and quotas are applied again. A disk error ends a write and pauses later writes, but stored pages
can still be read.

The process may die at any call. When the store is opened again, segments may have a torn end or no index. Only full segments are
synced to the disk. After a power cut, checksums detect pages that did not reach the disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, takewhile
from pathlib import Path

from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.worker.core.contracts.transfers import ALL, Deleted, Selection, StorageUse
from rootstock_llm.services.worker.core.tiers.page_keys import UNSALTED, tag_of
from rootstock_llm.services.worker.exec.contracts.page_store import News, StoreCounts, Written
from rootstock_llm.services.worker.exec.tiers import segment_file
from rootstock_llm.services.worker.exec.tiers.disk import Disk
from rootstock_llm.services.worker.exec.tiers.segment_file import SegmentFile, SegmentLog, SegmentPath
from rootstock_llm.services.worker.exec.tiers.segment_format import MOST_IDENTITY_BYTES, SegmentFormat, SegmentHead
from rootstock_llm.services.worker.exec.tiers.segment_recovery import recover
from rootstock_llm.services.worker.exec.tiers.store_folder import StoreFolder, StoreUnusable
from rootstock_llm.services.worker.exec.tiers.write_pause import WritePause

logger = logging.getLogger(__name__)
Location = tuple[SegmentFile, int]  # segment and slot of a page
# The cap holds at least this number of segments. The quota of a cache salt holds this number, too, unless the quota is smaller
# than this number of segments with one page each. The deletion of one segment then loses at most about a quarter of the pages.
LEAST_SEGMENTS = 4
SALTED_BYTES = 32 << 20  # largest size of a segment with a salt; small, because each salt may have an open segment
MOST_OPEN = 64  # largest number of open segments; they have no index, so opening the store reads them as a whole
MOST_PAGE_BYTES = 1 << 30  # largest page, because Linux writes at most 2 GiB per call


class SegmentStore:
    """A PageStore in a folder. Its files together never exceed max_bytes, apart from segments that could not be read at opening.

    Opening the store deletes segments of another identity, page size or version, and logs their number.
    """

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
        """Locks the folder and recovers the segments.

        Args:
            folder: folder of the store.
            page_bytes: bytes of a page.
            max_bytes: the cap, which is the largest total size of the files.
            segment_bytes: approximate size of a segment; smaller if the cap requires it, and larger if a page is larger.
            identity: identity of the store, at most 64 bytes.
            salt_bytes: quota of a cache salt in bytes; 0 for no quota.
            clock: returns rising seconds, for pauses.
            wall: returns seconds since 1970, for ages of pages.
            disk: the file system, None for the machine's.

        Raises:
            StoreBusy: another store has the folder.
            StoreUnusable: the folder cannot be used.
            ValueError: the cap is too small for LEAST_SEGMENTS segments of one page, the quota is too small for a page, or page
                size or identity are invalid.
        """
        if not 0 < page_bytes <= MOST_PAGE_BYTES:
            raise ValueError(f"a page has {page_bytes} bytes; it must have 1 to {MOST_PAGE_BYTES} bytes")
        if len(identity) > MOST_IDENTITY_BYTES:
            raise ValueError(f"the identity has {len(identity)} bytes; it must have at most {MOST_IDENTITY_BYTES} bytes")
        self.page_bytes = page_bytes
        self._format = SegmentFormat(page_bytes, identity)
        self._max_bytes, self._salt_bytes = max_bytes, salt_bytes
        self._capacity = _capacity(self._format, max_bytes, segment_bytes)
        self._salted_capacity = _salted_capacity(self._format, self._capacity, salt_bytes)
        self._disk = disk or Disk()
        self._pause, self._wall = WritePause(clock), wall
        self._segments: list[SegmentFile] = []  # oldest first
        self._logs: dict[bytes, SegmentLog] = {}  # the same segments by tag; no log is empty
        self._open: dict[SegmentFile, None] = {}  # segments with free slots, the last used one at the end
        self._leftovers: list[SegmentFile] = []  # segments that are deleted from the tables, but whose files are not deleted yet
        self._unread: list[int] = []  # numbers of segments that could not be read when the store was opened
        self._deletes_unread = False  # whether unread segments must also be deleted, because delete() was called
        self._locations: dict[bytes, Location] = {}  # by page key, oldest first
        self._lost: dict[bytes, None] = {}  # page keys for the next take_lost()
        self._corrupt_pages = self._failed_reads = self._failed_writes = 0
        self._over_quota_pages = self._deleted_pages = 0
        self._num_charged = 0  # sum of SegmentFile.charge of all segments
        self._num_on_disk = 0  # bytes of all files, those of leftovers included
        self._next_number = 0
        self._folder = StoreFolder(folder, self._disk)
        try:
            self._recover()
        except OSError as error:
            self.close()
            raise StoreUnusable(f"KV pages cannot be stored in {folder}: {error}") from error

    def keys(self) -> Sequence[bytes]:
        return list(self._locations)

    def read(self, keys: Sequence[bytes], out: memoryview) -> int:
        assert out.nbytes == len(keys) * self.page_bytes, "`out` has the size of all pages"
        target = out.cast("B")
        whole = 0
        for segment, wanted in _runs(self._locations, keys):
            count, error = segment.read(wanted, target[whole * self.page_bytes :])
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
        pairs = zip(keys, pages, strict=True)
        fresh = {key: page.cast("B") for key, page in pairs if key not in self._locations}
        dropped: list[bytes] = []
        if fresh and self._pause.over:
            try:
                for tag, records in _by_tag(fresh.items()):
                    self._append(tag, records, dropped)
                self._pause.worked()
            except OSError as error:
                self._write_failed("could not write pages", error)
        stored = tuple(key for key in fresh if key in self._locations)
        already_stored = sum(key in self._locations for key in keys if key not in fresh)
        return Written(stored, tuple(key for key in dropped if key not in fresh), already_stored)

    def news(self) -> News:
        return News((), ())

    def delete(self, which: Selection = ALL) -> Deleted:
        before = None if which.older_than_s is None else int((self._wall() - which.older_than_s) * 1000)
        selected = [each for each in self._segments if _is_selected(each.head, which.tag, before)]
        dropped = [key for segment in selected for key in self._drop(segment)]
        self._deleted_pages += len(dropped)
        self._leftovers += selected
        self._deletes_unread = True
        try:
            self._delete_leftovers()
            self._folder.sync()
        except OSError as error:
            self._write_failed("could not delete segments", error)
            return Deleted(len(dropped), tuple(dropped), f"files could not be deleted: {error}")
        return Deleted(len(dropped), tuple(dropped))

    def use(self) -> StorageUse:
        salts = len(self._logs) - (UNSALTED in self._logs)
        return StorageUse(self._num_on_disk, salts, self._over_quota_pages, self._deleted_pages)

    def counts(self) -> StoreCounts:
        pages = len(self._locations)
        return StoreCounts(self._corrupt_pages, self._failed_reads, self._failed_writes, self._num_on_disk, pages)

    def close(self) -> None:
        for segment in self._segments:
            segment.close()
        self._folder.close()

    def _recover(self) -> None:
        foreign = 0
        for number in self._folder.sweep():
            self._next_number = number + 1
            place = SegmentPath(self._disk, self._folder, self._format, number)
            try:
                found = recover(place, self._capacity_of)
            except OSError as error:  # one file cannot be read; the others are still recovered
                self._failed_reads += 1
                self._unread.append(number)
                logger.warning("could not read a segment", extra=fields(number=number, error=str(error)))
                continue
            self._corrupt_pages += found.corrupt
            self._failed_reads += found.failed
            if found.segment is None:
                foreign += 1
                self._unlink(number)
            else:
                self._add_recovered(found.segment)
        for tag in list(self._logs):
            while self._evict_one(tag, 0, []):
                pass
        if foreign:
            text = "deleted segments that have no valid header, or another identity, page size or version"
            logger.warning(text, extra=fields(segments=foreign))

    def _add_recovered(self, segment: SegmentFile) -> None:
        """Adds a recovered segment. Segments are added from the oldest to the newest, so the newest page of a key counts."""
        before = self._log(segment.head.tag).writable
        self._add(segment)
        for slot, key in enumerate(segment.keys):
            if key is not None:
                self._locations.pop(key, None)
                self._locations[key] = (segment, slot)
        if before is not None:
            self._finish_recovered(before)
        if segment.is_open and not segment.free_slots:
            self._finish_recovered(segment)
        elif len(self._open) > MOST_OPEN:
            self._finish_recovered(next(iter(self._open)))

    def _append(self, tag: bytes, records: Sequence[tuple[bytes, memoryview]], dropped: list[bytes]) -> None:
        """Appends records of one tag.

        Args:
            tag: tag of all records.
            records: (page key, page) pairs.
            dropped: the keys of evicted pages are appended to it.

        Raises:
            OSError: the disk has failed. Records that were appended before stay stored.
        """
        at = 0
        while at < len(records):
            segment = self._writable(tag, len(records) - at, dropped)
            slot = len(segment.keys)
            with self._measured(segment):
                count = self._logs[tag].append(records[at : at + segment.free_slots])
            self._open.pop(segment)
            self._open[segment] = None
            for key, _ in records[at : at + count]:
                self._locations[key] = (segment, slot)
                self._lost.pop(key, None)
                slot += 1
            at += count
            if not segment.free_slots:
                self._finish(segment)

    def _writable(self, tag: bytes, records: int, dropped: list[bytes]) -> SegmentFile:
        """Returns a segment of the tag with a free slot. First evicts segments to make space for the next append.

        Raises:
            OSError: the disk has failed.
        """
        while self._evict_one(tag, self._log(tag).next_append(records)[1], dropped):
            pass
        segment = self._log(tag).writable
        if segment is None:
            if len(self._open) >= MOST_OPEN:
                self._finish(next(iter(self._open)))
            place = SegmentPath(self._disk, self._folder, self._format, self._next_number)
            head = SegmentHead(self._next_number, tag, max(int(self._wall() * 1000), 0))
            segment = segment_file.create(place, head, self._capacity_of(tag))
            self._next_number += 1
            self._add(segment)
        return segment

    def _evict_one(self, tag: bytes, size: int, dropped: list[bytes]) -> bool:
        """Deletes one segment if `size` more bytes of the tag would exceed its quota or the cap. First deletes leftovers.

        Args:
            tag: tag of the new pages.
            size: bytes to be added.
            dropped: the keys of evicted pages are appended to it.

        Returns:
            Whether a segment was deleted. The caller then calls again, because more segments may have to be deleted.

        Raises:
            OSError: a file could not be deleted.
        """
        self._delete_leftovers()
        log = self._logs.get(tag)
        over = log is not None and tag != UNSALTED and 0 < self._salt_bytes < log.num_bytes + size
        if over and log is not None:
            oldest = log.segments[0]
        elif self._num_charged + size > self._max_bytes:
            assert self._segments, "the cap holds at least one segment"
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
        """Returns the log of a tag, or a new log that is not registered yet."""
        return self._logs.get(tag) or SegmentLog(self._format, self._capacity_of(tag))

    def _add(self, segment: SegmentFile) -> None:
        tag = segment.head.tag
        self._segments.append(segment)
        self._logs.setdefault(tag, self._log(tag)).add(segment)
        self._num_charged += segment.charge
        self._num_on_disk += segment.bytes_on_disk
        if segment.free_slots:
            self._open[segment] = None

    def _drop(self, segment: SegmentFile) -> list[bytes]:
        """Removes a segment from the store's tables. Returns the keys of its pages."""
        tag = segment.head.tag
        self._segments.remove(segment)
        self._logs[tag].drop(segment)
        self._num_charged -= segment.charge
        if not self._logs[tag].segments:
            del self._logs[tag]
        self._open.pop(segment, None)
        keys = [key for slot, key in enumerate(segment.keys) if key is not None and self._locations.get(key) == (segment, slot)]
        for key in keys:
            del self._locations[key]
        return keys

    def _finish(self, segment: SegmentFile) -> None:
        """Ends appending to a segment and writes its index. If it raises OSError, appending has ended nevertheless."""
        self._open.pop(segment, None)
        with self._measured(segment):
            segment.finish()

    def _finish_recovered(self, segment: SegmentFile) -> None:
        try:
            self._finish(segment)
        except OSError as error:
            self._write_failed("could not write an index", error)

    def _lose(self, segment: SegmentFile, key: bytes, error: OSError | None) -> None:
        """Removes a page that could not be read, or all pages of a segment whose file is missing, and records them as lost.

        Args:
            segment: segment of the page.
            key: page key.
            error: error of the read, or None for a damaged page.
        """
        if error is None:
            self._corrupt_pages += 1
        else:
            self._failed_reads += 1
        if isinstance(error, FileNotFoundError):  # another program has deleted the file
            self._lost.update(dict.fromkeys(self._drop(segment)))
            self._leftovers.append(segment)
            try:
                self._delete_leftovers()
            except OSError as failure:
                self._write_failed("could not delete a segment", failure)
        else:
            _, slot = self._locations.pop(key)
            segment.keys[slot] = None
            self._lost[key] = None

    def _delete_leftovers(self) -> None:
        """Deletes the files of leftovers, and the unread segments if a delete() requires it.

        Raises:
            OSError: a file could not be deleted. The deletion of all others was tried.
        """
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
        """Deletes the files of a segment. Raises OSError if a file could not be deleted."""
        with self._measured(segment):
            segment.remove()
        self._num_on_disk -= segment.bytes_on_disk

    @contextmanager
    def _measured(self, segment: SegmentFile) -> Iterator[None]:
        """Adds the change of the segment's size during the block to the sums, even if the block raises."""
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
    """Returns the number of slots of a segment. Raises ValueError if LEAST_SEGMENTS segments of one page exceed the cap."""
    most = form.slots_within(max_bytes // LEAST_SEGMENTS)
    if most == 0:
        least = LEAST_SEGMENTS * form.bytes_with_index(1)
        raise ValueError(f"the cap of the file tier is {max_bytes} bytes; pages of {form.page_bytes} bytes need at least {least}")
    return min(most, max(1, form.slots_within(segment_bytes)))


def _salted_capacity(form: SegmentFormat, capacity: int, salt_bytes: int) -> int:
    """Returns the number of slots of a segment with a salt. Raises ValueError if a page exceeds the quota."""
    if 0 < salt_bytes < form.bytes_with_index(1):
        raise ValueError(f"the quota of a salt is {salt_bytes} bytes; a page needs at least {form.bytes_with_index(1)}")
    size = min(SALTED_BYTES, salt_bytes // LEAST_SEGMENTS) if salt_bytes else SALTED_BYTES
    return min(capacity, max(1, form.slots_within(size)))


def _is_selected(head: SegmentHead, tag: bytes | None, before_ms: int | None) -> bool:
    """Returns whether a deletion selects a segment: by its tag, and by the time at which it was created.

    Younger pages of a selected segment are deleted with its oldest page.
    """
    return tag in (None, head.tag) and (before_ms is None or head.began_ms <= before_ms)


def _by_tag(records: Iterable[tuple[bytes, memoryview]]) -> Iterator[tuple[bytes, list[tuple[bytes, memoryview]]]]:
    """Groups adjacent records with equal tags, in their order."""
    for tag, run in groupby(records, key=lambda record: tag_of(record[0])):
        yield tag, list(run)


def _runs(locations: dict[bytes, Location], keys: Iterable[bytes]) -> Iterator[tuple[SegmentFile, list[tuple[bytes, int]]]]:
    """Yields (page key, slot) pairs of the keys before the first key that is not stored, grouped by segment."""
    stored = takewhile(lambda key: key in locations, keys)
    for segment, run in groupby(stored, key=lambda key: locations[key][0]):
        yield segment, [(key, locations[key][1]) for key in run]
