"""A storage tier that several workers share: KV pages by page key in Redis or Valkey.

A PageStore with a single owner and one thread.

    pages:2:IDENTITY:p:KEY   string   checksum 16 | time of writing 8, in ms | page; expires if not written or read for ttl_s
    pages:2:IDENTITY:news    stream   {k: written keys, joined}, {d: deleted keys, joined}, {h: ""}: a worker started

2 is the version of keys and values. IDENTITY is a digest of layout and secret; workers with another identity do not see these
pages. KEY is a keyed digest after the tag of its cache salt, so neither names nor values reveal tokens.

A worker learns the stored keys by one scan, and then by the news. Pages that it does not know are computed, and a read finds out
if a page is gone. The server decides which pages it evicts when it is full. If the server does not respond, the worker pauses its
calls, and scans again afterwards.

The writing worker enforces a quota, by the keys that it knows. If several workers write within a second, they may exceed the
quota until one of them writes again.
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
WRITTEN_BYTES = 8
HEAD_BYTES = CHECKSUM_BYTES + WRITTEN_BYTES  # bytes of a value before the page
TIMEOUT_S = 1.0  # limit for connecting, and for each part of a response
CALL_S = 10.0  # limit for a whole read or write
GROUP_BYTES = 1 << 20  # pages in one command or response
MOST_KEYS = 1 << 20  # known keys of a worker, which forgets the oldest without deleting them
SCANNED = 2048  # keys per SCAN
NEWS_READ = 256  # entries of the stream per read; an entry has the keys of one write
NEWS_KEYS = 8192  # largest number of keys per call of news(), because the loop processes them between two steps
MOST_NEWS = 4096  # entries of the stream; a worker that missed more of them scans again
DELETED = 512  # keys per command that deletes pages or reads their ages
_IDENTITY_BYTES = 16
_FAILED = (redis.RedisError, OSError)


@dataclass(frozen=True, slots=True)
class _Due:
    """A deletion that is not finished."""

    tag: bytes | None  # pages of this tag, None for all
    before_ms: int | None  # pages written up to this time, None for all

    def takes(self, key: bytes, written_ms: int) -> bool:
        return self.tag in (None, tag_of(key)) and (self.before_ms is None or written_ms <= self.before_ms)


class RedisPageStore:
    """A PageStore in Redis or Valkey."""

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
            url: address of the server.
            page_bytes: bytes of a page.
            ttl_s: time after which a page expires that was not written or read.
            identity: digest of layout and secret.
            clock: rising seconds, for pauses.
            salt_bytes: quota; 0 for none.
            wall: seconds since 1970, for ages.

        Raises:
            ValueError: the URL is invalid, or the quota is smaller than a page.
        """
        self.page_bytes = page_bytes
        self._value_bytes = HEAD_BYTES + page_bytes
        if 0 < salt_bytes < self._value_bytes:
            raise ValueError(f"the quota of {salt_bytes} bytes cannot hold a page of {self._value_bytes} bytes")
        self._salt_pages = salt_bytes // self._value_bytes
        self._redis = page_client(url)
        self._clock, self._wall = clock, wall
        self._ttl_ms = ttl_s * 1000
        prefix = f"pages:{VERSION}:{identity[:_IDENTITY_BYTES].hex()}:"
        self._page_prefix, self._news_key = f"{prefix}p:".encode(), f"{prefix}news"
        self._known = KnownKeys(MOST_KEYS)
        self._lost: dict[bytes, None] = {}
        self._unreported: dict[bytes, bool] = {}  # changes that news() has not returned yet: whether the server has the key
        self._pause, self._write_pause = WritePause(clock), WritePause(clock)  # if the server does not respond; if it is full
        self._last_news: str | None = None  # last entry of the stream that was read, None if a scan is due
        self._due: list[_Due] = []
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
                self._pause.worked()
            except _FAILED as error:
                self._failed_reads += len(wanted)
                self._failed("pages were not read", error)
        if count < len(keys):
            self._known.drop(keys[count])  # the caller treats this page as lost; if it still exists, news() will report it again
        return count

    def _read(self, wanted: Sequence[bytes], target: memoryview) -> int:
        """Reads pages. Raises the errors of the server, and TimeoutError if the whole read takes too long."""
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
            self._failed("pages were not written", error)
        else:
            self._pause.worked()
            self._write_ended(refusal)
        held = sum(key in self._known for key in keys if key not in fresh)
        return Written(tuple(key for key in stored if key in self._known), tuple(dropped), held)

    def _write_ended(self, refusal: Exception | None) -> None:
        if refusal is not None:  # for example, the server is full and may not evict
            self._failed_writes += 1
            if isinstance(refusal, redis.ReadOnlyError):
                self._leave_server()
            seconds = self._write_pause.failed()
            logger.warning("pages were not written", extra=fields(error=str(refusal), pause_seconds=seconds))
        else:
            self._write_pause.worked()

    def _write(self, fresh: Mapping[bytes, memoryview], stored: list[bytes], dropped: list[bytes]) -> Exception | None:
        """Writes pages.

        Args:
            fresh: pages by key.
            stored: gets the written keys appended.
            dropped: gets the keys appended that the worker no longer knows as stored.

        Returns:
            The server's reason if it has refused a part, or None.

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
        """Writes pages with one pipeline. Arguments, result and errors are those of _write()."""
        now_ms = int(self._wall() * 1000)
        written = max(now_ms, 0).to_bytes(WRITTEN_BYTES, "little")
        with self._redis.pipeline(transaction=False) as pipeline:
            for key in keys:
                page = fresh[key].cast("B")
                pipeline.set(self._page_prefix + key, b"".join((_checksum(key, written, page), written, page)), px=self._ttl_ms)
            results = pipeline.execute(raise_on_error=False)
        held = [key for key, result in zip(keys, results, strict=True) if result is True]
        refusal = next((result for result in results if isinstance(result, Exception)), None)
        if held:
            stored += held
            dropped += self._known.add(held, now_ms)
            refusal = self._publish("k", held) or refusal
        return refusal

    def _evict_over_quota(self, tag: bytes, count: int, dropped: list[bytes]) -> None:
        """Evicts the oldest pages of a tag that exceed its quota after `count` more pages. Raises the errors of _read()."""
        over = self._known.num_of(tag) + count - self._salt_pages
        if over <= 0:
            return
        gone = self._learn_ages(tag)
        dropped += gone
        oldest = self._known.oldest(tag, over - len(gone))
        dropped += oldest
        self._unlink(oldest)
        self._over_quota_pages += len(oldest)

    def _learn_ages(self, tag: bytes) -> list[bytes]:
        """Fetches the times of writing of a tag's pages from other workers. Returns the keys of pages that have expired."""
        gone: list[bytes] = []
        unknown = self._known.of_no_age(tag)
        for at in range(0, len(unknown), DELETED):
            some = unknown[at : at + DELETED]
            ages = self._ages(some)
            self._known.learn({key: ms for key, ms in zip(some, ages, strict=True) if ms is not None})
            gone += [key for key, ms in zip(some, ages, strict=True) if ms is None]
        for key in gone:
            self._known.drop(key)
        return gone

    def _ages(self, keys: Sequence[bytes]) -> list[int | None]:
        """Returns the times of writing in ms, None for a page that is missing or malformed."""
        with self._redis.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.getrange(self._page_prefix + key, CHECKSUM_BYTES, HEAD_BYTES - 1)
            found: list[bytes] = pipeline.execute()
        return [int.from_bytes(each, "little") if len(each) == WRITTEN_BYTES else None for each in found]

    def _unlink(self, keys: Sequence[bytes]) -> int:
        """Deletes pages and reports it in the news. Returns the number of existing pages. Raises the errors of _read()."""
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
            The server's reason if it refuses the entry. Other workers then learn of the change by their next scan or by a read.
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
        """Checks the time limit of a whole call, whose parts may each be in time. Raises TimeoutError."""
        if self._clock() > until:
            raise TimeoutError(f"the call took longer than {CALL_S} s")

    def news(self) -> News:
        """Returns changes by other workers since the last call, at most NEWS_KEYS keys.

        Retries unfinished deletions first.
        """
        if self._pause.over:
            try:
                self._delete_due()
                self._follow_news()
                self._pause.worked()
            except _FAILED as error:
                self._failed("the storage does not respond" if not self._due else "a deletion is not finished", error)
        changes = dict(islice(self._unreported.items(), NEWS_KEYS))
        for key in changes:
            del self._unreported[key]
        stored = tuple(key for key, is_stored in changes.items() if is_stored)
        return News(stored, tuple(key for key, is_stored in changes.items() if not is_stored), bool(self._unreported))

    def delete(self, which: Selection = ALL) -> Deleted:
        """Deletes pages.

        If the server does not respond, the deletion stays due, and nothing is read or written until it is done.
        """
        before_ms = None if which.older_than_s is None else int((self._wall() - which.older_than_s) * 1000)
        if (due := _Due(which.tag, before_ms)) not in self._due:
            self._due.append(due)
        before = self._deleted_pages
        dropped = self._forget(which)
        pending = ""
        try:
            dropped += self._delete_due()
        except _FAILED as error:
            self._failed_writes += 1
            self._failed("a deletion is not finished", error)
            pending = f"the storage does not respond: {error}"
        return Deleted(self._deleted_pages - before, tuple(dict.fromkeys(dropped)), pending)

    def _forget(self, which: Selection) -> list[bytes]:
        """Removes the selected keys from the known ones, before the server responds. No effect for a selection by age."""
        if which.older_than_s is not None:
            return []
        dropped = [key for key in self._known if which.tag in (None, tag_of(key))]
        for key in dropped:
            self._known.drop(key)
            self._unreported.pop(key, None)
        return dropped

    def _delete_due(self) -> list[bytes]:
        """Runs all due deletions in one scan. Returns the deleted keys that were known. Raises the errors of the server."""
        if not self._due:
            return []
        due, dropped = list(self._due), list[bytes]()
        for some in self._scanned(SCANNED):
            meant = self._meant(some, due)
            dropped += [key for key in meant if key in self._known]
            self._unreported |= {key: False for key in meant if key in self._known}
            self._deleted_pages += self._unlink(meant)
        self._due.clear()
        return dropped

    def _meant(self, keys: Sequence[bytes], due: Sequence[_Due]) -> list[bytes]:
        """Returns those keys that a due deletion selects. Raises the errors of the server."""
        meant = {key for key in keys if any(each.before_ms is None and each.takes(key, 0) for each in due)}
        rest = [key for key in keys if key not in meant and any(each.tag in (None, tag_of(key)) for each in due)]
        written = zip(rest, self._ages(rest) if rest else (), strict=True)
        meant |= {key for key, ms in written if ms is not None and any(each.takes(key, ms) for each in due)}
        return [key for key in keys if key in meant]

    def use(self) -> StorageUse:
        size = len(self._known) * self._value_bytes
        return StorageUse(size, self._known.num_salts, self._over_quota_pages, self._deleted_pages)

    def counts(self) -> StoreCounts:
        size = len(self._known) * self._value_bytes
        return StoreCounts(self._corrupt_pages, self._failed_reads, self._failed_writes, size, len(self._known))

    def close(self) -> None:
        self._redis.close()

    def _follow_news(self) -> None:
        """Reads the news, or scans if entries were missed. Raises the errors of the server."""
        if self._last_news is None:
            self._scan_all()
            return
        answer: Any = self._redis.xrange(self._news_key, min=self._last_news, count=NEWS_READ)
        entries: list[tuple[bytes, Mapping[bytes, bytes]]] = answer
        if not entries or _text(entries[0][0]) != self._last_news:  # the last read entry was trimmed, and later ones may be, too
            self._scan_all()
            return
        for number, entry in entries[1:]:
            self._last_news = _text(number)
            self._change([], [key for key in _keys_in(entry.get(b"d", b"")) if key in self._known])
            self._change([key for key in _keys_in(entry.get(b"k", b"")) if key not in self._known], [])

    def _scan_all(self) -> None:
        """Scans all keys. News that arrive during the scan are read again after it."""
        last, found = self._begun(), dict[bytes, None]()
        for some in self._scanned(SCANNED):
            found |= dict.fromkeys(some)
        self._change([key for key in found if key not in self._known], [key for key in self._known if key not in found])
        self._last_news = last

    def _begun(self) -> str | None:
        """Returns the entry of the news after which the next read begins.

        It adds an entry, so that the stream has one. If the server is full, it returns the last existing entry, or None.
        """
        try:
            return _text(self._redis.xadd(self._news_key, {"h": ""}, maxlen=MOST_NEWS, approximate=True))
        except redis.ResponseError:
            answer: Any = self._redis.xrevrange(self._news_key, count=1)
            return _text(answer[0][0]) if answer else None

    def _scanned(self, at_once: int) -> Iterator[list[bytes]]:
        """Yields the keys of stored pages. Pages that are written or deleted during the scan may be missing or included."""
        cursor = 0
        while True:
            answer: Any = self._redis.scan(cursor, match=self._page_prefix + b"*", count=at_once)
            cursor, names = answer
            if found := [name[len(self._page_prefix) :] for name in names if len(name) == len(self._page_prefix) + KEY_BYTES]:
                yield found
            if cursor == 0:
                return

    def _change(self, stored: Sequence[bytes], dropped: Sequence[bytes]) -> None:
        """Records changes by other workers for news()."""
        for key in dropped:
            self._known.drop(key)
            self._unreported[key] = False
        self._unreported |= dict.fromkeys(stored, True)
        self._unreported |= dict.fromkeys(self._known.add(stored, None), False)

    def _leave_server(self) -> None:
        """Closes the idle connections, so that the next command connects again.

        The server may no longer be the primary, and its address may now lead to another server.
        """
        self._redis.connection_pool.disconnect(inuse_connections=False)

    def _failed(self, what: str, error: Exception) -> None:
        self._last_news = None
        self._leave_server()
        seconds = self._pause.failed()
        logger.warning(what, extra=fields(error=str(error), pause_seconds=seconds))


def page_client(url: str) -> redis.Redis:
    """Returns a client that connects with its first command. Raises ValueError if the URL is invalid or has forbidden options."""
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
