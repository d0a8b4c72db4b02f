"""Writes log lines to stderr, each a JSON object with the service's name and the fields of the logging call.

No log line contains text of a prompt or of a completion.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import orjson

from rootstock_llm.services.shared.observe.log_fields import FIELDS


class JsonFormatter(logging.Formatter):
    """Renders a record as {"ts", "level", "service", "logger", "msg", **fields}; ts is RFC 3339 UTC with milliseconds."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "msg": record.getMessage(),
        }
        line.update(getattr(record, FIELDS, {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def configure(service: str, level: str) -> None:
    """Makes every logger of this process write JSON lines to stderr. A service's __main__ calls it once."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("uvicorn.access", "httpx", "grpc._cython"):
        logging.getLogger(noisy).setLevel("WARNING")
