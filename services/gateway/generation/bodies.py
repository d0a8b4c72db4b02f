"""Request bodies and their memory budget. A body reserves memory before its first byte is read, until its request is dispatched.

Small bodies have a separate pool, so that a chat never waits behind a large body. A body waits unread in a queue until memory is
free; TCP flow control then stops its client. After `wait_s`, or if too many bodies wait, the request gets a 503.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Awaitable, Callable

from rootstock_llm.services.gateway.generation.errors import CLIENT_CLOSED, ApiError, unavailable
from rootstock_llm.services.gateway.observe.metrics import GatewayMetrics
from rootstock_llm.services.shared.limits import (
    JSON_VALUE_BYTES,
    MAX_JSON_VALUES,
    MAX_WAITING_BODIES,
    SMALL_BODY_BYTES,
    SMALL_BODY_POOL_BYTES,
)
from rootstock_llm.services.shared.memory import trim_heap

TRIM_BYTES = 1 << 20  # size of a body from which on its memory is trimmed; smaller memory is reused for the next body
TRIM_S = 1.0  # seconds from the end of a large body to the trim, which then serves several bodies
QUIET_S = 15.0  # seconds without a large body, after which all objects are collected
YOUNG, OLDEST = 1, 2  # generations of the garbage collector

Gone = Callable[[], Awaitable[object]]  # returns when the client has closed its connection
Hold = Callable[[int], Awaitable[None]]  # RequestBody.grow_by


class Stuck(Exception):
    """Raised if every body that holds bytes of the pool waits for more, so the wait would never end."""


class BodyReservation:
    """A position in the queue of a pool."""

    __slots__ = ("holds", "room", "size")

    def __init__(self, size: int, holds: int) -> None:
        self.size = size  # bytes that the body waits for
        self.holds = holds  # bytes of the pool that the body has
        self.room: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done when the bytes are taken


class BodyPool:
    """A number of bytes that bodies reserve and release. Waiting bodies are served in the order of their arrival.

    A body that has bytes and needs more precedes bodies without bytes, because only a complete body releases its bytes.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity  # bytes
        self.held = 0  # bytes that bodies have reserved
        self._begun: deque[BodyReservation] = deque()  # waiting bodies that have bytes
        self._new: deque[BodyReservation] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._begun) + len(self._new)

    def take(self, size: int, holds: int = 0) -> bool:
        """Reserves the bytes if they are free and no body precedes this one. Returns whether they are reserved."""
        before = len(self._begun) if holds else self.num_waiting
        if before or self.held + size > self.capacity:
            return False
        self.held += size
        return True

    def join(self, size: int, holds: int = 0) -> BodyReservation:
        """Joins the end of the queue. `holds` is the number of bytes that the body already has. Raises Stuck."""
        if holds and self.held == holds + sum(place.holds for place in self._begun):
            raise Stuck
        place = BodyReservation(size, holds)
        (self._begun if holds else self._new).append(place)
        return place

    def leave(self, place: BodyReservation) -> None:
        """Leaves the queue, and releases the bytes if they were reserved."""
        if place.room.done():
            self.give(place.size)
            return
        place.room.cancel()
        (self._begun if place.holds else self._new).remove(place)
        self._admit()  # the next bodies may fit

    def give(self, size: int) -> None:
        self.held -= size
        self._admit()

    def _admit(self) -> None:
        for line in (self._begun, self._new):
            while line and self.held + line[0].size <= self.capacity:
                place = line.popleft()
                self.held += place.size
                place.room.set_result(None)
            if line:
                return


class ClientGone(Exception):
    """Raised if the client has closed its connection. No response is sent."""


class BodyBudget:
    """The pools of small and large bodies. Each process has one budget."""

    def __init__(self, capacity: int, wait_s: float, retry_after_s: int, metrics: GatewayMetrics) -> None:
        """Makes empty pools.

        Args:
            capacity: Bytes of the pool of large bodies.
            wait_s: Longest wait of a body for memory, in seconds.
            retry_after_s: Retry-After of the 503, in seconds.
        """
        self.capacity = capacity
        self._small = BodyPool(SMALL_BODY_POOL_BYTES)
        self._large = BodyPool(capacity)
        self._wait_s = wait_s
        self._retry_after_s = retry_after_s
        self._refused = metrics.bodies_refused
        self._trimmer = MemoryTrimmer()
        metrics.watch_bodies("small", lambda: self._small.held, lambda: self._small.num_waiting)
        metrics.watch_bodies("large", lambda: self._large.held, lambda: self._large.num_waiting)

    def open(self, gone: Gone) -> RequestBody:
        """Returns a body without reserved bytes."""
        return RequestBody(self, gone)

    def pool_of(self, size: int) -> BodyPool:
        return self._small if size <= SMALL_BODY_BYTES else self._large

    async def take(self, pool: BodyPool, size: int, holds: int, gone: Gone) -> None:
        """Reserves `size` more bytes of the pool, waiting if necessary. Raises ApiError (503) or ClientGone."""
        if pool.take(size, holds):
            return
        if pool.num_waiting >= MAX_WAITING_BODIES:
            raise self._no_room()
        try:
            place = pool.join(size, holds)
        except Stuck:
            raise self._no_room() from None
        left = asyncio.ensure_future(gone())
        try:
            await asyncio.wait((place.room, left), timeout=self._wait_s, return_when=asyncio.FIRST_COMPLETED)
            if left.done():
                raise ClientGone
            if not place.room.done():
                raise self._no_room()
        except BaseException:
            pool.leave(place)
            raise
        finally:
            left.cancel()

    def give(self, pool: BodyPool, size: int, peak: int) -> None:
        """Releases bytes of a pool. `peak` is the largest size that their body had."""
        pool.give(size)
        if peak >= TRIM_BYTES:
            self._trimmer.soon()

    def _no_room(self) -> ApiError:
        self._refused.inc()
        message = "The body budget of this server is full. Retry later."
        return unavailable(message, self._retry_after_s, "body_budget")


