"""Whether this gateway takes requests, for a kubelet, and whether it can answer them at once, for people.

It takes them while it listens and does not stop: what is missing, they wait for. A gateway without workers that left its Service
would turn away the very requests that bring workers back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from services.shared.rpc.grpc_server import Health


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
        """What a request would wait for: of worker, tokenizer and detokenizer those of which none is connected. Or that this
        gateway is stopping."""
        if self._stopping:
            return ["stopping"]
        return [service for service, count in self._connected.items() if not count()]

    async def publish(self, health: Health) -> None:
        """Keeps the gRPC health service's readiness up to date, from when the gateway listens until cancelled."""
        while True:
            await health.set_ready(not self._stopping)
            await self._changed.wait()
            self._changed.clear()
