"""Tests of the stop of a server: it serves earlier connections and refuses later connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from unittest.mock import patch

import pytest
import uvloop
from starlette.responses import PlainTextResponse

from rootstock_llm.services.gateway.http import http_server

HOST = "127.0.0.1"
REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
Use = Callable[[http_server.HttpServer, socket.socket, tuple[str, int]], Awaitable[None]]


def serving(use: Use, first_request_s: float = 30.0) -> None:
    """Runs `use` with a server that responds with hello. Returns when both have ended."""

    async def run() -> None:
        listener = http_server.bind(HOST, 0)
        address = listener.getsockname()
        server = http_server.build(PlainTextResponse("hello"), http_server.HttpOptions(first_request_s=first_request_s))
        running = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0.001)
        await use(server, listener, address)
        server.stop()
        await asyncio.wait_for(running, 30)

    with patch.object(http_server, "TICK_S", 600.0):  # a stop does not wait for a tick
        uvloop.run(run())


async def answer_of(client: socket.socket) -> bytes:
    """Reads until the server closes the connection."""
    parts = [await asyncio.to_thread(client.recv, 65536)]
    while parts[-1]:
        parts.append(await asyncio.to_thread(client.recv, 65536))
    return b"".join(parts)


@pytest.mark.parametrize("sent", [0, 7, len(REQUEST)], ids=["nothing sent", "part of a request", "request"])
@pytest.mark.parametrize("accepted", [True, False])
def test_stopping_server_serves_connections_from_before_the_stop(sent: int, accepted: bool) -> None:
    async def use(server: http_server.HttpServer, listener: socket.socket, address: tuple[str, int]) -> None:
        client = socket.create_connection(
            address
        )  # the kernel accepts the connection, because the server's event loop is blocked
        client.sendall(REQUEST[:sent])
        if accepted:
            await asyncio.sleep(0.05)
        stopping = asyncio.create_task(server.shutdown([listener]))
        await asyncio.sleep(0.05)
        client.sendall(REQUEST[sent:])
        assert (await answer_of(client)).endswith(b"hello"), "the server closes the connection after the response"
        await stopping
        client.close()

    serving(use)


def test_server_refuses_connections_after_the_stop() -> None:
    async def use(server: http_server.HttpServer, listener: socket.socket, address: tuple[str, int]) -> None:
        await server.shutdown([listener])
        with pytest.raises(ConnectionRefusedError):
            await asyncio.to_thread(socket.create_connection, address)

    serving(use)


def test_silent_connection_does_not_delay_the_stop() -> None:
    async def use(server: http_server.HttpServer, listener: socket.socket, address: tuple[str, int]) -> None:
        client = socket.create_connection(address)
        await server.shutdown([listener])
        assert await answer_of(client) == b""
        client.close()

    serving(use, first_request_s=0.05)
