"""The events of a response in the background as a stream: what the store has, then what comes, whichever gateway makes it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

from services.gateway.request.errors import OPENAI
from services.gateway.state.background_record import Page
from services.gateway.state.background_store import BackgroundStore
from services.gateway.state.state_store import StoreAway

POLL_S, LONGEST_POLL_S = 0.15, 1.0  # at what another gateway has written: behind an event, and in long silence
AWAY_S = 30.0  # that a stream waits for the store

Write = Callable[[bytes], Awaitable[None]]  # sends events or a comment to a client
Follow = Callable[[Write], Awaitable[None]]  # returns when the response is over; raises StoreAway


class _Followed:
    """A response that streams wait for. news: how often something has been written of it here."""

    def __init__(self) -> None:
        self.streams = 0
        self.news = 0
        self.asked: dict[tuple[int, int], asyncio.Task[Page | None]] = {}  # by first event and news
        self._waiting: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        waiting, self._waiting, self._timer = self._waiting, [], None
        for each in waiting:
            if not each.done():
                each.set_result(None)

    async def wait(self, news: int, limit_s: float) -> None:
        """For more news than these, or a moment, in which all who wait are woken: so that they ask at once, and one does."""
        if self.news != news:
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
    """All that are open here. comment_s: seconds of silence behind which a stream gets a comment; 0: none."""

    def __init__(self, store: BackgroundStore, comment_s: float) -> None:
        self._store = store
        self._comment_s = comment_s
        self._followed: dict[str, _Followed] = {}  # by response
        self._owners: Counter[str] = Counter()
        self._closed = asyncio.Event()

    @property
    def num_open(self) -> int:
        return self._owners.total()

    def num_of(self, owner: str) -> int:
        return self._owners[owner]

    def wrote(self, response_id: str) -> None:
        """There are new events of it."""
        followed = self._followed.get(response_id)
        if followed is not None:
            followed.news += 1
            followed.wake()

    def close(self) -> None:
        """All end where they are: what is behind is told at another gateway."""
        self._closed.set()
        for followed in self._followed.values():
            followed.wake()

    def stream(self, owner: str, response_id: str, first: int) -> Follow:
        """Returns a function that writes the events of the response from this sequence number on."""
        return partial(self._follow, owner, response_id, first)

    async def _follow(self, owner: str, response_id: str, first: int, write: Write) -> None:
        followed = self._followed.setdefault(response_id, _Followed())
        followed.streams += 1
        self._owners[owner] += 1
        try:
            await self._tell(followed, (owner, response_id), first, write)
        finally:
            self._owners[owner] -= 1
            if not self._owners[owner]:
                del self._owners[owner]
            followed.streams -= 1
            if not followed.streams:
                followed.wake()
                del self._followed[response_id]

    async def _tell(self, followed: _Followed, of: tuple[str, str], first: int, write: Write) -> None:
        loop = asyncio.get_running_loop()
        said, pause_s = loop.time(), POLL_S
        while True:
            news = followed.news
            page = await self._page(followed, of, first)
            if page is None:
                return
            if page.events:
                await write(b"".join(map(_event, page.events)))
                first, said, pause_s = first + len(page.events), loop.time(), POLL_S
            if first >= page.total:
                if page.is_over:
                    return
                if self._comment_s and loop.time() - said >= self._comment_s:
                    await write(OPENAI.comment)
                    said = loop.time()
                await followed.wait(news, min(pause_s, self._comment_s or pause_s))
                pause_s = min(2 * pause_s, LONGEST_POLL_S)

    async def _page(self, followed: _Followed, of: tuple[str, str], first: int) -> Page | None:
        """None: there is nothing any more, or all streams end. Raises StoreAway."""
        loop = asyncio.get_running_loop()
        until = loop.time() + AWAY_S
        while not self._closed.is_set():
            asking = self._ask(followed, of, first)
            closed = asyncio.create_task(self._closed.wait())
            try:
                await asyncio.wait((asking, closed), return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    return asking.result()
            except StoreAway:
                if loop.time() > until:
                    raise
                await asyncio.sleep(POLL_S)
            finally:
                closed.cancel()
        return None

    def _ask(self, followed: _Followed, of: tuple[str, str], first: int) -> asyncio.Task[Page | None]:
        """What another stream asks just now is not asked again. It ends by itself, whoever leaves."""
        what = (first, followed.news)
        asking = followed.asked.get(what)
        if asking is None:
            asking = followed.asked[what] = asyncio.create_task(self._store.follow(*of, first))

            def answered(task: asyncio.Task[Page | None]) -> None:
                del followed.asked[what]
                if not task.cancelled():
                    task.exception()  # seen, also where all have left

            asking.add_done_callback(answered)
        return asking


def _event(event: bytes) -> bytes:
    """Named by its type, which its JSON begins with."""
    kind = event[len(b'{"type":"') : event.index(b'"', len(b'{"type":"'))]
    return b"event: %s\ndata: %s\n\n" % (kind, event)
