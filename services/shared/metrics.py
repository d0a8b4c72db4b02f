"""Serves a process's Prometheus registry on its own port, and holds the buckets that more than one service uses."""

from __future__ import annotations

import logging
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

logger = logging.getLogger(__name__)

LATENCY_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def serve(registry: CollectorRegistry, host: str, port: int) -> WSGIServer:
    """GET /metrics on host:port from a daemon thread. Raises OSError if the port is taken."""
    server, _ = start_http_server(port, addr=host, registry=registry)
    logger.info("metrics on http://%s:%d/metrics", host, port)
    return server
