"""Streams the events of a background response: first the stored events, then each new event after a gateway has stored it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

from rootstock_llm.services.gateway.generation.errors import OPENAI
from rootstock_llm.services.gateway.store.background_record import Page
from rootstock_llm.services.gateway.store.background_store import BackgroundStore
from rootstock_llm.services.gateway.store.state_store import StoreAway

POLL_S, LONGEST_POLL_S = 0.15, 1.0  # seconds between two reads of the store: directly after an event, and at most
AWAY_S = 30.0  # seconds that a stream waits for an unreachable store

Write = Callable[[bytes], Awaitable[None]]  # sends events or a comment to a client
# Returns when the response has ended, its events are gone, or the gateway drains. Raises StoreAway.
Follow = Callable[[Write], Awaitable[None]]


class _StreamedResponse:
    """A response with open streams. Exists until its last stream ends."""

    def __init__(self) -> None:
        self.streams = 0  # number of open streams of the response
        # Number of times that this gateway has stored new events of the response since its first stream opened.
        self.num_writes = 0
        # Running reads, by the sequence number of their first event and by `num_writes` at their start.
        self.reads: dict[tuple[int, int], asyncio.Task[Page | None]] = {}
        self._waiting: list[asyncio.Future[None]] = []  # one for each stream in wait()
        self._timer: asyncio.TimerHandle | None = None  # calls wake()

    def wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        waiting, self._waiting, self._timer = self._waiting, [], None
        for each in waiting:
            if not each.done():
                each.set_result(None)

    async def wait(self, num_writes: int, limit_s: float) -> None:
        """Waits until `self.num_writes` differs from `num_writes`, or for at most `limit_s` seconds.

        One timer wakes all waiting streams together, so that they share one read of the store.
        """
        if self.num_writes != num_writes:
            return
        loop = asyncio.get_running_loop()
        waiting = loop.create_future()
        self._waiting.append(waiting)
        if self._timer is None or self._timer.when() > loop.time() + limit_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_later(limit_s, self.wake)
        await waiting


class Streams:
    """The open streams of background responses at this gateway."""

    def __init__(self, store: BackgroundStore, comment_s: float) -> None:
        """Creates an empty set of streams.

        Args:
            comment_s: Seconds of silence after which a stream gets a comment; 0 sends no comments.
        """
        self._store = store
        self._comment_s = comment_s
        self._followed: dict[str, _StreamedResponse] = {}  # by response id
        self._owners: Counter[str] = Counter()  # open streams by owner
        self._closed = asyncio.Event()

    @property
    def num_open(self) -> int:
        return self._owners.total()

    def num_of(self, owner: str) -> int:
        return self._owners[owner]

    def wrote(self, response_id: str) -> None:
        """Wakes the streams of a response after this gateway has stored new events of it."""
        followed = self._followed.get(response_id)
        if followed is not None:
            followed.num_writes += 1
            followed.wake()

    def close(self) -> None:
        """Ends all streams. Clients continue them at another gateway."""
        self._closed.set()
        for followed in self._followed.values():
            followed.wake()

    def stream(self, owner: str, response_id: str, first: int) -> Follow:
        """Returns a function that writes the events of a response, beginning with sequence number `first`."""
        return partial(self._follow, owner, response_id, first)

    async def _follow(self, owner: str, response_id: str, first: int, write: Write) -> None:
        followed = self._followed.setdefault(response_id, _StreamedResponse())
        followed.streams += 1
        self._owners[owner] += 1
        try:
            await self._write_events(followed, (owner, response_id), first, write)
        finally:
            self._owners[owner] -= 1
            if not self._owners[owner]:
                del self._owners[owner]
            followed.streams -= 1
            if not followed.streams:
                followed.wake()
                del self._followed[response_id]

    async def _write_events(self, followed: _StreamedResponse, of: tuple[str, str], first: int, write: Write) -> None:
        loop = asyncio.get_running_loop()
        sent_at, pause_s = loop.time(), POLL_S
        while True:
            num_writes = followed.num_writes
            page = await self._page(followed, of, first)
            if page is None:
                return
            if page.events:
                await write(b"".join(map(_event, page.events)))
                first, sent_at, pause_s = first + len(page.events), loop.time(), POLL_S
            if first >= page.total:
                if page.is_over:
                    return
                if self._comment_s and loop.time() - sent_at >= self._comment_s:
                    await write(OPENAI.comment)
                    sent_at = loop.time()
                await followed.wait(num_writes, min(pause_s, self._comment_s or pause_s))
                pause_s = min(2 * pause_s, LONGEST_POLL_S)

    async def _page(self, followed: _StreamedResponse, of: tuple[str, str], first: int) -> Page | None:
        """Returns the page of events from `first` on, or None if the events have expired or the streams are closed.

        Raises:
            StoreAway: The store is unreachable for longer than AWAY_S.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + AWAY_S
        while not self._closed.is_set():
            read = self._read_once(followed, of, first)
            closed = asyncio.create_task(self._closed.wait())
            try:
                await asyncio.wait((read, closed), return_when=asyncio.FIRST_COMPLETED)
                if read.done():
                    return read.result()
            except StoreAway:
                if loop.time() > until:
                    raise
                await asyncio.sleep(POLL_S)
            finally:
                closed.cancel()
        return None

    def _read_once(self, followed: _StreamedResponse, of: tuple[str, str], first: int) -> asyncio.Task[Page | None]:
        """Returns the running read of this page. Starts the read unless another stream has started it.

        The read continues even if the streams that wait for it end.
        """
        read_key = (first, followed.num_writes)
        read = followed.reads.get(read_key)
        if read is None:
            read = followed.reads[read_key] = asyncio.create_task(self._store.follow(*of, first))

            def on_read(task: asyncio.Task[Page | None]) -> None:
                del followed.reads[read_key]
                if not task.cancelled():
                    task.exception()  # marks the exception as retrieved, even if all streams have ended

            read.add_done_callback(on_read)
        return read


def _event(event: bytes) -> bytes:
    """Returns an event in JSON as a server-sent event. Its name is the value of the first JSON member, `type`."""
    kind = event[len(b'{"type":"') : event.index(b'"', len(b'{"type":"'))]
    return b"event: %s\ndata: %s\n\n" % (kind, event)
