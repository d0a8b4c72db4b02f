"""The file tier: KV pages by page key in segment files that outlive the process. A PageStore of a single owner, on one thread.

For each tag, pages are appended to one segment at a time, and a segment has pages of one tag only. So the pages of one cache salt
can be counted and deleted by file. If new pages would exceed the cap, the oldest segment is deleted as a whole. If they would
exceed the quota of their tag, the oldest segment of the tag is deleted. The positions of pages are in memory only: when the store
is opened, indexes and records are read, and quotas are computed again. A disk error ends a write and pauses further writes, but
never affects reads of stored pages.

The process may die at any call. The next start then finds whole segments, some with a torn end, perhaps some without an index.
Only finished segments are synced. After a power cut, checksums detect pages that never reached the disk.
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
from rootstock_llm.services.worker.exec.tiers.segment_file import SegmentFile, SegmentLog, SegmentPlace
from rootstock_llm.services.worker.exec.tiers.segment_format import MOST_IDENTITY_BYTES, SegmentFormat, SegmentHead
from rootstock_llm.services.worker.exec.tiers.segment_recovery import recover
from rootstock_llm.services.worker.exec.tiers.store_folder import StoreFolder, StoreUnusable
from rootstock_llm.services.worker.exec.tiers.write_pause import WritePause

logger = logging.getLogger(__name__)
Place = tuple[SegmentFile, int]  # segment and slot
# Number of segments that always fit under the cap, and under a quota if it is large enough. So deleting one loses few pages.
LEAST_SEGMENTS = 4
SALTED_BYTES = 32 << 20  # largest segment with a salt, because many such segments may have no index yet
MOST_OPEN = 64  # segments without an index, because opening the store reads such segments as a whole
MOST_PAGE_BYTES = 1 << 30  # Linux writes at most 2 GiB per call


class SegmentStore:
    """A store whose files never take more than max_bytes, by their sizes.

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
            max_bytes: the cap.
            segment_bytes: approximate size of a segment, smaller if the cap requires it, with at least one page.
            identity: at most 64 bytes.
            salt_bytes: quota of a tag; 0 for none.
            clock: rising seconds, for pauses.
            wall: seconds since 1970, for ages.
            disk: the file system, None for the machine's.

        Raises:
            StoreBusy: another store has the folder.
            StoreUnusable: the folder cannot be used.
            ValueError: the cap cannot hold four segments of a page, the quota cannot hold a page, or page size or identity are
                invalid.
        """
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
        self._logs: dict[bytes, SegmentLog] = {}  # the same segments by tag; no log is empty
        self._open: dict[SegmentFile, None] = {}  # segments with free slots, the last one used at the end
        self._leftovers: list[SegmentFile] = []  # deleted segments whose files could not be deleted
        self._unread: list[int] = []  # numbers of files that could not be read
        self._deletes_unread = False  # a deletion included the unread files and has failed
        self._places: dict[bytes, Place] = {}  # by page key, oldest first
        self._lost: dict[bytes, None] = {}
        self._corrupt_pages = self._failed_reads = self._failed_writes = 0
        self._over_quota_pages = self._deleted_pages = 0
        self._num_charged = 0  # sum of the segments' charges
        self._num_on_disk = 0  # bytes of all files, leftovers included
        self._next_number = 0
        self._folder = StoreFolder(folder, self._disk)
        try:
            self._recover()
        except OSError as error:
            self.close()
            raise StoreUnusable(f"KV pages cannot be stored in {folder}: {error}") from error

    def keys(self) -> Sequence[bytes]:
        return list(self._places)

    def read(self, keys: Sequence[bytes], out: memoryview) -> int:
        assert out.nbytes == len(keys) * self.page_bytes, "`out` has the size of all pages"
        target = out.cast("B")
        whole = 0
        for segment, wanted in _runs(self._places, keys):
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
            except OSError as error:  # concerns one file; the others may be readable
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
            while self._evict_one(tag, 0, []):
                pass
        if foreign:
            text = "deleted segments that are broken, or of another identity, page size or version"
            logger.warning(text, extra=fields(segments=foreign))

    def _take(self, segment: SegmentFile) -> None:
        """Adds a recovered segment, which is newer than the ones before. The newest page of a key counts."""
        before = self._log(segment.head.tag).writable
        self._add(segment)
        for slot, key in enumerate(segment.keys):
            if key is not None:
                self._places.pop(key, None)
                self._places[key] = (segment, slot)
        if before is not None:
            self._finish_found(before)
        if segment.is_open and not segment.free_slots:
            self._finish_found(segment)
        elif len(self._open) > MOST_OPEN:
            self._finish_found(next(iter(self._open)))

    def _append(self, tag: bytes, records: Sequence[tuple[bytes, memoryview]], dropped: list[bytes]) -> None:
        """Appends records of one tag.

        Args:
            tag: tag of all records.
            records: (page key, page) pairs.
            dropped: gets the keys of evicted pages appended.

        Raises:
            OSError: the disk has failed. Records appended before stay stored.
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
                self._places[key] = (segment, slot)
                self._lost.pop(key, None)
                slot += 1
            at += count
            if not segment.free_slots:
                self._finish(segment)

    def _writable(self, tag: bytes, records: int, dropped: list[bytes]) -> SegmentFile:
        """Returns a segment of the tag with a free slot, after evicting enough for the next append of `records` records.

        Raises:
            OSError: the disk has failed.
        """
        while self._evict_one(tag, self._log(tag).next_append(records)[1], dropped):
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

    def _evict_one(self, tag: bytes, size: int, dropped: list[bytes]) -> bool:
        """Deletes leftovers, and the oldest segment if `size` more bytes of the tag would exceed its quota or the cap.

        Args:
            tag: tag of the new pages.
            size: bytes to be added.
            dropped: gets the keys of evicted pages appended.

        Returns:
            Whether a segment was deleted. The caller then calls again.

        Raises:
            OSError: a file could not be deleted.
        """
        self._clear()
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
        """Returns the log of a tag, or a new, unregistered one."""
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
        held = [key for slot, key in enumerate(segment.keys) if key is not None and self._places.get(key) == (segment, slot)]
        for key in held:
            del self._places[key]
        return held

    def _finish(self, segment: SegmentFile) -> None:
        """Ends appending to a segment and writes its index. Raises OSError, but appending has ended even then."""
        self._open.pop(segment, None)
        with self._measured(segment):
            segment.finish()

    def _finish_found(self, segment: SegmentFile) -> None:
        try:
            self._finish(segment)
        except OSError as error:
            self._write_failed("an index was not written", error)

    def _lose(self, segment: SegmentFile, key: bytes, error: OSError | None) -> None:
        """Forgets a page that a read found damaged or unreadable, or all pages of a segment whose file is gone.

        Args:
            segment: segment of the page.
            key: page key.
            error: error of the read, or None for a damaged page.
        """
        if error is None:
            self._corrupt_pages += 1
        else:
            self._failed_reads += 1
        if isinstance(error, FileNotFoundError):  # the file was deleted from outside
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
        """Deletes the files of leftovers, and unread files if a deletion included them.

        Raises:
            OSError: a file stays. All others have been tried.
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
        """Deletes the files of a segment. Raises OSError if the segment stays."""
        with self._measured(segment):
            segment.remove()
        self._num_on_disk -= segment.bytes_on_disk

    @contextmanager
    def _measured(self, segment: SegmentFile) -> Iterator[None]:
        """Updates the sums after the segment's size has changed, even after an exception."""
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
    """Returns the slots of a segment. Raises ValueError if the cap cannot hold LEAST_SEGMENTS segments of a page."""
    most = form.slots_within(max_bytes // LEAST_SEGMENTS)
    if most == 0:
        least = LEAST_SEGMENTS * form.bytes_with_index(1)
        raise ValueError(f"{max_bytes} bytes are too few for pages of {form.page_bytes} bytes; at least {least} are needed")
    return min(most, max(1, form.slots_within(segment_bytes)))


def _salted_capacity(form: SegmentFormat, capacity: int, salt_bytes: int) -> int:
    """Returns the slots of a segment with a salt. Raises ValueError if the quota cannot hold a page."""
    if 0 < salt_bytes < form.bytes_with_index(1):
        raise ValueError(f"a quota of {salt_bytes} bytes cannot hold a page; at least {form.bytes_with_index(1)} are needed")
    size = min(SALTED_BYTES, salt_bytes // LEAST_SEGMENTS) if salt_bytes else SALTED_BYTES
    return min(capacity, max(1, form.slots_within(size)))


def _is_meant(head: SegmentHead, tag: bytes | None, before_ms: int | None) -> bool:
    """Returns whether a deletion selects a segment.

    The first page of a segment is its oldest one, and the younger pages are deleted with it.
    """
    return tag in (None, head.tag) and (before_ms is None or head.began_ms <= before_ms)


def _by_tag(records: Iterable[tuple[bytes, memoryview]]) -> Iterator[tuple[bytes, list[tuple[bytes, memoryview]]]]:
    """Groups adjacent records of equal tags, in their order."""
    for tag, run in groupby(records, key=lambda record: tag_of(record[0])):
        yield tag, list(run)


def _runs(places: dict[bytes, Place], keys: Iterable[bytes]) -> Iterator[tuple[SegmentFile, list[tuple[bytes, int]]]]:
    """Yields (page key, slot) pairs of the first keys that are stored, grouped by adjacent segments."""
    held = takewhile(lambda key: key in places, keys)
    for segment, run in groupby(held, key=lambda key: places[key][0]):
        yield segment, [(key, places[key][1]) for key in run]
