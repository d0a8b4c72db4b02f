"""Tests that several streams of one stored response share their calls to the store."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rootstock_llm.services.gateway.background import follow
from rootstock_llm.services.gateway.background.follow import Streams
from rootstock_llm.services.gateway.store.background_record import BackgroundStatus, Page


class Store:
    """A fake store that counts its reads. Each read takes 10 ms."""

    def __init__(self) -> None:
        self.events = [b'{"type":"a"}']
        self.status = BackgroundStatus.IN_PROGRESS
        self.calls = 0

    async def follow(self, _owner: str, _response_id: str, first: int) -> Page | None:
        self.calls += 1
        page = Page(self.status, len(self.events), self.events[first:])
        await asyncio.sleep(0.01)
        return page


async def open_50_streams(store: Store, streams: Streams, received: list[list[bytes]]) -> list[asyncio.Task[None]]:
    """Opens 50 streams of one response and waits until all have received the existing events."""

    async def open_stream(at: int) -> None:
        async def write(events: bytes) -> None:
            received[at].append(events)

        await streams.stream("owner", "resp_a", 0)(write)

    following = [asyncio.create_task(open_stream(at)) for at in range(50)]
    while not all(received):
        await asyncio.sleep(0.01)
    assert streams.num_open == streams.num_of("owner") == 50
    return following


def test_streams_of_one_response_share_store_reads_and_poll_rarely_when_idle(monkeypatch: Any) -> None:
    monkeypatch.setattr(follow, "LONGEST_POLL_S", 0.4)

    async def run() -> None:
        store, received = Store(), [[] for _ in range(50)]  # type: ignore[var-annotated]
        begun = time.monotonic()
        following = await open_50_streams(store, Streams(store, 0), received)  # type: ignore[arg-type]
        while store.calls < 4:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        assert store.calls <= (time.monotonic() - begun) / 0.4 + 4
        for task in following:
            task.cancel()
        await asyncio.wait(following)

    asyncio.run(run())


def test_streams_of_one_response_receive_local_events_without_polling(monkeypatch: Any) -> None:
    monkeypatch.setattr(follow, "POLL_S", 600.0)
    monkeypatch.setattr(follow, "LONGEST_POLL_S", 600.0)

    async def run() -> None:
        store, received = Store(), [[] for _ in range(50)]  # type: ignore[var-annotated]
        streams = Streams(store, 0)  # type: ignore[arg-type]
        following = await open_50_streams(store, streams, received)
        store.events.append(b'{"type":"b"}')
        store.status = BackgroundStatus.COMPLETED
        streams.wrote("resp_a")
        async with asyncio.timeout(60):
            await asyncio.gather(*following)
        assert {b"".join(each) for each in received} == {b'event: a\ndata: {"type":"a"}\n\nevent: b\ndata: {"type":"b"}\n\n'}
        assert streams.num_open == 0 and not streams._followed

    asyncio.run(run())
