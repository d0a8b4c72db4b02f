"""Reports whether this gateway accepts requests, and whether it can serve them at once.

| reader | question | method |
| --- | --- | --- |
| kubelet | Does the gateway listen, and is it not stopping? | `publish` |
| balancer | Does the gateway accept requests? | `refused_for` |
| operator | Would a request wait for a service? | `missing` |

A gateway without workers still accepts requests, which then wait. If it were unready, its
Service would send it no requests, and no waiting requests would make an autoscaler start workers. It refuses requests only if it
knows no model, because no request could name one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from rootstock_llm.services.shared.rpc.grpc_server import HealthService


class Readiness:
    """The readiness of one gateway. Lives as long as the process, on its event loop."""

    def __init__(self) -> None:
        self._connected: Mapping[str, Callable[[], int]] = {}
        self._knows_models: Callable[[], bool] = lambda: False
        self._stopping = False
        self._changed = asyncio.Event()

    def watch(self, connected: Mapping[str, Callable[[], int]], knows_models: Callable[[], bool]) -> None:
        """Sets the sources of the readiness.

        Args:
            connected: Counts the connected replicas of each service that generation needs.
            knows_models: Returns whether any model is listed.
        """
        self._connected = connected
        self._knows_models = knows_models
        self.changed()

    def changed(self) -> None:
        """Wakes `publish`, because a service has connected or disconnected."""
        self._changed.set()

    def stop(self) -> None:
        """Marks the gateway as stopping. Irreversible."""
        self._stopping = True
        self._changed.set()

    def missing(self) -> list[str]:
        """Returns the services that a request would wait for, because no replica is connected; ["stopping"] during a drain."""
        if self._stopping:
            return ["stopping"]
        return [service for service, count in self._connected.items() if not count()]

    def refused_for(self) -> list[str]:
        """Returns the reasons for which a balancer must send no requests: "stopping", or "model" if no model is known."""
        if self._stopping:
            return ["stopping"]
        return [] if self._knows_models() else ["model"]

    async def publish(self, health: HealthService) -> None:
        """Updates the readiness of the gRPC health service until cancelled. Called when the gateway listens."""
        while True:
            await health.set_ready(not self._stopping)
            await self._changed.wait()
            self._changed.clear()
