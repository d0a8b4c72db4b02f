"""What has come of one response so far, in the store: read a page at a time, since all of it may have 32 MiB and whoever goes on
with it needs each page once.

Who has the lease adds to it, who ends the response takes all but its events away. So what is less than it was is somebody else's.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rootstock.v1 import worker_pb2
from services.gateway.state import background_scripts as scripts
from services.gateway.state.lease import LeaseLost
from services.gateway.state.state_redis import READS, StateRedis

PAGE_ITEMS, PAGE_BYTES = 128, 256 << 10

T = TypeVar("T", bound=Sequence[object])
ID_BYTES = array("I").itemsize


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of what there was when it was looked at. ids: output ids. texts, rows: pieces that had one."""

    events: int = 0
    ids: int = 0
    texts: int = 0
    rows: int = 0


class BackgroundPast:
    """keys: of its events, ids, texts and log probabilities. Each method gives a page from the item `first` on, of PAGE_ITEMS and
    PAGE_BYTES at most but for one item that is larger, and an empty one behind the last; it raises StoreAway, and LeaseLost where
    there is nothing any more."""

    def __init__(self, redis: StateRedis, keys: Sequence[str], lengths: Lengths) -> None:
        self._redis = redis
        self._events, self._ids, self._texts, self._rows = keys
        self.lengths = lengths

    async def events(self, first: int) -> Sequence[bytes]:
        return await self._page(self._events, first, self.lengths.events)

    async def ids(self, first: int) -> Sequence[int]:
        last = min(first + PAGE_BYTES // ID_BYTES, self.lengths.ids)
        if first >= last:
            return ()
        script = READS + "return redis.call('GETRANGE', KEYS[1], ARGV[1], ARGV[2])"
        found = await self._redis.call(script, [self._ids], first * ID_BYTES, last * ID_BYTES - 1)
        if len(found) < (last - first) * ID_BYTES:
            raise LeaseLost(self._ids)
        return array("I", found)

    async def texts(self, first: int) -> Sequence[str]:
        return [each.decode() for each in await self._page(self._texts, first, self.lengths.texts)]

    async def logprobs(self, first: int) -> Sequence[worker_pb2.LogprobRows]:
        """Of all ids, where they are wanted."""
        return [worker_pb2.LogprobRows.FromString(each) for each in await self._page(self._rows, first, self.lengths.rows)]

    async def _page(self, key: str, first: int, count: int) -> Sequence[bytes]:
        if first >= count:
            return ()
        last = min(first + PAGE_ITEMS, count) - 1
        found: Sequence[bytes] = await self._redis.call(READS + scripts.LIST_PAGE, [key], first, last, PAGE_BYTES)
        if not found:
            raise LeaseLost(key)
        return found


async def pages(page: Callable[[int], Awaitable[T]]) -> AsyncIterator[T]:
    """All that there are, one after the other."""
    first = 0
    while found := await page(first):
        yield found
        first += len(found)
