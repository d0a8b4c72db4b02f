"""Serves a process's Prometheus registry on its own port, and holds the buckets that more than one service uses."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    disable_created_metrics,
    generate_latest,
    start_http_server,
)

logger = logging.getLogger(__name__)

# A `_created` series beside each counter and histogram doubles the series of a scrape, and no query reads it.
disable_created_metrics()

LATENCY_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


def serve(registry: CollectorRegistry, host: str, port: int) -> WSGIServer:
    """GET /metrics on host:port from a daemon thread. Raises OSError if the port is taken."""
    server, _ = start_http_server(port, addr=host, registry=registry)
    server.set_app(_text_of(registry))
    logger.info("metrics on http://%s:%d/metrics", host, port)
    return server


def _text_of(registry: CollectorRegistry) -> Callable[..., list[bytes]]:
    """Always the text format, whatever is asked for: in OpenMetrics, which Prometheus prefers, the library writes a name's colon
    as an underscore, and SGLang's names have one."""

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        start_response("200 OK", [("Content-Type", CONTENT_TYPE_LATEST)])
        return [generate_latest(registry)]

    return app
