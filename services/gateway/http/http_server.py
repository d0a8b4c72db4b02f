"""uvicorn, run by us: our signals, our socket, uvloop and httptools, no access log."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from services.gateway.http.connection import Connection, ConnectionLimits
from services.gateway.http.connection_table import ConnectionTable, connections_allowed, open_files_allowed
from services.gateway.request.errors import ApiError
from services.shared.limits import MAX_HEAD_SECONDS

BACKLOG = 2048
TURNS = 2  # of the event loop: each accepts all that wait
TICK_S = 1.0  # the Date header's age at most
POLL_S = 0.01  # at connections that are to close
CLOSE_S = 0.4  # seconds in which the connections of a second server may close, and then again after they are cut


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Seconds that a connection has: first_request_s for its first request once the server stops, head_s for each head,
    keep_alive_s for the next request after an answer (longer than a client's pool usually keeps one). retry_after_s: of a 503.
    connections: at once, 0 for as many as the process may open files for. on_refused: receives each error that a connection
    sends without the application. tls: of its connections, None for plain ones; a handshake has head_s."""

    first_request_s: float = 0.5
    head_s: float = MAX_HEAD_SECONDS
    keep_alive_s: int = 75
    retry_after_s: int = 1
    connections: int = 0
    on_refused: Callable[[ApiError], None] = lambda error: None
    tls: ssl.SSLContext | None = None


class CannotListen(Exception):
    """A port that is taken, or an address that is not ours. The text names both."""


class HttpServer(uvicorn.Server):
    """Stops by stop(), not by signal: the process has one owner of signals.

    Who has connected before that is answered: closing a listener would reset whoever waits to be accepted, and uvicorn closes
    a connection whose first request is still on its way. Neither the stop nor the end of the last connection waits for a tick of
    uvicorn's.
    """

    def __init__(self, config: uvicorn.Config, options: HttpOptions, table: ConnectionTable) -> None:
        super().__init__(config)
        self._first_request_s = options.first_request_s
        self._tls = options.tls
        self._table = table
        self._handshake_s = options.head_s
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    def close_after_answers(self) -> None:
        """Each answer that begins from now on says that its connection ends with it."""
        self._table.close_after_answers()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """On sockets that listen. uvicorn's own knows no limit for a handshake."""
        assert sockets, "they are made by bind()"
        loop, make = asyncio.get_running_loop(), self._make_connection
        handshake_s = None if self._tls is None else self._handshake_s
        self.servers = [
            await loop.create_server(make, sock=sock, ssl=self._tls, ssl_handshake_timeout=handshake_s, backlog=BACKLOG)
            for sock in sockets
        ]
        self.started = True

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._stopping.wait()

    def _make_connection(self) -> asyncio.Protocol:
        protocol = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        return protocol(config=self.config, server_state=self.server_state, app_state={})

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        for server in self.servers:
            server.close()
        deadline = time.monotonic() + self._first_request_s
        while self._expects_first_requests() and not self.force_exit and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        for sock in sockets or ():
            sock.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while (self.server_state.connections or self.server_state.tasks) and not self.force_exit:
            await asyncio.sleep(POLL_S)
        for server in self.servers:
            await server.wait_closed()

    def _expects_first_requests(self) -> bool:
        open_connections = self.server_state.connections
        return any(isinstance(each, Connection) and each.cycle is None for each in open_connections)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. host: "::" is every address, IPv4 too where that can be. Raises CannotListen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_any = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=is_any)
    except OSError as error:
        raise CannotListen(f"cannot listen on port {port} of {host}: {error.strerror}") from None


def build(app: ASGIApp, options: HttpOptions) -> HttpServer:
    table = ConnectionTable(options.connections or connections_allowed(open_files_allowed()))
    limits = ConnectionLimits(options.head_s, options.retry_after_s, options.on_refused)
    protocol = cast(type[asyncio.Protocol], partial(Connection, table=table, limits=limits))
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=protocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=options.keep_alive_s,
        backlog=BACKLOG,
    )
    return HttpServer(config, options, table)


@contextlib.asynccontextmanager
async def served_beside(app: ASGIApp, host: str, port: int) -> AsyncIterator[None]:
    """Serves a second application on a port of its own while the block runs. Requests in flight at the end are cut.

    Raises:
        CannotListen: The port is taken, or the address is not local.
    """
    listener = bind(host, port)
    server = build(app, HttpOptions())
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield
    finally:
        server.stop()
        await asyncio.wait((serving,), timeout=CLOSE_S)
        server.force_exit = True
        serving.cancel()
        await asyncio.wait((serving,), timeout=CLOSE_S)
