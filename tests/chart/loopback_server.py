"""Runs an HTTP server on loopback during a test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rootstock_llm.services.local.ports import HOST


class QuietHandler(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        return


@contextmanager
def serving(handler: type[QuietHandler]) -> Iterator[str]:
    """Runs a server and yields its URL."""
    server = ThreadingHTTPServer((HOST, 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
