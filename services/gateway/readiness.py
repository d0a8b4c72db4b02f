"""Whether this gateway can answer: a worker, a tokenizer and a detokenizer are connected, and it is not stopping."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from services.shared.rpc import Health


class Readiness:
    def __init__(self) -> None:
        self._connected: Mapping[str, Callable[[], int]] = {}
        self._stopping = False
        self._changed = asyncio.Event()

    def watch(self, connected: Mapping[str, Callable[[], int]]) -> None:
        """`connected` counts the replicas of each service that must have one."""
        self._connected = connected
        self.changed()

    def changed(self) -> None:
        self._changed.set()

    def stop(self) -> None:
        self._stopping = True
        self._changed.set()

    def missing(self) -> list[str]:
        """Empty: ready."""
        if self._stopping:
            return ["stopping"]
        return [service for service, count in self._connected.items() if not count()]

    async def publish(self, health: Health) -> None:
        """Keeps the gRPC health service's readiness up to date, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await health.set_ready(not self.missing())
