"""Runs a further HTTP application beside the gateway's own, on a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.types import ASGIApp

from services.gateway.http import http_server

CLOSE_S = 0.4


@contextlib.asynccontextmanager
async def served_beside(app: ASGIApp, host: str, port: int) -> AsyncIterator[None]:
    """Serves while the block runs; requests in flight at the end are cut off. Raises CannotListen."""
    listener = http_server.bind(host, port)
    server = http_server.build(app, http_server.HttpOptions())
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield
    finally:
        server.stop()
        await asyncio.wait((serving,), timeout=CLOSE_S)
        server.force_exit = True
        serving.cancel()
        await asyncio.wait((serving,), timeout=CLOSE_S)
