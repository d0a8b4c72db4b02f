"""One Service's endpoints: as its EndpointSlices say, and while those cannot be read, as its name in DNS does.

Rights and ways to the API server go while gateways still end their streams (a rollback to discovery by names takes both at once),
and then what they know of dies pod by pod.
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
        """`changed` is called on the event loop that runs run()."""
        self._slices = KubernetesWatch(target, changed, self._named, load, watch_s, resync_s)
        self._changed = changed
        self._dns_refresh_s = dns_refresh_s
        self._lookup = lookup
        self._tasks: asyncio.TaskGroup | None = None
        self._names: tuple[DnsWatch, asyncio.Task[None]] | None = None  # while the slices cannot be read

    @property
    def trouble(self) -> str:
        """Why the name that is asked instead cannot be looked up; empty if it can, or is not asked."""
        return "" if self._names is None else self._names[0].trouble

    async def run(self) -> None:
        """Until cancelled."""
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
        if endpoints:  # a name without addresses may be one whose server lost the API too: the last endpoints stay
            self._changed(endpoints)
