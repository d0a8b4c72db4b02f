"""Request bodies and their memory budget.

A body with a Content-Length reserves its memory before its first byte is read; any other body reserves memory as it arrives.
The memory is released when the request is dispatched or ends. While no memory is free, the body waits in a queue, and TCP flow
control stops its client. The request gets a 503 after body_wait_s, or if too many bodies wait.

Bodies of at most SMALL_BODY_BYTES have a separate pool, so that they never wait for larger bodies.
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

# Size of the smallest body whose memory is returned to the system. The next body reuses the memory of smaller bodies.
TRIM_BYTES = 1 << 20
TRIM_S = 1.0  # seconds from the release of a body of TRIM_BYTES to the trim, so that one trim serves several bodies
QUIET_S = 15.0  # seconds after the last body of TRIM_BYTES until the garbage collector scans all objects
YOUNG, OLDEST = 1, 2  # generations of objects, as arguments of gc.collect()

Gone = Callable[[], Awaitable[object]]  # returns when the client has closed its connection
Hold = Callable[[int], Awaitable[None]]  # reserves this number of bytes in the body budget; see RequestBody.grow_by()


class Stuck(Exception):
    """Raised if all reserved bytes of the pool belong to waiting bodies. No body could then complete and release its bytes."""


class BodyReservation:
    """An entry in a pool's queue: the bytes that a waiting body needs."""

    __slots__ = ("granted", "owned", "size")

    def __init__(self, size: int, owned: int) -> None:
        self.size = size  # bytes that the body waits for
        self.owned = owned  # bytes of the pool that the body has already reserved
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done when the bytes are reserved


