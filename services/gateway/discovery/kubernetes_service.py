"""Follows the endpoints of a Service by its EndpointSlices, and by its DNS name while the slices cannot be read.

A rollback to discovery by DNS removes the permission and the network access to the API server while old gateways still end their
streams. Without DNS, the endpoints of these gateways would disappear pod by pod.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.gateway.discovery.dns import DnsWatch, Resolve
from services.gateway.discovery.endpoints import Endpoints
from services.gateway.discovery.kubernetes_api import WATCH_S
from services.gateway.discovery.kubernetes_watch import RESYNC_S, KubernetesWatch, LoadClient
from services.gateway.discovery.targets import DnsTarget, KubernetesTarget


class KubernetesService:
    """The endpoints of one Service."""

    def __init__(
        self,
        target: KubernetesTarget,
        changed: Callable[[Endpoints], None],
        dns_refresh_s: float,
        lookup: Resolve,
        load: LoadClient,
        watch_s: float = WATCH_S,
        resync_s: float = RESYNC_S,
    ) -> None:
        """Makes the follower.

        Args:
            changed: Called with new endpoints, on the event loop of run().
            dns_refresh_s: Pause between two look-ups, in seconds.
            lookup: Looks up a DNS name.
            load: Makes the client of the Kubernetes API.
            watch_s: See kubernetes_api.WATCH_S.
            resync_s: See kubernetes_watch.RESYNC_S.
        """
        self._slices = KubernetesWatch(target, changed, self._named, load, watch_s, resync_s)
        self._changed = changed
        self._dns_refresh_s = dns_refresh_s
        self._lookup = lookup
        self._tasks: asyncio.TaskGroup | None = None
        self._names: tuple[DnsWatch, asyncio.Task[None]] | None = None  # set while the slices cannot be read

    @property
    def trouble(self) -> str:
        """Error of the last DNS look-up; empty if it succeeded, or if DNS is not used now."""
        return "" if self._names is None else self._names[0].trouble

    async def run(self) -> None:
        """Follows the endpoints until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await self._slices.run()

    def _named(self, name: DnsTarget | None) -> None:
        if self._names is not None:
            self._names[1].cancel()
            self._names = None
        if name is not None and self._tasks is not None:
            watch = DnsWatch(name, self._dns_refresh_s, self._lookup, self._heard)
            self._names = watch, self._tasks.create_task(watch.run())

    def _heard(self, endpoints: Endpoints) -> None:
        if endpoints:  # a name may lose its addresses because the DNS server has lost the API server; the endpoints stay
            self._changed(endpoints)
