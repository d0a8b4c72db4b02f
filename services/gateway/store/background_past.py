"""Reads the stored output of a background response in pages: its events, output ids, texts and logprobs.

The output of one response may have 32 MiB, and a gateway that resumes the response needs each page once. Only the holder of the
lease appends output. The end of a response deletes everything except its events. The lengths of the lists are looked up first. If
items within these lengths are missing later, another gateway has ended the response, or the response was deleted. The reader then
raises LeaseLost.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.gateway.store import background_scripts as scripts
from rootstock_llm.services.gateway.store.lease import LeaseLost
from rootstock_llm.services.gateway.store.state_redis import StateRedis

PAGE_ITEMS, PAGE_BYTES = 128, 256 << 10  # largest number of items and of bytes of one page

T = TypeVar("T", bound=Sequence[object])
ID_BYTES = array("I").itemsize


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of the stored lists of one response at the time of a lookup."""

    events: int = 0
    ids: int = 0  # output ids
    texts: int = 0  # number of pieces with text
    rows: int = 0  # number of pieces with logprobs


class BackgroundPast:
    """The stored output of one response, up to the lengths of one lookup.

    Each method returns the page that begins with item `first`. A page has at most PAGE_ITEMS items and PAGE_BYTES bytes. An item
    larger than PAGE_BYTES is a page of its own. Pages of ids may exceed PAGE_ITEMS. A page that begins after the last item is
    empty.

    Raises:
        StoreAway: From every method, if the store cannot be reached.
        LeaseLost: From every method, if the items are gone.
    """

    def __init__(self, redis: StateRedis, keys: Sequence[str], lengths: Lengths) -> None:
        """Makes a reader.

        Args:
            keys: Redis keys of the events, ids, texts and logprobs, in this order.
        """
        self._redis = redis
        self._events, self._ids, self._texts, self._rows = keys
        self.lengths = lengths

    async def events(self, first: int) -> Sequence[bytes]:
        return await self._page(self._events, first, self.lengths.events)

    async def ids(self, first: int) -> Sequence[int]:
        last = min(first + PAGE_BYTES // ID_BYTES, self.lengths.ids)
        if first >= last:
            return ()
        script = "return redis.call('GETRANGE', KEYS[1], ARGV[1], ARGV[2])"
        found = await self._redis.read(script, [self._ids], first * ID_BYTES, last * ID_BYTES - 1)
        if len(found) < (last - first) * ID_BYTES:
            raise LeaseLost(self._ids)
        return array("I", found)

    async def texts(self, first: int) -> Sequence[str]:
        return [each.decode() for each in await self._page(self._texts, first, self.lengths.texts)]

    async def logprobs(self, first: int) -> Sequence[worker_pb2.LogprobRows]:
        """Returns a page of logprobs, one item per piece. Empty if the client has not requested logprobs."""
        return [worker_pb2.LogprobRows.FromString(each) for each in await self._page(self._rows, first, self.lengths.rows)]

    async def _page(self, key: str, first: int, count: int) -> Sequence[bytes]:
        if first >= count:
            return ()
        last = min(first + PAGE_ITEMS, count) - 1
        found: Sequence[bytes] = await self._redis.read(scripts.LIST_PAGE, [key], first, last, PAGE_BYTES)
        if not found:
            raise LeaseLost(key)
        return found


async def pages(page: Callable[[int], Awaitable[T]]) -> AsyncIterator[T]:
    """Yields all pages in order.

    Args:
        page: Returns the page that begins with the given item, as the methods of BackgroundPast do.
    """
    first = 0
    while found := await page(first):
        yield found
        first += len(found)
