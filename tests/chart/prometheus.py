"""Runs Debian's Prometheus as a process on loopback, and queries its HTTP API."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rootstock_llm.services.local.ports import HOST, free_ports
from tests.e2e.system import wait_until

Vector = list[tuple[dict[str, str], float]]


class QueryError(Exception):
    """Raised if Prometheus refuses an expression. The message has its reason."""


class Prometheus:
    """Runs Prometheus while the context is open.

    Args:
        folder: folder for its configuration, data and log.
        scrapes: value of scrape_configs.
        rules: rule files.
        every: interval of scrapes and of rule evaluations.
    """

    def __init__(
        self, folder: Path, scrapes: Sequence[dict[str, Any]] = (), rules: Sequence[Path] = (), every: str = "1s"
    ) -> None:
        self._folder = folder
        (port,) = free_ports(1)
        self.url = f"http://{HOST}:{port}"
        config = {
            "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
            "rule_files": [str(path) for path in rules],
            "scrape_configs": list(scrapes),
        }
        self._config = folder / "prometheus.yaml"
        self._config.write_text(yaml.safe_dump(config))
        self._listen = f"--web.listen-address={HOST}:{port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Prometheus:
        argv = ["prometheus", f"--config.file={self._config}", f"--storage.tsdb.path={self._folder / 'tsdb'}", self._listen]
        argv += ["--log.level=warn", "--query.lookback-delta=5m"]
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log, env={**os.environ, "GOMAXPROCS": "1"})
        try:
            wait_until(self._ready, 30, "Prometheus to be ready")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(5)

    def _ready(self) -> bool:
        assert self._process is not None and self._process.poll() is None, (self._folder / "prometheus.log").read_text()
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as response:
                return int(response.status) == 200
        except OSError:
            return False

    def query(self, expression: str, at: float | None = None) -> Vector:
        """Evaluates an expression at Unix time `at`, by default now. A scalar becomes a vector. Raises QueryError."""
        data = {"query": expression} if at is None else {"query": expression, "time": f"{at:.3f}"}
        result = self._get("query", data)
        if result["resultType"] == "scalar":
            return [({}, float(result["result"][1]))]
        return [(each["metric"], float(each["value"][1])) for each in result["result"]]

    def label_values(self, label: str, series: str = "") -> list[str]:
        return list(self._get(f"label/{label}/values", {"match[]": series} if series else {}, post=False))

    def _get(self, path: str, data: dict[str, str], post: bool = True) -> Any:
        encoded = urllib.parse.urlencode(data)
        url = f"{self.url}/api/v1/{path}"
        request = urllib.request.Request(url, encoded.encode()) if post else urllib.request.Request(f"{url}?{encoded}")
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return json.loads(response.read())["data"]
        except urllib.error.HTTPError as error:
            raise QueryError(f"{json.loads(error.read()).get('error')}: {data}") from None
