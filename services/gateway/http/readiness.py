"""Reports whether this gateway accepts requests, and whether requests must wait for a service.

| reader | question | method |
| --- | --- | --- |
| kubelet | Does the gateway listen, and is it not stopping? | `publish` |
| balancer | Does the gateway accept requests? | `refusal_reasons` |
| operator | Would a request wait for a service? | `missing` |

A gateway without workers still accepts requests, which then wait, and the autoscaler starts workers for waiting requests. If
the gateway were unready, its Service would send it no requests, and no worker would start. The gateway refuses requests only
while it lists no model, because a request could not name one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from rootstock_llm.services.shared.rpc.grpc_server import HealthService


class Readiness:
    """The readiness of one gateway. Lives as long as the process, on its event loop."""

    def __init__(self) -> None:
        self._connected: Mapping[str, Callable[[], int]] = {}
        self._has_models: Callable[[], bool] = lambda: False
        self._stopping = False
        self._changed = asyncio.Event()

    def watch(self, connected: Mapping[str, Callable[[], int]], has_models: Callable[[], bool]) -> None:
        """Sets the sources of the readiness.

        Args:
            connected: Counts the connected replicas of each service that generation needs.
            has_models: Returns whether any model is listed.
        """
        self._connected = connected
        self._has_models = has_models
        self.changed()

    def changed(self) -> None:
        """Wakes `publish`, because a service has connected or disconnected."""
        self._changed.set()

    def stop(self) -> None:
        """Marks the gateway as stopping. Irreversible."""
        self._stopping = True
        self._changed.set()

    def missing(self) -> list[str]:
        """Returns the services without a connected replica, for which a request would wait; ["stopping"] during a drain."""
        if self._stopping:
            return ["stopping"]
        return [service for service, count in self._connected.items() if not count()]

    def refusal_reasons(self) -> list[str]:
        """Returns the reasons for which a balancer must send no requests: "stopping", or "model" if no model is listed."""
        if self._stopping:
            return ["stopping"]
        return [] if self._has_models() else ["model"]

    async def publish(self, health: HealthService) -> None:
        """Updates the readiness of the gRPC health service until cancelled. Must start only when the gateway listens."""
        while True:
            await health.set_ready(not self._stopping)
            await self._changed.wait()
            self._changed.clear()
