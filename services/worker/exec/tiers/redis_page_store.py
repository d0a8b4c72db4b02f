"""A storage tier that several workers share: pages of KV by key in Redis or Valkey. A PageStore; single owner, one thread.

    pages:IDENTITY:p:KEY   string   checksum 16 | page; goes when nobody has written or read it for so long
    pages:IDENTITY:news    stream   {k: keys that were written, one behind another}, {c: ""}: all were deleted, {h: ""}: one came

IDENTITY is of layout and secret: whoever has another one has nothing to do with these pages. KEY is a keyed digest, so that
neither names nor values tell tokens. Which keys there are every worker knows from one look at all of them and from the news
behind it; what it does not know of it computes, and what is not there any more a read finds out. The server decides what goes
when it is full. While it does not answer it is left in peace for a while, and afterwards all is looked at again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import redis
import xxhash
from redis.backoff import NoBackoff
from redis.retry import Retry

from services.shared.observe.log import fields
from services.worker.core.tiers.page_keys import KEY_BYTES
from services.worker.exec.contracts.page_store import News, StoreCounts, Written
from services.worker.exec.tiers.write_pause import WritePause

logger = logging.getLogger(__name__)
CHECKSUM_BYTES = 16
TIMEOUT_S = 2.0  # of a command, of connecting
MOST_KEYS = 1 << 20  # that are known here; the oldest are forgotten, not deleted
SCANNED = 2048  # keys of one look
MOST_NEWS = 4096  # entries of the stream: who was away for longer looks at everything
DELETED = 512  # keys of one command
_IDENTITY_BYTES = 16
_Failed = (redis.RedisError, OSError)


class RedisPageStore:
    shared = True

    def __init__(
        self, url: str, page_bytes: int, ttl_s: int, identity: bytes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Connects when it is first called for, and whenever that is lost. ttl_s: after which a page goes that nobody has written
        or read. identity: see above. Raises ValueError for a URL that is none."""
        self.page_bytes = page_bytes
        self._redis = redis.Redis.from_url(
            url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=Retry(NoBackoff(), 0), protocol=2
        )
        self._ttl_ms = ttl_s * 1000
        prefix = f"pages:{identity[:_IDENTITY_BYTES].hex()}:"
        self._page_prefix, self._news_key = f"{prefix}p:".encode(), f"{prefix}news"
        self._held: dict[bytes, None] = {}
        self._lost: dict[bytes, None] = {}
        self._pause, self._write_pause = WritePause(clock), WritePause(clock)  # while it does not answer; while it is full
        self._last_news: str | None = None  # None: everything has to be looked at
        self._corrupt_pages = self._failed_reads = self._failed_writes = 0

    def keys(self) -> Sequence[bytes]:
        return list(self._held)

    def read(self, keys: Sequence[bytes], out: memoryview) -> int:
        assert out.nbytes == len(keys) * self.page_bytes, "a page's room for every key"
        wanted = list(takewhile(self._held.__contains__, keys))
        if not wanted or not self._pause.over:
            return 0
        try:
            with self._redis.pipeline(transaction=False) as pipeline:
                for key in wanted:
                    pipeline.getex(self._page_prefix + key, px=self._ttl_ms)
                values: list[bytes | None] = pipeline.execute()
            self._pause.worked()
        except _Failed as error:
            self._failed_reads += len(wanted)
            self._failed("pages were not read", error)
            return 0
        room = out.cast("B")
        for at, (key, value) in enumerate(zip(wanted, values, strict=True)):
            if value is None or len(value) != CHECKSUM_BYTES + self.page_bytes or not _is_whole(key, value):
                self._corrupt_pages += value is not None
                self._forget([key])
                self._lost[key] = None
                return at
            room[at * self.page_bytes : (at + 1) * self.page_bytes] = memoryview(value)[CHECKSUM_BYTES:]
        return len(wanted)

    def take_lost(self) -> tuple[bytes, ...]:
        lost = tuple(self._lost)
        self._lost.clear()
        return lost

    def write(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> Written:
        assert all(page.nbytes == self.page_bytes for page in pages), "every page has the same size"
        fresh = {key: page for key, page in zip(keys, pages, strict=True) if key not in self._held}
        if not fresh or not (self._pause.over and self._write_pause.over):
            return Written((), ())
        try:
            with self._redis.pipeline(transaction=False) as pipeline:
                for key, page in fresh.items():
                    pipeline.set(self._page_prefix + key, b"".join((_checksum(key, page), page.cast("B"))), px=self._ttl_ms)
                results = pipeline.execute(raise_on_error=False)
            stored = [key for key, result in zip(fresh, results, strict=True) if result is True]
            refusal = next((result for result in results if isinstance(result, Exception)), None)
            if stored:
                self._redis.xadd(self._news_key, {"k": b"".join(stored)}, maxlen=MOST_NEWS, approximate=True)
        except _Failed as error:
            self._failed_writes += 1
            self._failed("pages were not written", error)
            return Written((), ())
        if refusal is not None:  # it is full and nothing may go, say
            self._failed_writes += 1
            seconds = self._write_pause.failed()
            logger.warning("pages were not written", extra=fields(error=str(refusal), pause_seconds=seconds))
        else:
            self._write_pause.worked()
        return Written(tuple(stored), self._hold(stored))

    def news(self) -> News:
        """What others have written and deleted since the last call; all there is, where there was none or too much was missed."""
        if not self._pause.over:
            return News((), ())
        try:
            news = self._all() if self._last_news is None else self._behind(self._last_news)
            self._pause.worked()
            return news
        except _Failed as error:
            self._failed("the storage does not answer", error)
            return News((), ())

    def clear(self) -> None:
        self._held.clear()
        try:
            for some in self._scanned(DELETED):
                self._redis.unlink(*(self._page_prefix + key for key in some))
            self._redis.xadd(self._news_key, {"c": ""}, maxlen=MOST_NEWS, approximate=True)
        except _Failed as error:
            self._failed_writes += 1
            self._failed("pages were not deleted", error)

    def counts(self) -> StoreCounts:
        size = len(self._held) * (CHECKSUM_BYTES + self.page_bytes)
        return StoreCounts(self._corrupt_pages, self._failed_reads, self._failed_writes, size, len(self._held))

    def close(self) -> None:
        self._redis.close()

    def _all(self) -> News:
        """The news that come meanwhile are read again behind it. An entry of its own, so that there is one to go on behind."""
        last = self._redis.xadd(self._news_key, {"h": ""}, maxlen=MOST_NEWS, approximate=True)
        before, self._held = self._held, {}
        for some in self._scanned(SCANNED):
            self._hold(some)
        self._last_news = _text(last)
        return News(tuple(self._held), tuple(key for key in before if key not in self._held))

    def _behind(self, last: str) -> News:
        answer: Any = self._redis.xrange(self._news_key, min=last, count=MOST_NEWS)
        entries: list[tuple[bytes, Mapping[bytes, bytes]]] = answer
        if not entries or _text(entries[0][0]) != last:  # what was seen last is gone, and perhaps more behind it
            return self._all()
        stored: dict[bytes, None] = {}
        dropped: dict[bytes, None] = {}
        for number, entry in entries[1:]:
            self._last_news = _text(number)
            if b"c" in entry:
                dropped |= dict.fromkeys(self._held) | stored
                stored.clear()
                self._held.clear()
                continue
            news = [key for key in _keys_in(entry.get(b"k", b"")) if key not in self._held]
            dropped |= dict.fromkeys(self._hold(news))
            stored |= dict.fromkeys(news)
        return News(tuple(key for key in stored if key in self._held), tuple(key for key in dropped if key not in self._held))

    def _scanned(self, at_once: int) -> Iterable[list[bytes]]:
        """Keys of pages that are there; one that comes or goes meanwhile may be among them."""
        cursor = 0
        while True:
            answer: Any = self._redis.scan(cursor, match=self._page_prefix + b"*", count=at_once)
            cursor, names = answer
            if found := [name[len(self._page_prefix) :] for name in names if len(name) == len(self._page_prefix) + KEY_BYTES]:
                yield found
            if cursor == 0:
                return

    def _hold(self, keys: Iterable[bytes]) -> tuple[bytes, ...]:
        """Returns those that are forgotten for them."""
        for key in keys:
            self._held.pop(key, None)
            self._held[key] = None
        oldest = [key for key, _ in zip(self._held, range(len(self._held) - MOST_KEYS), strict=False)]
        self._forget(oldest)
        return tuple(oldest)

    def _forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._held.pop(key, None)

    def _failed(self, what: str, error: Exception) -> None:
        self._last_news = None
        seconds = self._pause.failed()
        logger.warning(what, extra=fields(error=str(error), pause_seconds=seconds))


def _checksum(key: bytes, page: memoryview | bytes) -> bytes:
    return xxhash.xxh3_128_digest(key + xxhash.xxh3_128_digest(page))


def _is_whole(key: bytes, value: bytes) -> bool:
    return value[:CHECKSUM_BYTES] == _checksum(key, memoryview(value)[CHECKSUM_BYTES:])


def _keys_in(joined: bytes) -> list[bytes]:
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined) - len(joined) % KEY_BYTES, KEY_BYTES)]


def _text(of: Any) -> str:
    return of.decode() if isinstance(of, bytes) else str(of)