class RequestBody:
    """The body of one request: its reserved bytes of the budget, and its content until the content is parsed.

    The request closes it; a second close has no effect.
    """

    __slots__ = ("_budget", "_content", "_gone", "_pool", "size")

    def __init__(self, budget: BodyBudget, gone: Gone) -> None:
        self._budget = budget
        self._content: bytes | bytearray | None = None
        self._gone = gone
        self._pool = budget.pool_of(0)
        self.size = 0  # reserved bytes of the budget

    @property
    def most(self) -> int:
        """Largest number of bytes that the body may reserve."""
        return self._budget.capacity

    async def grow_to(self, size: int) -> None:
        """Grows the reservation to at least `size` bytes, if necessary in the large pool. Raises ApiError, ClientGone."""
        if size <= self.size:
            return
        budget, pool = self._budget, self._budget.pool_of(size)
        if pool is self._pool:
            await budget.take(pool, size - self.size, self.size, self._gone)
            self.size = size
            return
        await budget.take(pool, size, 0, self._gone)
        self._pool.give(self.size)
        self._pool, self.size = pool, size

    async def grow_by(self, size: int) -> None:
        """Grows for data that is fetched for the request. Raises ApiError."""
        try:
            await self.grow_to(min(self.size + size, self.most))
        except ClientGone:
            raise ApiError(CLIENT_CLOSED, "The client closed its connection.") from None

    async def hold(self, content: bytes, max_bytes: int) -> None:
        """Reserves the bytes of a content that is already in memory, and receives it. Raises ApiError, ClientGone."""
        if len(content) > max_bytes:
            raise body_too_large(max_bytes)
        await self.grow_to(len(content))
        await self.receive(content)

    async def receive(self, content: bytes | bytearray) -> None:
        """Receives the content, the bytes of which are reserved. For a large body, also reserves memory for its parsed values.

        Raises:
            ApiError: The content has too many values (413), or the budget has no space for them (503).
            ClientGone: The client has closed its connection.
        """
        if self.size > SMALL_BODY_BYTES:  # the values of a small body need little memory
            values = 1 + content.count(b",") + content.count(b"[") + content.count(b"{")  # upper bound, without parsing
            if values > MAX_JSON_VALUES:
                message = f"The request's body has more than {MAX_JSON_VALUES} values, counted as commas and opening brackets."
                raise ApiError(413, message, code="request_too_large")
            await self.grow_to(min(values * JSON_VALUE_BYTES, self.most))
        self._content = content

    def take(self) -> bytes | bytearray:
        """Returns the content and drops the reference to it, so that up to 64 MiB are freed after parsing. Called once."""
        content, self._content = self._content, None
        assert content is not None, "take() is called once, after the content was received"
        return content

    def close(self) -> None:
        """Drops the content and releases the bytes."""
        self._content = None
        size, self.size = self.size, 0
        if size:
            self._budget.give(self._pool, size, size)


def body_too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The request's body is larger than {max_bytes} bytes.", code="request_too_large")


class MemoryTrimmer:
    """Returns freed memory to the system, because glibc keeps the pages of large bodies.

    A refused request and its body are in a reference cycle with the traceback. So the trimmer runs the garbage collector: for
    young objects TRIM_S after a large body, and for all objects after QUIET_S without one.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._last: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        loop = asyncio.get_running_loop()
        if self._last is not None:
            self._last.cancel()
        self._last = loop.call_later(QUIET_S, self._return, OLDEST)
        if self._timer is None:
            self._timer = loop.call_later(TRIM_S, self._now)

    def _now(self) -> None:
        self._timer = None
        self._return(YOUNG)

    def _return(self, generation: int) -> None:
        gc.collect(generation)
        trim_heap()
