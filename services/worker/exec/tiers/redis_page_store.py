"""A storage tier that several workers share: KV pages by page key in Redis or Valkey.

The PageStore has one owner, which calls it on one thread.

    pages:2:IDENTITY:p:KEY   string   checksum 16 | time of writing 8, in ms | page; expires if not written or read for ttl_s
    pages:2:IDENTITY:news    stream   {k: written keys, joined}, {d: deleted keys, joined}, {h: ""}: a worker starts a scan

2 is the version of keys and values. IDENTITY is a digest of KV layout and secret; workers with another identity do not use these
pages. KEY is a page key: the tag of the cache salt, then a keyed digest. So neither names nor values reveal tokens.

A worker has a list of known keys. It gets them by a scan of all keys, and later from the news. A page that is stored but not
known is computed again. A known page may be missing, because the server evicts pages when it is full; a read then reports it as
lost. If the server does not respond, the worker pauses its calls, and scans again afterwards.

The worker that writes a page enforces the quota, by the keys that it knows. If several workers write within a second, they may
exceed the quota until one of them writes again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, takewhile
from typing import Any

import redis
import xxhash
from redis.backoff import NoBackoff
from redis.retry import Retry

from rootstock_llm.services.shared.index.redis_client import ReloadingSyncConnection, reload_files
from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.worker.core.contracts.transfers import ALL, Deleted, Selection, StorageUse
from rootstock_llm.services.worker.core.tiers.page_keys import KEY_BYTES, UNSALTED, tag_of
from rootstock_llm.services.worker.exec.contracts.page_store import News, StoreCounts, Written
from rootstock_llm.services.worker.exec.tiers.known_keys import KnownKeys
from rootstock_llm.services.worker.exec.tiers.write_pause import WritePause

logger = logging.getLogger(__name__)
VERSION = 2  # version of keys and values; in version 1, keys had no tag and values no time
CHECKSUM_BYTES = 16
WRITTEN_BYTES = 8  # bytes of the time of writing
HEAD_BYTES = CHECKSUM_BYTES + WRITTEN_BYTES  # bytes of a value before the page
TIMEOUT_S = 1.0  # seconds; limit for connecting, and for each part of a response
CALL_S = 10.0  # seconds; limit for a whole read or write
GROUP_BYTES = 1 << 20  # bytes of pages per pipeline
MOST_KEYS = 1 << 20  # largest number of known keys of a worker; the oldest known keys are dropped without deleting the pages
SCANNED = 2048  # keys per SCAN
NEWS_READ = 256  # entries of the stream per read; an entry has the keys of one write or deletion
NEWS_KEYS = 8192  # largest number of keys per call of news(), because the loop processes them between two steps
MOST_NEWS = 4096  # entries that the stream keeps; a worker that has missed more entries scans again
DELETED = 512  # keys per round trip that deletes pages, looks them up or reads their times of writing
_IDENTITY_BYTES = 16  # bytes of the identity in names
_FAILED = (redis.RedisError, OSError)  # errors of the server or the connection


@dataclass(frozen=True, slots=True)
class _Due:
    """A deletion that is not finished."""

    tag: bytes | None  # only pages of this tag; None for all tags
    before_ms: int | None  # only pages written up to this time, in ms; None for all times

    def selects(self, key: bytes, written_ms: int) -> bool:
        return self.tag in (None, tag_of(key)) and (self.before_ms is None or written_ms <= self.before_ms)


class RedisPageStore:
    """A PageStore on a Redis or Valkey server."""

    shared = True

    def __init__(
        self,
        url: str,
        page_bytes: int,
        ttl_s: int,
        identity: bytes,
        clock: Callable[[], float] = time.monotonic,
        *,
        salt_bytes: int = 0,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Prepares a client, which connects at the first call and after a lost connection.

        Args:
            url: URL of the server.
            page_bytes: bytes of a page.
            ttl_s: seconds after its last write or read at which a page expires.
            identity: digest of KV layout and secret.
            clock: returns rising seconds, for pauses.
            salt_bytes: quota of a cache salt in bytes; 0 for no quota.
            wall: returns seconds since 1970, for ages of pages.

        Raises:
            ValueError: the URL is invalid, or the quota is smaller than a page.
        """
        self.page_bytes = page_bytes
        self._value_bytes = HEAD_BYTES + page_bytes
        if 0 < salt_bytes < self._value_bytes:
            raise ValueError(f"the quota of a salt is {salt_bytes} bytes; a page needs at least {self._value_bytes}")
        self._salt_pages = salt_bytes // self._value_bytes
        self._redis = page_client(url)
        self._clock, self._wall = clock, wall
        self._ttl_ms = ttl_s * 1000
        prefix = f"pages:{VERSION}:{identity[:_IDENTITY_BYTES].hex()}:"
        self._page_prefix, self._news_key = f"{prefix}p:".encode(), f"{prefix}news"
        self._known = KnownKeys(MOST_KEYS)
        self._lost: dict[bytes, None] = {}  # page keys for the next take_lost()
        self._unreported: dict[
            bytes, bool
        ] = {}  # by key: whether the page is stored now; changes that news() has not returned yet
        # Pause of all calls after the server did not respond, and pause of writes after it has refused a write.
        self._pause, self._write_pause = WritePause(clock), WritePause(clock)
        self._last_news: str | None = None  # id of the last entry of the stream that was read, None if a scan is due
        self._due: list[_Due] = []  # deletions that are not finished; nothing is read or written before they are
        self._corrupt_pages = self._failed_reads = self._failed_writes = 0
        self._over_quota_pages = self._deleted_pages = 0

    def keys(self) -> Sequence[bytes]:
        return list(self._known)

    def read(self, keys: Sequence[bytes], out: memoryview) -> int:
        assert out.nbytes == len(keys) * self.page_bytes, "`out` has the size of all pages"
        wanted, target, count = list(takewhile(self._known.__contains__, keys)), out.cast("B"), 0
        if wanted and self._pause.over and not self._due:
            try:
                count = self._read(wanted, target)
                self._lose_missing(wanted[count + 1 :])
                self._pause.worked()
            except _FAILED as error:
                self._failed_reads += len(wanted)
                self._failed("could not read pages", error)
        if count < len(keys):
            self._known.drop(keys[count])  # also if the read failed: if the page still exists, news() reports it again
        return count

    def _read(self, wanted: Sequence[bytes], target: memoryview) -> int:
        """Reads pages. Raises the errors of _FAILED, and TimeoutError if the whole read takes longer than CALL_S."""
        count, until = 0, self._clock() + CALL_S
        for keys in self._groups(wanted):
            with self._redis.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.getex(self._page_prefix + key, px=self._ttl_ms)
                values: list[bytes | None] = pipeline.execute()
            for key, value in zip(keys, values, strict=True):
                if value is None or len(value) != self._value_bytes or not _is_whole(key, value):
                    self._corrupt_pages += value is not None
                    self._lost[key] = None
                    return count
                target[count * self.page_bytes : (count + 1) * self.page_bytes] = memoryview(value)[HEAD_BYTES:]
                count += 1
            self._check_time(until)
        return count

    def _lose_missing(self, keys: Sequence[bytes]) -> None:
        """Drops the keys of pages that the server no longer has, and records them as lost. Raises the errors of _FAILED."""
        for at in range(0, len(keys), DELETED):
            some = keys[at : at + DELETED]
            with self._redis.pipeline(transaction=False) as pipeline:
                for key in some:
                    pipeline.exists(self._page_prefix + key)
                found: list[int] = pipeline.execute()
            missing = [key for key, exists in zip(some, found, strict=True) if not exists]
            for key in missing:
                self._known.drop(key)
            self._lost |= dict.fromkeys(missing)

    def take_lost(self) -> tuple[bytes, ...]:
        lost = tuple(self._lost)
        self._lost.clear()
        return lost

    def write(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> Written:
        assert all(page.nbytes == self.page_bytes for page in pages), "every page has the same size"
        fresh = {key: page for key, page in zip(keys, pages, strict=True) if key not in self._known}
        if not fresh or self._due or not (self._pause.over and self._write_pause.over):
            return Written((), (), len(keys) - len(fresh))
        stored: list[bytes] = []
        dropped: list[bytes] = []
        try:
            refusal = self._write(fresh, stored, dropped)
        except _FAILED as error:
            self._failed_writes += 1
            self._failed("could not write pages", error)
        else:
            self._pause.worked()
            self._write_ended(refusal)
        already_stored = sum(key in self._known for key in keys if key not in fresh)
        return Written(tuple(key for key in stored if key in self._known), tuple(dropped), already_stored)

    def _write_ended(self, refusal: Exception | None) -> None:
        if refusal is not None:  # for example, the server is full and does not evict
            self._failed_writes += 1
            if isinstance(refusal, redis.ReadOnlyError):
                self._disconnect()
            seconds = self._write_pause.failed()
            logger.warning("the server refused to store pages", extra=fields(error=str(refusal), pause_seconds=seconds))
        else:
            self._write_pause.worked()

    def _write(self, fresh: Mapping[bytes, memoryview], stored: list[bytes], dropped: list[bytes]) -> Exception | None:
        """Writes pages.

        Args:
            fresh: pages by key.
            stored: the written keys are appended to it.
            dropped: keys that are removed from the known ones are appended to it.

        Returns:
            The server's error if it has refused a command, otherwise None.

        Raises:
            TimeoutError: the whole write takes too long.
            RedisError: the server has failed.
        """
        until = self._clock() + CALL_S
        for tag, run in groupby(fresh, key=tag_of):
            keys = list(run)
            if self._salt_pages and tag != UNSALTED:
                # A prefix hit needs all earlier pages, so pages beyond the quota would be useless.
                keys = keys[: self._salt_pages]
                self._evict_over_quota(tag, len(keys), dropped)
            for group in self._groups(keys):
                refusal = self._write_group(group, fresh, stored, dropped)
                if refusal is not None:
                    return refusal
                self._check_time(until)
        return None

    def _write_group(
        self, keys: Sequence[bytes], fresh: Mapping[bytes, memoryview], stored: list[bytes], dropped: list[bytes]
    ) -> Exception | None:
        """Writes pages with one pipeline. The other arguments, the result and the errors are those of _write()."""
        now_ms = int(self._wall() * 1000)
        written = max(now_ms, 0).to_bytes(WRITTEN_BYTES, "little")
        with self._redis.pipeline(transaction=False) as pipeline:
            for key in keys:
                page = fresh[key].cast("B")
                pipeline.set(self._page_prefix + key, b"".join((_checksum(key, written, page), written, page)), px=self._ttl_ms)
            results = pipeline.execute(raise_on_error=False)
        written_keys = [key for key, result in zip(keys, results, strict=True) if result is True]
        refusal = next((result for result in results if isinstance(result, Exception)), None)
        if written_keys:
            stored += written_keys
            dropped += self._known.add(written_keys, now_ms)
            refusal = self._publish("k", written_keys) or refusal
        return refusal

    def _evict_over_quota(self, tag: bytes, count: int, dropped: list[bytes]) -> None:
        """Evicts the oldest pages of a tag until `count` more pages fit the tag's quota. Raises the errors of _FAILED."""
        over = self._known.num_with_tag(tag) + count - self._salt_pages
        if over <= 0:
            return
        expired = self._fetch_times(tag)
        dropped += expired
        oldest = self._known.oldest(tag, over - len(expired))
        dropped += oldest
        self._unlink(oldest)
        self._over_quota_pages += len(oldest)

    def _fetch_times(self, tag: bytes) -> list[bytes]:
        """Fetches the unknown times of writing of a tag's pages, which other workers have written.

        Returns:
            The keys of pages that do not exist any longer. They are dropped from the known keys.
        """
        expired: list[bytes] = []
        unknown = self._known.keys_without_time(tag)
        for at in range(0, len(unknown), DELETED):
            some = unknown[at : at + DELETED]
            times = self._times(some)
            self._known.set_times({key: ms for key, ms in zip(some, times, strict=True) if ms is not None})
            expired += [key for key, ms in zip(some, times, strict=True) if ms is None]
        for key in expired:
            self._known.drop(key)
        return expired

    def _times(self, keys: Sequence[bytes]) -> list[int | None]:
        """Returns the times of writing in ms, None for a page that is missing or malformed."""
        with self._redis.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.getrange(self._page_prefix + key, CHECKSUM_BYTES, HEAD_BYTES - 1)
            found: list[bytes] = pipeline.execute()
        return [int.from_bytes(each, "little") if len(each) == WRITTEN_BYTES else None for each in found]

    def _unlink(self, keys: Sequence[bytes]) -> int:
        """Deletes pages and publishes the deletion. Returns the number of pages that existed. Raises the errors of _FAILED."""
        count = 0
        for at in range(0, len(keys), DELETED):
            some = keys[at : at + DELETED]
            for key in some:
                self._known.drop(key)
            found: Any = self._redis.unlink(*(self._page_prefix + key for key in some))
            count += found
            self._publish("d", some)
        return count

    def _publish(self, what: str, keys: Sequence[bytes]) -> Exception | None:
        """Adds an entry to the news.

        Returns:
            The server's error if it refuses the entry, otherwise None. Without the entry, other workers notice the change in
            their next scan or in a read.
        """
        try:
            self._redis.xadd(self._news_key, {what: b"".join(keys)}, maxlen=MOST_NEWS, approximate=True)
        except redis.ResponseError as error:
            return error
        return None

    def _groups(self, keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
        """Splits keys into groups of at most GROUP_BYTES of pages, or of one page."""
        at_once = max(1, GROUP_BYTES // self.page_bytes)
        return (keys[at : at + at_once] for at in range(0, len(keys), at_once))

    def _check_time(self, until: float) -> None:
        """Checks the time limit of a whole call. Each single command has its own limit. Raises TimeoutError."""
        if self._clock() > until:
            raise TimeoutError(f"a read or write of pages took longer than {CALL_S} s")

    def news(self) -> News:
        """Returns the changes by other workers since the last call, at most NEWS_KEYS keys.

        First retries unfinished deletions.
        """
        is_behind = False
        if self._pause.over:
            try:
                self._delete_due()
                is_behind = self._follow_news()
                self._pause.worked()
            except _FAILED as error:
                self._failed(
                    "could not read the changes of other workers" if not self._due else "could not finish a deletion", error
                )
        changes = dict(islice(self._unreported.items(), NEWS_KEYS))
        for key in changes:
            del self._unreported[key]
        stored = tuple(key for key, is_stored in changes.items() if is_stored)
        dropped = tuple(key for key, is_stored in changes.items() if not is_stored)
        return News(stored, dropped, is_behind or bool(self._unreported))

    def delete(self, which: Selection = ALL) -> Deleted:
        """Deletes pages.

        If the server does not respond, the deletion stays due. No page is read or written until it is done.
        """
        before_ms = None if which.older_than_s is None else int((self._wall() - which.older_than_s) * 1000)
        if (due := _Due(which.tag, before_ms)) not in self._due:
            self._due.append(due)
        before = self._deleted_pages
        dropped = self._drop_selected(which)
        pending = ""
        try:
            dropped += self._delete_due()
        except _FAILED as error:
            self._failed_writes += 1
            self._failed("could not finish a deletion", error)
            pending = f"the storage does not respond: {error}"
        return Deleted(self._deleted_pages - before, tuple(dict.fromkeys(dropped)), pending)

    def _drop_selected(self, which: Selection) -> list[bytes]:
        """Removes the selected keys from the known ones without asking the server. Has no effect for a selection by age."""
        if which.older_than_s is not None:
            return []
        dropped = [key for key in self._known if which.tag in (None, tag_of(key))]
        for key in dropped:
            self._known.drop(key)
            self._unreported.pop(key, None)
        return dropped

    def _delete_due(self) -> list[bytes]:
        """Runs all due deletions in one scan. Returns the deleted keys that were known. Raises the errors of _FAILED."""
        if not self._due:
            return []
        due, dropped = list(self._due), list[bytes]()
        for some in self._scanned(SCANNED):
            selected = self._selected(some, due)
            dropped += [key for key in selected if key in self._known]
            self._unreported |= {key: False for key in selected if key in self._known}
            self._deleted_pages += self._unlink(selected)
        self._due.clear()
        return dropped

    def _selected(self, keys: Sequence[bytes], due: Sequence[_Due]) -> list[bytes]:
        """Returns the keys that a due deletion selects, in their order. Raises the errors of _FAILED."""
        selected = {key for key in keys if any(each.before_ms is None and each.selects(key, 0) for each in due)}
        rest = [key for key in keys if key not in selected and any(each.tag in (None, tag_of(key)) for each in due)]
        written = zip(rest, self._times(rest) if rest else (), strict=True)
        selected |= {key for key, ms in written if ms is not None and any(each.selects(key, ms) for each in due)}
        return [key for key in keys if key in selected]

    def use(self) -> StorageUse:
        size = len(self._known) * self._value_bytes
        return StorageUse(size, self._known.num_salts, self._over_quota_pages, self._deleted_pages)

    def counts(self) -> StoreCounts:
        size = len(self._known) * self._value_bytes
        return StoreCounts(self._corrupt_pages, self._failed_reads, self._failed_writes, size, len(self._known))

    def close(self) -> None:
        self._redis.close()

    def _follow_news(self) -> bool:
        """Reads new entries of the news, or scans if entries were missed. Raises the errors of _FAILED.

        Returns:
            Whether there may be more entries, because this call has read NEWS_READ of them.
        """
        if self._last_news is None:
            self._scan_all()
            return False
        response: Any = self._redis.xrange(self._news_key, min=self._last_news, count=NEWS_READ)
        entries: list[tuple[bytes, Mapping[bytes, bytes]]] = response
        if not entries or _text(entries[0][0]) != self._last_news:  # the last read entry was trimmed, and perhaps later ones
            self._scan_all()
            return False
        for number, entry in entries[1:]:
            self._last_news = _text(number)
            self._change([], [key for key in _keys_in(entry.get(b"d", b"")) if key in self._known])
            self._change([key for key in _keys_in(entry.get(b"k", b"")) if key not in self._known], [])
        return len(entries) == NEWS_READ

    def _scan_all(self) -> None:
        """Scans all keys. The next read of the news begins with entries that were added during the scan."""
        last, found = self._newest_entry(), dict[bytes, None]()
        for some in self._scanned(SCANNED):
            found |= dict.fromkeys(some)
        self._change([key for key in found if key not in self._known], [key for key in self._known if key not in found])
        self._last_news = last

    def _newest_entry(self) -> str | None:
        """Returns the id of the newest entry of the news. The next read begins after it.

        An entry is added first, so that the news have one. If a full server refuses it, this returns the id of the newest
        existing entry, or None without entries.
        """
        try:
            return _text(self._redis.xadd(self._news_key, {"h": ""}, maxlen=MOST_NEWS, approximate=True))
        except redis.ResponseError:
            response: Any = self._redis.xrevrange(self._news_key, count=1)
            return _text(response[0][0]) if response else None

    def _scanned(self, at_once: int) -> Iterator[list[bytes]]:
        """Yields the keys of stored pages. Keys that are written or deleted during the scan may be yielded or not."""
        cursor = 0
        while True:
            response: Any = self._redis.scan(cursor, match=self._page_prefix + b"*", count=at_once)
            cursor, names = response
            if found := [name[len(self._page_prefix) :] for name in names if len(name) == len(self._page_prefix) + KEY_BYTES]:
                yield found
            if cursor == 0:
                return

    def _change(self, stored: Sequence[bytes], dropped: Sequence[bytes]) -> None:
        """Applies changes by other workers to the known keys, and records them for news()."""
        for key in dropped:
            self._known.drop(key)
            self._unreported[key] = False
        self._unreported |= dict.fromkeys(stored, True)
        self._unreported |= dict.fromkeys(self._known.add(stored, None), False)

    def _disconnect(self) -> None:
        """Closes the idle connections, so that the next command connects again.

        After a failover, the server may not be the primary any more, and its address may now lead to another server.
        """
        self._redis.connection_pool.disconnect(inuse_connections=False)

    def _failed(self, what: str, error: Exception) -> None:
        """Logs a failure of the server, and pauses all calls. A scan is due afterwards."""
        self._last_news = None
        self._disconnect()
        seconds = self._pause.failed()
        logger.warning(what, extra=fields(error=str(error), pause_seconds=seconds))


def page_client(url: str) -> redis.Redis:
    """Returns a client that connects with its first command.

    Raises ValueError if the URL is invalid or has unsupported options.
    """
    client = redis.Redis.from_url(
        url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=Retry(NoBackoff(), 0), protocol=2
    )
    reload_files(client.connection_pool, url, ReloadingSyncConnection)
    return client


def _checksum(key: bytes, written: bytes, page: memoryview | bytes) -> bytes:
    return xxhash.xxh3_128_digest(key + written + xxhash.xxh3_128_digest(page))


def _is_whole(key: bytes, value: bytes) -> bool:
    head, page = value[:HEAD_BYTES], memoryview(value)[HEAD_BYTES:]
    return head[:CHECKSUM_BYTES] == _checksum(key, head[CHECKSUM_BYTES:], page)


def _keys_in(joined: bytes) -> list[bytes]:
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined) - len(joined) % KEY_BYTES, KEY_BYTES)]


def _text(of: Any) -> str:
    return of.decode() if isinstance(of, bytes) else str(of)
