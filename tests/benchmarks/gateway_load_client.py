"""A load generator with little overhead: it sends prepared requests over persistent connections and does not parse responses."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

END_OF_HEAD = b"\r\n\r\n"


def http_request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


@dataclass
class Tally:
    """Responses to a load."""

    latencies_s: list[float] = field(default_factory=list)  # times of whole responses with status 200, in order of their ends
    failed: list[bytes] = field(default_factory=list)  # first bytes of other responses, or the error of a connection


class _Connection(asyncio.Protocol):
    """A connection that sends the next request after each response until the clock reaches `end`."""

    def __init__(self, requests: Sequence[bytes], first: int, end: float, tally: Tally) -> None:
        self._requests: Iterator[bytes] = itertools.islice(itertools.cycle(requests), first, None)
        self._end, self._tally = end, tally
        self._received = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport has the methods but is no subclass
        self._send()

    def _send(self) -> None:
        self._sent_at = time.perf_counter()
        if self._sent_at >= self._end:
            self._transport.close()
            return
        self._received = b""
        self._transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(END_OF_HEAD)
        if not found or not _is_complete(head.lower(), body):
            return
        if head.startswith(b"HTTP/1.1 200"):
            self._tally.latencies_s.append(time.perf_counter() - self._sent_at)
        else:
            self._tally.failed.append(self._received[:600])
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if time.perf_counter() < self._end:
            self._tally.failed.append(f"connection lost: {error}".encode())
        if not self.done.done():
            self.done.set_result(None)


def _is_complete(head: bytes, body: bytes) -> bool:
    """Returns whether the body is complete. A chunked body ends with the empty chunk. No event of a stream ends with these bytes.

    Args:
        head: status line and headers in lower case.
    """
    if b"\r\ntransfer-encoding: chunked" in head:
        return body.endswith(b"\r\n0\r\n\r\n")
    _, _, rest = head.partition(b"content-length:")
    return len(body) >= int(rest.split(b"\r\n", 1)[0])


async def run_load(targets: Sequence[tuple[str, int]], requests: Sequence[bytes], connections: int, seconds: float) -> Tally:
    """Keeps `connections` requests in flight, spread over the targets. Raises OSError if a target cannot be reached."""
    tally, end = Tally(), time.perf_counter() + seconds
    loop = asyncio.get_running_loop()
    made: list[_Connection] = []
    for index in range(connections):
        host, port = targets[index % len(targets)]
        connection = _Connection(requests, index * len(requests) // connections, end, tally)
        await loop.create_connection(lambda connection=connection: connection, host, port)  # type: ignore[misc]
        made.append(connection)
    await asyncio.gather(*(connection.done for connection in made))
    return tally


async def run_requests(target: tuple[str, int], request: bytes, count: int, connections: int) -> Tally:
    """Sends a request `count` times with `connections` in flight. Raises OSError if the target cannot be reached."""
    tally, loop = Tally(), asyncio.get_running_loop()
    left = itertools.repeat(request, count)
    made = [_Counted(left, tally) for _ in range(connections)]
    for connection in made:
        await loop.create_connection(lambda connection=connection: connection, *target)  # type: ignore[misc]
    await asyncio.gather(*(connection.done for connection in made))
    return tally


class _Counted(_Connection):
    """A connection that takes its requests from an iterator that all connections share."""

    def __init__(self, left: Iterator[bytes], tally: Tally) -> None:
        super().__init__((), 0, 0.0, tally)
        self._requests = left

    def _send(self) -> None:
        self._received = b""
        request = next(self._requests, None)
        if request is None:
            self._transport.close()
            return
        self._sent_at = time.perf_counter()
        self._transport.write(request)
