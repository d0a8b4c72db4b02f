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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any

import redis
import xxhash
from redis.backoff import NoBackoff
from redis.retry import Retry

from services.shared.index.redis_client import FollowedSyncConnection, follow_files
from services.shared.observe.log import fields
from services.worker.core.tiers.page_keys import KEY_BYTES
from services.worker.exec.contracts.page_store import News, StoreCounts, Written
from services.worker.exec.tiers.write_pause import WritePause

logger = logging.getLogger(__name__)
CHECKSUM_BYTES = 16
TIMEOUT_S = 1.0  # in which something of an answer comes; of connecting
CALL_S = 10.0  # of a read or write as a whole
GROUP_BYTES = 1 << 20  # of pages in one command or answer
MOST_KEYS = 1 << 20  # that are known here; the oldest are forgotten, not deleted
SCANNED = 2048  # keys of one look
NEWS_READ = 256  # entries, each with the keys of one write
TOLD_AT_ONCE = 8192  # keys: the loop takes them in between two steps
MOST_NEWS = 4096  # entries of the stream: who was away for longer looks at everything
DELETED = 512  # keys of one command
_IDENTITY_BYTES = 16
_FAILED = (redis.RedisError, OSError)


class RedisPageStore:
    shared = True

    def __init__(
        self, url: str, page_bytes: int, ttl_s: int, identity: bytes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Connects when it is first called for, and whenever that is lost. ttl_s: after which a page goes that nobody has written
        or read. identity: see above. Raises ValueError for a URL that is none."""
        self.page_bytes = page_bytes
        self._redis = page_client(url)
        self._clock = clock
        self._ttl_ms = ttl_s * 1000
        prefix = f"pages:{identity[:_IDENTITY_BYTES].hex()}:"
        self._page_prefix, self._news_key = f"{prefix}p:".encode(), f"{prefix}news"
        self._held: dict[bytes, None] = {}
        self._lost: dict[bytes, None] = {}
        self._untold: dict[bytes, bool] = {}  # whether it is held now, of keys of which nobody here has been told
        self._pause, self._write_pause = WritePause(clock), WritePause(clock)  # while it does not answer; while it is full
        self._last_news: str | None = None  # None: everything has to be looked at
        self._clear_due = False
        self._corrupt_pages = self._failed_reads = self._failed_writes = 0

    def keys(self) -> Sequence[bytes]:
        return list(self._held)

    def read(self, keys: Sequence[bytes], out: memoryview) -> int:
        assert out.nbytes == len(keys) * self.page_bytes, "a page's room for every key"
        wanted, room, count = list(takewhile(self._held.__contains__, keys)), out.cast("B"), 0
        if wanted and self._pause.over and not self._clear_due:
            try:
                count = self._read(wanted, room)
                self._pause.worked()
            except _FAILED as error:
                self._failed_reads += len(wanted)
                self._failed("pages were not read", error)
        if count < len(keys):
            self._held.pop(keys[count], None)  # whoever has asked takes it to be gone: it is told anew, if it is not
        return count

    def _read(self, wanted: Sequence[bytes], room: memoryview) -> int:
        """Raises what a server may do, and TimeoutError where all of it takes too long."""
        count, until = 0, self._clock() + CALL_S
        for keys in self._groups(wanted):
            with self._redis.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.getex(self._page_prefix + key, px=self._ttl_ms)
                values: list[bytes | None] = pipeline.execute()
            for key, value in zip(keys, values, strict=True):
                if value is None or len(value) != CHECKSUM_BYTES + self.page_bytes or not _is_whole(key, value):
                    self._corrupt_pages += value is not None
                    self._lost[key] = None
                    return count
                room[count * self.page_bytes : (count + 1) * self.page_bytes] = memoryview(value)[CHECKSUM_BYTES:]
                count += 1
            self._check_time(until)
        return count

    def take_lost(self) -> tuple[bytes, ...]:
        lost = tuple(self._lost)
        self._lost.clear()
        return lost

    def write(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> Written:
        assert all(page.nbytes == self.page_bytes for page in pages), "every page has the same size"
        fresh = {key: page for key, page in zip(keys, pages, strict=True) if key not in self._held}
        if not fresh or self._clear_due or not (self._pause.over and self._write_pause.over):
            return Written((), ())
        stored: list[bytes] = []
        try:
            refusal = self._write(fresh, stored)
            self._pause.worked()
        except _FAILED as error:
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

    def _write(self, fresh: Mapping[bytes, memoryview], stored: list[bytes]) -> Exception | None:
        """stored: grows by what has been. Returns why it is not all, where the server has refused it. Raises as _read()."""
        until = self._clock() + CALL_S
        refusal: Exception | None = None
        for keys in self._groups(list(fresh)):
            with self._redis.pipeline(transaction=False) as pipeline:
                for key in keys:
                    value = b"".join((_checksum(key, fresh[key]), fresh[key].cast("B")))
                    pipeline.set(self._page_prefix + key, value, px=self._ttl_ms)
                results = pipeline.execute(raise_on_error=False)
            stored += [key for key, result in zip(keys, results, strict=True) if result is True]
            refusal = next((result for result in results if isinstance(result, Exception)), None)
            if refusal is not None:
                break
            self._check_time(until)
        if stored:
            try:
                self._redis.xadd(self._news_key, {"k": b"".join(stored)}, maxlen=MOST_NEWS, approximate=True)
            except redis.ResponseError as error:  # others find them when they look at everything
                return error
        return refusal

    def _groups(self, keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
        """So many that one answer, or one command, is not larger than that, but for a page that is."""
        at_once = max(1, GROUP_BYTES // self.page_bytes)
        return (keys[at : at + at_once] for at in range(0, len(keys), at_once))

    def _check_time(self, until: float) -> None:
        """Each part may be within its time, and all of them be late."""
        if self._clock() > until:
            raise TimeoutError(f"{CALL_S} s were not enough")

    def news(self) -> News:
        """What others have written and deleted since the last call; of much, a part of it at a time."""
        if self._pause.over:
            if self._clear_due:
                self.clear()
            try:
                if not self._clear_due:
                    self._look()
                    self._pause.worked()
            except _FAILED as error:
                self._failed("the storage does not answer", error)
        told = dict(islice(self._untold.items(), TOLD_AT_ONCE))
        for key in told:
            del self._untold[key]
        stored = tuple(key for key, is_held in told.items() if is_held)
        return News(stored, tuple(key for key, is_held in told.items() if not is_held), bool(self._untold))

    def clear(self) -> None:
        """While the server does not answer it is due, and nothing is read or written meanwhile."""
        self._clear_due = True
        self._held.clear()
        self._untold.clear()
        try:
            for some in self._scanned(DELETED):
                self._redis.unlink(*(self._page_prefix + key for key in some))
            self._redis.xadd(self._news_key, {"c": ""}, maxlen=MOST_NEWS, approximate=True)
            self._clear_due = False
        except _FAILED as error:
            self._failed_writes += 1
            self._failed("pages are still to be deleted", error)

    def counts(self) -> StoreCounts:
        size = len(self._held) * (CHECKSUM_BYTES + self.page_bytes)
        return StoreCounts(self._corrupt_pages, self._failed_reads, self._failed_writes, size, len(self._held))

    def close(self) -> None:
        self._redis.close()

    def _look(self) -> None:
        """Raises what a server may do."""
        if self._last_news is None:
            self._look_at_all()
            return
        answer: Any = self._redis.xrange(self._news_key, min=self._last_news, count=NEWS_READ)
        entries: list[tuple[bytes, Mapping[bytes, bytes]]] = answer
        if not entries or _text(entries[0][0]) != self._last_news:  # what was seen last is gone, and perhaps more behind it
            self._look_at_all()
            return
        for number, entry in entries[1:]:
            self._last_news = _text(number)
            if b"c" in entry:
                self._change((), tuple(self._held))
            else:
                self._change([key for key in _keys_in(entry.get(b"k", b"")) if key not in self._held], ())

    def _look_at_all(self) -> None:
        """The news that come meanwhile are read again behind it."""
        last, found = self._begun(), dict[bytes, None]()
        for some in self._scanned(SCANNED):
            found |= dict.fromkeys(some)
        self._change([key for key in found if key not in self._held], tuple(key for key in self._held if key not in found))
        self._last_news = last

    def _begun(self) -> str | None:
        """The entry of the news to go on behind: of its own, so that there is one; of a full server the last one, if any."""
        try:
            return _text(self._redis.xadd(self._news_key, {"h": ""}, maxlen=MOST_NEWS, approximate=True))
        except redis.ResponseError:
            answer: Any = self._redis.xrevrange(self._news_key, count=1)
            return _text(answer[0][0]) if answer else None

    def _scanned(self, at_once: int) -> Iterator[list[bytes]]:
        """Keys of pages that are there; one that comes or goes meanwhile may be among them."""
        cursor = 0
        while True:
            answer: Any = self._redis.scan(cursor, match=self._page_prefix + b"*", count=at_once)
            cursor, names = answer
            if found := [name[len(self._page_prefix) :] for name in names if len(name) == len(self._page_prefix) + KEY_BYTES]:
                yield found
            if cursor == 0:
                return

    def _change(self, stored: Sequence[bytes], dropped: Sequence[bytes]) -> None:
        """What others have done, to be told."""
        for key in dropped:
            self._held.pop(key, None)
            self._untold[key] = False
        self._untold |= dict.fromkeys(stored, True)
        self._untold |= dict.fromkeys(self._hold(stored), False)

    def _hold(self, keys: Iterable[bytes]) -> tuple[bytes, ...]:
        """Returns those that are forgotten for them."""
        for key in keys:
            self._held.pop(key, None)
            self._held[key] = None
        oldest = tuple(islice(self._held, max(0, len(self._held) - MOST_KEYS)))
        for key in oldest:
            del self._held[key]
        return oldest

    def _failed(self, what: str, error: Exception) -> None:
        self._last_news = None
        seconds = self._pause.failed()
        logger.warning(what, extra=fields(error=str(error), pause_seconds=seconds))


def page_client(url: str) -> redis.Redis:
    """Connects with its first command. Raises ValueError if the URL is none, or asks for what is not to be asked for in one."""
    client = redis.Redis.from_url(
        url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=Retry(NoBackoff(), 0), protocol=2
    )
    follow_files(client.connection_pool, url, FollowedSyncConnection)
    return client


def _checksum(key: bytes, page: memoryview | bytes) -> bytes:
    return xxhash.xxh3_128_digest(key + xxhash.xxh3_128_digest(page))


def _is_whole(key: bytes, value: bytes) -> bool:
    return value[:CHECKSUM_BYTES] == _checksum(key, memoryview(value)[CHECKSUM_BYTES:])


def _keys_in(joined: bytes) -> list[bytes]:
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined) - len(joined) % KEY_BYTES, KEY_BYTES)]


def _text(of: Any) -> str:
    return of.decode() if isinstance(of, bytes) else str(of)
