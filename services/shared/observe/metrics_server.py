"""Serves a process's Prometheus registry on a port of its own. Defines the latency buckets that several services share."""

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

# The library adds a `_created` series to each counter and histogram, which almost doubles a scrape and which no query reads.
disable_created_metrics()

LATENCY_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


def serve(registry: CollectorRegistry, host: str, port: int) -> WSGIServer:
    """Serves GET /metrics on host:port from a daemon thread. Raises OSError if the port is taken."""
    server, _ = start_http_server(port, addr=host, registry=registry)
    server.set_app(_text_of(registry))
    logger.info("metrics on http://%s:%d/metrics", host, port)
    return server


def _text_of(registry: CollectorRegistry) -> Callable[..., list[bytes]]:
    """Returns a WSGI app that always answers in the text format.

    Prometheus prefers OpenMetrics. But in OpenMetrics, the library would replace the colons in SGLang's names by underscores.
    """

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        start_response("200 OK", [("Content-Type", CONTENT_TYPE_LATEST)])
        return [generate_latest(registry)]

    return app
