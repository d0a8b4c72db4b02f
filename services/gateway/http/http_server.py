"""The HTTP server: uvicorn with uvloop and httptools, on the gateway's sockets, without signal handlers or access log."""

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

from rootstock_llm.services.gateway.generation.errors import ApiError
from rootstock_llm.services.gateway.http.connection import Connection, ConnectionLimits
from rootstock_llm.services.gateway.http.connection_table import ConnectionTable, connections_allowed, open_files_allowed
from rootstock_llm.services.shared.limits import MAX_HEAD_SECONDS

BACKLOG = 2048
ACCEPT_ROUNDS = 2  # iterations of the event loop before a listener closes; each accepts the connections in the backlog
TICK_S = 1.0  # largest age of the Date header in seconds
POLL_S = 0.01  # seconds between two checks for open connections while the server stops
CLOSE_S = 0.4  # seconds in which serve_app() waits for open connections, and then again after it has cancelled the server


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Options of one HTTP server."""

    first_request_s: float = 0.5  # seconds that a new connection has for its first request while the server stops
    head_s: float = MAX_HEAD_SECONDS  # seconds for each request head, and for a TLS handshake
    keep_alive_s: int = 75  # seconds for which an idle connection stays open; longer than in the pools of most clients
    retry_after_s: int = 1  # seconds in the Retry-After header of a 503
    connections: int = 0  # connections at once; 0 for as many as the limit of open files allows
    on_refused: Callable[[ApiError], None] = lambda error: None  # receives each error sent without the application
    tls: ssl.SSLContext | None = None  # TLS of the connections, or None for plain HTTP


class CannotListen(Exception):
    """The gateway cannot start, because a port is taken, an address is not local, or a setting is invalid.

    The text names the port or the setting. The process exits, and an operator corrects it.
    """


class HttpServer(uvicorn.Server):
    """A server with its sockets and connections. stop() ends it, because the gateway handles signals itself.

    It differs from uvicorn's server in three points:

    - When it stops, it accepts the connections that wait in the backlog, because closing the listener would reset them.
    - When it stops, it waits up to first_request_s for the first requests of new connections instead of closing them.
    - Neither stop() nor the end of the last connection waits for uvicorn's tick of 0.1 s.
    """

    def __init__(self, config: uvicorn.Config, options: HttpOptions, table: ConnectionTable) -> None:
        super().__init__(config)
        self._first_request_s = options.first_request_s
        self._tls = options.tls
        self._table = table
        self._handshake_s = options.head_s
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Makes serve() return when the responses in flight are complete."""
        self.should_exit = True
        self._stopping.set()

    def close_after_answers(self) -> None:
        """Closes each connection after its next response. The head of that response has `connection: close`."""
        self._table.close_after_answers()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens on the given sockets. Limits the time of TLS handshakes, because uvicorn does not."""
        assert sockets, "the caller makes the sockets by bind()"
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
        for _ in range(ACCEPT_ROUNDS):
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
    """Returns a listening socket.

    Args:
        host: "::" stands for all IPv6 addresses, and for all IPv4 addresses if one socket can serve both.

    Raises:
        CannotListen: The port is taken, or the address is not local.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_any = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=is_any)
    except OSError as error:
        raise CannotListen(f"cannot listen on port {port} of {host}: {error.strerror}") from None


def build(app: ASGIApp, options: HttpOptions) -> HttpServer:
    """Returns a server for the application. serve() runs it."""
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
async def serve_app(app: ASGIApp, host: str, port: int) -> AsyncIterator[None]:
    """Serves an application on its own port while the block runs. The end of the block cancels running requests.

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
