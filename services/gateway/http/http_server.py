"""uvicorn, run by us: our signals, our socket, uvloop and httptools, no access log."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

KEEP_ALIVE_S = 75  # longer than the usual idle time of a client's pool
BACKLOG = 2048
FIRST_REQUEST_S = 0.5  # for the first request of who had connected when the server stopped
TURNS = 2  # of the event loop: each accepts all that wait


class CannotListen(Exception):
    """A port that is taken, or an address that is not ours. The text names both."""


class HttpServer(uvicorn.Server):
    """Stops when `should_exit` is set, not by signal: the process has one owner of signals.

    Who has connected before that is answered: closing a listener would reset whoever waits to be accepted, and uvicorn closes
    a connection whose first request is still on its way. first_request_s: seconds that such a connection has for it.
    """

    def __init__(self, config: uvicorn.Config, first_request_s: float) -> None:
        super().__init__(config)
        self._first_request_s = first_request_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        for server in self.servers:
            server.close()
        deadline = time.monotonic() + self._first_request_s
        while self._expects_first_requests() and not self.force_exit and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await super().shutdown(sockets)

    def _expects_first_requests(self) -> bool:
        open_connections = self.server_state.connections
        return any(isinstance(each, HttpToolsProtocol) and each.cycle is None for each in open_connections)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises CannotListen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise CannotListen(f"cannot listen on port {port} of {host}: {error.strerror}") from None


def build(app: ASGIApp, first_request_s: float = FIRST_REQUEST_S) -> HttpServer:
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        backlog=BACKLOG,
    )
    return HttpServer(config, first_request_s)
