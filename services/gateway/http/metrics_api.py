"""Serves GET /metrics on the metrics port.

The metrics are rendered on the gateway's event loop, whose thread also writes them.
"""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.types import Receive, Scope, Send

from rootstock_llm.services.gateway.generation.errors import ApiError


class MetricsApi:
    """The ASGI application that serves a registry's metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] != "/metrics":
            error = ApiError(404, "Not Found.", code="not_found")
            status, headers, content = error.status, error.headers(), error.json()
        elif scope["method"] not in ("GET", "HEAD"):
            error = ApiError(405, "Method Not Allowed.", code="method_not_allowed")
            status, headers, content = error.status, [*error.headers(), (b"allow", b"GET, HEAD")], error.json()
        else:
            status, content = 200, generate_latest(self._registry)
            headers = [(b"content-type", CONTENT_TYPE_LATEST.encode()), (b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})
