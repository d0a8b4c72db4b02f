"""The way to what generates: by its path alone. FastAPI has the same endpoints too, for other methods and its documentation.

What FastAPI does between a path and a function without parameters costs more than all else that HTTP does for a short request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

HEAD = "rootstock.head"  # of a scope's extensions: what says GET was a HEAD, whose answer has no body
Endpoint = Callable[[], Awaitable[Response]]


class DirectRoutes:
    """endpoints: of POST, by path. HEAD is answered as GET; the server leaves the body out."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        if scope["path"].endswith("\n"):
            scope = {**scope, "path": scope["path"][:-1] + "%0A"}  # or a route's pattern, which ends in $, would match
        if method == "POST" and (endpoint := self._endpoints.get(scope["path"])) is not None:
            await (await endpoint())(scope, receive, send)
        elif method == "HEAD":
            await self._app({**scope, "method": "GET", "extensions": {**scope.get("extensions", {}), HEAD: {}}}, receive, send)
        else:
            await self._app(scope, receive, send)
