"""Whether this gateway takes requests, for kubelets and balancers, and whether it can answer them at once, for people.

It takes them while it listens and does not stop: what is missing, they wait for. A gateway without workers that left its Service
would turn away the very requests that bring workers back. What it cannot wait for is a model that nobody has named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from services.shared.rpc.grpc_server import HealthService


class Readiness:
    def __init__(self) -> None:
        self._connected: Mapping[str, Callable[[], int]] = {}
        self._knows_models: Callable[[], bool] = lambda: False
        self._stopping = False
        self._changed = asyncio.Event()

    def watch(self, connected: Mapping[str, Callable[[], int]], knows_models: Callable[[], bool]) -> None:
        """`connected` counts the replicas of each service that must have one; `knows_models`: whether any model is listed."""
        self._connected = connected
        self._knows_models = knows_models
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

    def refused_for(self) -> list[str]:
        """Why a balancer is to send nothing here: this gateway is stopping, or there is no model that a request could be for."""
        if self._stopping:
            return ["stopping"]
        return [] if self._knows_models() else ["model"]

    async def publish(self, health: HealthService) -> None:
        """Keeps the gRPC health service's readiness up to date, from when the gateway listens until cancelled."""
        while True:
            await health.set_ready(not self._stopping)
            await self._changed.wait()
            self._changed.clear()