class BodyPool:
    """A number of bytes that bodies reserve and release. Waiting bodies get bytes in the order of their arrival.

    A body that owns bytes and needs more comes before bodies without bytes, because only a complete body releases its bytes.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity  # size of the pool in bytes
        self.reserved = 0  # bytes that bodies have reserved
        self._growing: deque[BodyReservation] = deque()  # waiting bodies that own bytes
        self._new: deque[BodyReservation] = deque()  # waiting bodies without bytes

    @property
    def num_waiting(self) -> int:
        return len(self._growing) + len(self._new)

    def try_reserve(self, size: int, owned: int = 0) -> bool:
        """Reserves bytes if they are free and no waiting body comes before this one.

        Args:
            owned: Bytes of the pool that the body has already reserved.

        Returns:
            Whether the bytes are reserved. If not, the caller calls enqueue().
        """
        before = len(self._growing) if owned else self.num_waiting
        if before or self.reserved + size > self.capacity:
            return False
        self.reserved += size
        return True

    def enqueue(self, size: int, owned: int = 0) -> BodyReservation:
        """Adds a reservation to the end of the queue. `owned` is the number of bytes that the body already has. Raises Stuck."""
        if owned and self.reserved == owned + sum(reservation.owned for reservation in self._growing):
            raise Stuck
        reservation = BodyReservation(size, owned)
        (self._growing if owned else self._new).append(reservation)
        return reservation

    def cancel(self, reservation: BodyReservation) -> None:
        """Removes a reservation from the queue, or releases its bytes if they were granted."""
        if reservation.granted.done():
            self.release(reservation.size)
            return
        reservation.granted.cancel()
        (self._growing if reservation.owned else self._new).remove(reservation)
        self._admit()  # the next bodies may fit

    def release(self, size: int) -> None:
        self.reserved -= size
        self._admit()

    def _admit(self) -> None:
        for queue in (self._growing, self._new):
            while queue and self.reserved + queue[0].size <= self.capacity:
                reservation = queue.popleft()
                self.reserved += reservation.size
                reservation.granted.set_result(None)
            if queue:
                return


class ClientGone(Exception):
    """The client has closed its connection. No response is sent."""


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
        metrics.watch_bodies("small", lambda: self._small.reserved, lambda: self._small.num_waiting)
        metrics.watch_bodies("large", lambda: self._large.reserved, lambda: self._large.num_waiting)

    def open(self, gone: Gone) -> RequestBody:
        """Returns a body without reserved bytes."""
        return RequestBody(self, gone)

    def pool_of(self, size: int) -> BodyPool:
        return self._small if size <= SMALL_BODY_BYTES else self._large

    async def reserve(self, pool: BodyPool, size: int, owned: int, gone: Gone) -> None:
        """Reserves bytes of a pool for a body, and waits for them if necessary.

        Args:
            size: Number of additional bytes.
            owned: Bytes of the pool that the body has already reserved.
            gone: Returns when the client has closed its connection.

        Raises:
            ApiError: Status 503. The bytes were not free within body_wait_s, or too many bodies wait.
            ClientGone: The client has closed its connection.
        """
        if pool.try_reserve(size, owned):
            return
        if pool.num_waiting >= MAX_WAITING_BODIES:
            raise self._budget_full_error()
        try:
            reservation = pool.enqueue(size, owned)
        except Stuck:
            raise self._budget_full_error() from None
        left = asyncio.ensure_future(gone())
        try:
            await asyncio.wait((reservation.granted, left), timeout=self._wait_s, return_when=asyncio.FIRST_COMPLETED)
            if left.done():
                raise ClientGone
            if not reservation.granted.done():
                raise self._budget_full_error()
        except BaseException:
            pool.cancel(reservation)
            raise
        finally:
            left.cancel()

    def release(self, pool: BodyPool, size: int, peak: int) -> None:
        """Releases the bytes of a body.

        Args:
            peak: Largest number of bytes that the body had reserved. From TRIM_BYTES on, freed memory is returned to the system.
        """
        pool.release(size)
        if peak >= TRIM_BYTES:
            self._trimmer.soon()

    def _budget_full_error(self) -> ApiError:
        self._refused.inc()
        message = "The body budget of this server is full. Retry later."
        return unavailable(message, self._retry_after_s, "body_budget")


class RequestBody:
    """The body of one request: its reserved bytes of the budget, and its content until the content is parsed.

    The request calls close(), which is idempotent.
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
        """Grows the reservation to at least `size` bytes. Raises ApiError, ClientGone.

        A reservation above SMALL_BODY_BYTES moves to the large pool.
        """
        if size <= self.size:
            return
        budget, pool = self._budget, self._budget.pool_of(size)
        if pool is self._pool:
            await budget.reserve(pool, size - self.size, self.size, self._gone)
            self.size = size
            return
        await budget.reserve(pool, size, 0, self._gone)
        self._pool.release(self.size)
        self._pool, self.size = pool, size

    async def grow_by(self, size: int) -> None:
        """Reserves `size` more bytes, but at most `most` in all, for data that is fetched for the request. Raises ApiError."""
        try:
            await self.grow_to(min(self.size + size, self.most))
        except ClientGone:
            raise ApiError(CLIENT_CLOSED, "The client closed its connection.") from None

    async def reserve_and_receive(self, content: bytes, max_bytes: int) -> None:
        """Reserves the bytes of a content that is already in memory, and stores the content. Raises ApiError, ClientGone."""
        if len(content) > max_bytes:
            raise body_too_large(max_bytes)
        await self.grow_to(len(content))
        await self.receive(content)

    async def receive(self, content: bytes | bytearray) -> None:
        """Stores the content, whose bytes are reserved. Above SMALL_BODY_BYTES, also reserves memory for its parsed values.

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
        """Returns the content and drops the reference to it, so that the parser can release up to 64 MiB early. Call it once."""
        content, self._content = self._content, None
        assert content is not None, "take() is called once, after the content was received"
        return content

    def close(self) -> None:
        """Drops the content and releases the reserved bytes. Idempotent."""
        self._content = None
        size, self.size = self.size, 0
        if size:
            self._budget.release(self._pool, size, size)


def body_too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The request's body is larger than {max_bytes} bytes.", code="request_too_large")


class MemoryTrimmer:
    """Returns the freed memory of bodies of at least TRIM_BYTES to the system, which glibc does not do by itself.

    First, it runs the garbage collector, because a refused request, its body and the traceback of its error are in a reference
    cycle. The collector scans young objects TRIM_S after such a body, and all objects QUIET_S after the last one.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None  # next trim after TRIM_S
        self._last: asyncio.TimerHandle | None = None  # next trim after QUIET_S

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
