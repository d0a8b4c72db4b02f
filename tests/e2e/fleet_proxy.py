"""A TCP proxy that can delay or withhold bytes, to imitate a slow or partitioned remote service."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from rootstock_llm.services.local.ports import HOST


class TcpProxy:
    """Forwards (host, port) of each of `hosts` to HOST:`target`, on an event loop in its own thread.

    Any thread may set `delay_s`, which delays each piece of data in both directions, and call hold() and release(). Between
    hold() and release(), no byte passes, and connections stay open. After release(), the withheld bytes arrive, as after a
    partition.
    """

    def __init__(self, port: int, target: int, hosts: tuple[str, ...] = (HOST,)) -> None:
        self.port, self.delay_s = port, 0.0
        self._target, self._hosts = target, hosts
        self._open: asyncio.Event
        self._pumps: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> TcpProxy:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def hold(self) -> None:
        self._loop.call_soon_threadsafe(self._open.clear)

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._open.set)

    async def _start(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._servers = [await asyncio.start_server(self._serve, host, self.port) for host in self._hosts]

    async def _stop(self) -> None:
        for server in self._servers:
            server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards a connection. If the target refuses the connection because its process has ended, closes it."""
        try:
            far_reader, far_writer = await asyncio.open_connection(HOST, self._target)
        except OSError:
            writer.close()
            return
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._open.wait()
                sink.write(data)
                await sink.drain()
        sink.close()
