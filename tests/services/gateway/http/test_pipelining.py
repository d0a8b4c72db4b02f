"""Tests of pipelined input: requests that arrive before the response to an earlier request."""

from __future__ import annotations

import asyncio
import random

import pytest

from rootstock_llm.services.gateway.http.body import WATCH
from rootstock_llm.services.gateway.http.connection import MOST_PIPELINED, Connection
from rootstock_llm.services.gateway.http.http_server import HttpOptions
from rootstock_llm.services.shared.limits import MAX_HEAD_BYTES
from tests.services.gateway.http.test_connection import GET, PATIENT, Server, running, serving

HOLD = b"GET /hold HTTP/1.1\r\nHost: here\r\n\r\n"
ONE_READ = 256 << 10  # largest read of the event loop


def connection_of(server: Server) -> Connection:
    (connection,) = server.server.server_state.connections
    assert isinstance(connection, Connection)
    return connection


def sized(size: int, chunked: bool) -> bytes:
    """Returns a request with a body of the given size. The body contains the bytes that end a head."""
    body = (b"\n\r\n\n0\r\n\r\n" * size)[:size]
    if not chunked:
        return b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (size, body)
    parts = [body[at : at + 700] for at in range(0, size, 700)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


@pytest.mark.parametrize("seed", range(4))
def test_pipelined_requests_are_answered_in_order_for_any_division_into_pieces(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice([0, 1, 17, 2000, 9000, 70_000]) for _ in range(40)]
    sent = b"".join(sized(size, chunked=draw.random() < 0.5) for size in sizes)

    async def use(server: Server) -> None:
        client = await server.connect()

        async def send() -> None:
            at = 0
            while at < len(sent):
                step = draw.choice([1, 2, 3, 40, 1000, 100_000])
                await client.send(sent[at : at + step])
                at += step
                if draw.random() < 0.3:
                    await asyncio.sleep(0)

        sending = asyncio.create_task(send())
        assert [(await client.answer())[-8:] for _ in sizes] == [b"%08d" % size for size in sizes]
        await sending

    serving(use)


def test_pipelined_input_is_buffered_up_to_a_limit() -> None:
    async def use(server: Server) -> None:
        client = await server.connect()
        sending = asyncio.create_task(client.send(HOLD + GET * 200_000))
        await server.until(lambda: server.app.begun == 1 and connection_of(server)._buffered_bytes > MAX_HEAD_BYTES)
        await asyncio.sleep(0.05)
        connection = connection_of(server)
        assert len(connection._buffer) <= MAX_HEAD_BYTES + ONE_READ and len(connection.pipeline) <= 1 and server.app.begun == 1
        server.app.go.set()
        assert [await client.status() for _ in range(3000)] == [200] * 3000
        assert len(connection._buffer) <= 2 * (MAX_HEAD_BYTES + ONE_READ) and len(connection.pipeline) <= 1
        sending.cancel()

    serving(use)


def test_pipelined_requests_after_a_body_with_content_length_are_parsed_one_by_one() -> None:
    post = sized(70_000, chunked=False)

    async def use(server: Server) -> None:
        client = await server.connect()
        await client.send(post[:-10])
        await asyncio.sleep(0.05)
        await client.send(post[-10:] + GET * 1000)
        assert [await client.status() for _ in range(1001)] == [200] * 1001

    serving(use)


def test_number_of_pipelined_requests_after_a_chunked_body_is_limited() -> None:
    few, crowd = sized(10, chunked=True) + GET * 10, sized(10, chunked=True) + b"GET / HTTP/1.1\r\n\r\n" * 200
    head, body = few.partition(b"\r\n\r\n")[0] + b"\r\n\r\n", few.partition(b"\r\n\r\n")[2]

    async def use(server: Server) -> None:
        client = await server.connect()
        await client.send(head)
        await client.send(body)
        assert [await client.status() for _ in range(11)] == [200] * 11
        await client.send(crowd)
        assert server.app.begun <= 12 + MOST_PIPELINED
        await server.until(lambda: not server.server.server_state.connections)

    serving(use)


def test_gateway_notices_a_disconnect_while_pipelined_input_is_buffered() -> None:
    async def run(pipelined: bytes) -> None:
        async with running(PATIENT) as server:
            left = asyncio.Event()

            async def watch_app(scope, receive, send):  # type: ignore[no-untyped-def]
                if scope["path"] == "/hold":
                    scope["extensions"][WATCH](left.set)
                await server.app(scope, receive, send)

            client = await server.connect()
            await server.until(lambda: bool(server.server.server_state.connections))
            connection_of(server)._application = watch_app
            await client.send(HOLD + pipelined)
            await server.until(lambda: server.app.begun == 1)
            client.close()
            await asyncio.wait_for(left.wait(), 60)
            await server.until(lambda: not server.server.server_state.connections)
            assert server.app.begun == 1, "the next request of a closed connection is not started"

    for pipelined in (b"", GET, GET[:9], sized(5, chunked=True)):
        asyncio.run(run(pipelined))


def test_stopping_server_serves_pipelined_requests_after_a_started_response() -> None:
    """The head of the first response does not announce the end of the connection."""

    async def run() -> None:
        async with running(PATIENT) as server:
            begun = asyncio.Event()

            async def started_app(scope, receive, send):  # type: ignore[no-untyped-def]
                if scope["path"] != "/hold":
                    return await server.app(scope, receive, send)
                await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
                await send({"type": "http.response.body", "body": b"a", "more_body": True})
                begun.set()
                await server.app.go.wait()
                await send({"type": "http.response.body", "body": b"b"})

            client = await server.connect()
            await server.until(lambda: bool(server.server.server_state.connections))
            connection_of(server)._application = started_app
            await client.send(HOLD + GET)
            await begun.wait()
            server.server.close_after_answers()
            server.server.stop()
            await server.until(lambda: connection_of(server)._next_is_last)
            server.app.go.set()
            first, second = await client.answer(), await client.answer()
            assert first.endswith(b"ab") and b"connection: close" not in first.lower()
            assert b"connection: close" in second.lower() and await client.ended()

    asyncio.run(run())


def test_keep_alive_timer_stops_when_the_next_request_begins() -> None:
    """The next request may arrive in one piece with the rest of the body of an earlier request."""

    async def use(server: Server) -> None:
        client = await server.connect()
        await client.send(b"POST /early HTTP/1.1\r\nHost: here\r\nContent-Length: 5\r\n\r\nhel")
        assert await client.status() == 200
        await client.send(b"lo" + HOLD)
        await server.until(lambda: server.app.begun == 2)
        assert connection_of(server).timeout_keep_alive_task is None
        server.app.go.set()
        assert await client.status() == 200

    serving(use, HttpOptions(first_request_s=0.05, head_s=30))
