"""uvicorn, run by us: our signals, our socket, uvloop and httptools, no access log."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

KEEP_ALIVE_S = 75  # longer than the usual idle time of a client's pool
BACKLOG = 2048


class CannotListen(Exception):
    """A port that is taken, or an address that is not ours. The text names both."""


class HttpServer(uvicorn.Server):
    """Stops when `should_exit` is set, not by signal: the process has one owner of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises CannotListen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise CannotListen(f"cannot listen on port {port} of {host}: {error.strerror}") from None


def build(app: ASGIApp) -> HttpServer:
    return HttpServer(
        uvicorn.Config(
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
    )
