"""A storage tier that several workers share: pages of KV by key in Redis or Valkey. A PageStore; single owner, one thread.

    pages:2:IDENTITY:p:KEY   string   checksum 16 | written 8, in ms | page; goes when nobody has written or read it for so long
    pages:2:IDENTITY:news    stream   {k: keys that were written, one behind another}, {d: that were deleted}, {h: ""}: one came

2 is the version of keys and values, IDENTITY of layout and secret: whoever has another one has nothing to do with these pages.
KEY is a keyed digest behind a tag of its salt, so that neither names nor values tell tokens. Which keys there are every worker
knows from one look at all of them and from the news behind it; what it does not know of it computes, and what is not there any
more a read finds out. The server decides what goes when it is full. While it does not answer it is left in peace for a while,
and afterwards all is looked at again. A quota is kept by who writes, by the keys that he knows: what several write within a
second may pass it until one of them writes again.
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

from services.shared.index.redis_client import FollowedSyncConnection, follow_files
from services.shared.observe.log_fields import fields
from services.worker.core.contracts.transfers import ALL, Deleted, Selection, StorageUse
from services.worker.core.tiers.page_keys import KEY_BYTES, UNSALTED, tag_of
from services.worker.exec.contracts.page_store import News, StoreCounts, Written
from services.worker.exec.tiers.known_keys import KnownKeys
from services.worker.exec.tiers.write_pause import WritePause

logger = logging.getLogger(__name__)
VERSION = 2  # of keys and values; 1 had keys without a tag, and no time in values
CHECKSUM_BYTES = 16
WRITTEN_BYTES = 8
HEAD_BYTES = CHECKSUM_BYTES + WRITTEN_BYTES  # of a value, in front of the page
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


@dataclass(frozen=True, slots=True)
class _Due:
    """A deletion that is not done. before_ms: of what was written until then; None: of all."""

    tag: bytes | None
    before_ms: int | None

    def takes(self, key: bytes, written_ms: int) -> bool:
        return self.tag in (None, tag_of(key)) and (self.before_ms is None or written_ms <= self.before_ms)


class RedisPageStore:
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
        """Connects when it is first called for, and whenever that is lost. ttl_s: after which a page goes that nobody has written
        or read. identity: see above. salt_bytes: the quota, 0 for none. wall: seconds since 1970, for ages. Raises ValueError for
        a URL that is none, and for a quota without room for a page."""
        self.page_bytes = page_bytes
        self._value_bytes = HEAD_BYTES + page_bytes
        if 0 < salt_bytes < self._value_bytes:
            raise ValueError(f"a quota of {salt_bytes} bytes has no room for a page of {self._value_bytes}")
        self._salt_pages = salt_bytes // self._value_bytes
        self._redis = page_client(url)
        self._clock, self._wall = clock, wall
        self._ttl_ms = ttl_s * 1000
        prefix = f"pages:{VERSION}:{identity[:_IDENTITY_BYTES].hex()}:"
        self._page_prefix, self._news_key = f"{prefix}p:".encode(), f"{prefix}news"
        self._known = KnownKeys(MOST_KEYS)
        self._lost: dict[bytes, None] = {}
        self._untold: dict[bytes, bool] = {}  # whether it is held now, of keys of which nobody here has been told
        self._pause, self._write_pause = WritePause(clock), WritePause(clock)  # while it does not answer; while it is full
        self._last_news: str | None = None  # None: everything has to be looked at
        self._due: list[_Due] = []
        self._corrupt_pages = self._failed_reads = self._failed_writes = 0
        self._over_quota_pages = self._deleted_pages = 0

    def keys(self) -> Sequence[bytes]:
        return list(self._known)

    def read(self, keys: Sequence[bytes], out: memoryview) -> int:
        assert out.nbytes == len(keys) * self.page_bytes, "a page's room for every key"
        wanted, room, count = list(takewhile(self._known.__contains__, keys)), out.cast("B"), 0
        if wanted and self._pause.over and not self._due:
            try:
                count = self._read(wanted, room)
                self._pause.worked()
            except _FAILED as error:
                self._failed_reads += len(wanted)
                self._failed("pages were not read", error)
        if count < len(keys):
            self._known.drop(keys[count])  # whoever has asked takes it to be gone: it is told anew, if it is not
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
                if value is None or len(value) != self._value_bytes or not _is_whole(key, value):
                    self._corrupt_pages += value is not None
                    self._lost[key] = None
                    return count
                room[count * self.page_bytes : (count + 1) * self.page_bytes] = memoryview(value)[HEAD_BYTES:]
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
        if refusal is not None:  # it is full and nothing may go, say
            self._failed_writes += 1
            if isinstance(refusal, redis.ReadOnlyError):
                self._leave_server()
            seconds = self._write_pause.failed()
            logger.warning("pages were not written", extra=fields(error=str(refusal), pause_seconds=seconds))
        else:
            self._write_pause.worked()

    def _write(self, fresh: Mapping[bytes, memoryview], stored: list[bytes], dropped: list[bytes]) -> Exception | None:
        """stored: grows by what has been; dropped: by what is not known to be held any more. Returns why it is not all, where the
        server has refused it. Raises as _read()."""
        until = self._clock() + CALL_S
        for tag, run in groupby(fresh, key=tag_of):
            keys = list(run)
            if self._salt_pages and tag != UNSALTED:
                keys = keys[: self._salt_pages]  # of what is behind these nothing could be read without what is in front
                self._make_room(tag, len(keys), dropped)
            for group in self._groups(keys):
                refusal = self._write_group(group, fresh, stored, dropped)
                if refusal is not None:
                    return refusal
                self._check_time(until)
        return None

    def _write_group(
        self, keys: Sequence[bytes], fresh: Mapping[bytes, memoryview], stored: list[bytes], dropped: list[bytes]
    ) -> Exception | None:
        """As _write()."""
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
            refusal = self._tell("k", held) or refusal
        return refusal

    def _make_room(self, tag: bytes, count: int, dropped: list[bytes]) -> None:
        """Takes the oldest pages of a salt away that would be beyond its quota with so many more. Raises as _read()."""
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
        """When pages of a salt were written that others wrote. Returns keys of those that have gone by themselves."""
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
        """When they were written, in ms; None: they are not there, or are no pages."""
        with self._redis.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.getrange(self._page_prefix + key, CHECKSUM_BYTES, HEAD_BYTES - 1)
            found: list[bytes] = pipeline.execute()
        return [int.from_bytes(each, "little") if len(each) == WRITTEN_BYTES else None for each in found]

    def _unlink(self, keys: Sequence[bytes]) -> int:
        """Deletes them, and tells the others. Returns how many were there. Raises as _read()."""
        count = 0
        for at in range(0, len(keys), DELETED):
            some = keys[at : at + DELETED]
            for key in some:
                self._known.drop(key)
            found: Any = self._redis.unlink(*(self._page_prefix + key for key in some))
            count += found
            self._tell("d", some)
        return count

    def _tell(self, what: str, keys: Sequence[bytes]) -> Exception | None:
        """The others. Returns why they will not hear of it: they find it when they look at everything, or by reading."""
        try:
            self._redis.xadd(self._news_key, {what: b"".join(keys)}, maxlen=MOST_NEWS, approximate=True)
        except redis.ResponseError as error:
            return error
        return None

    def _groups(self, keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
        """So many that one answer, or one command, is not larger than that, but for a page that is."""
        at_once = max(1, GROUP_BYTES // self.page_bytes)
        return (keys[at : at + at_once] for at in range(0, len(keys), at_once))

    def _check_time(self, until: float) -> None:
        """Each part may be within its time, and all of them be late."""
        if self._clock() > until:
            raise TimeoutError(f"{CALL_S} s were not enough")

    def news(self) -> News:
        """What others have written and deleted since the last call; of much, a part of it at a time. Deletions that are due are
        tried again."""
        if self._pause.over:
            try:
                self._delete_due()
                self._look()
                self._pause.worked()
            except _FAILED as error:
                self._failed("the storage does not answer" if not self._due else "pages are still to be deleted", error)
        told = dict(islice(self._untold.items(), TOLD_AT_ONCE))
        for key in told:
            del self._untold[key]
        stored = tuple(key for key, is_held in told.items() if is_held)
        return News(stored, tuple(key for key, is_held in told.items() if not is_held), bool(self._untold))

    def delete(self, which: Selection = ALL) -> Deleted:
        """While the server does not answer it is due, and nothing is read or written meanwhile."""
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
            self._failed("pages are still to be deleted", error)
            pending = f"the storage does not answer: {error}"
        return Deleted(self._deleted_pages - before, tuple(dict.fromkeys(dropped)), pending)

    def _forget(self, which: Selection) -> list[bytes]:
        """Keys that are meant, whatever becomes of the server; those of an age are not known."""
        if which.older_than_s is not None:
            return []
        dropped = [key for key in self._known if which.tag in (None, tag_of(key))]
        for key in dropped:
            self._known.drop(key)
            self._untold.pop(key, None)
        return dropped

    def _delete_due(self) -> list[bytes]:
        """All in one look at everything. Returns keys that were held here. Raises what a server may do."""
        if not self._due:
            return []
        due, dropped = list(self._due), list[bytes]()
        for some in self._scanned(SCANNED):
            meant = self._meant(some, due)
            dropped += [key for key in meant if key in self._known]
            self._untold |= {key: False for key in meant if key in self._known}
            self._deleted_pages += self._unlink(meant)
        self._due.clear()
        return dropped

    def _meant(self, keys: Sequence[bytes], due: Sequence[_Due]) -> list[bytes]:
        """Raises what a server may do."""
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
            self._change([], [key for key in _keys_in(entry.get(b"d", b"")) if key in self._known])
            self._change([key for key in _keys_in(entry.get(b"k", b"")) if key not in self._known], [])

    def _look_at_all(self) -> None:
        """The news that come meanwhile are read again behind it."""
        last, found = self._begun(), dict[bytes, None]()
        for some in self._scanned(SCANNED):
            found |= dict.fromkeys(some)
        self._change([key for key in found if key not in self._known], [key for key in self._known if key not in found])
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
            self._known.drop(key)
            self._untold[key] = False
        self._untold |= dict.fromkeys(stored, True)
        self._untold |= dict.fromkeys(self._known.add(stored, None), False)

    def _leave_server(self) -> None:
        """The next command connects anew: the address may stand for another one by now, where this is no primary any more."""
        self._redis.connection_pool.disconnect(inuse_connections=False)

    def _failed(self, what: str, error: Exception) -> None:
        self._last_news = None
        self._leave_server()
        seconds = self._pause.failed()
        logger.warning(what, extra=fields(error=str(error), pause_seconds=seconds))


def page_client(url: str) -> redis.Redis:
    """Connects with its first command. Raises ValueError if the URL is none, or asks for what is not to be asked for in one."""
    client = redis.Redis.from_url(
        url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=Retry(NoBackoff(), 0), protocol=2
    )
    follow_files(client.connection_pool, url, FollowedSyncConnection)
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
