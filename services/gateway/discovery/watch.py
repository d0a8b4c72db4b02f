"""The endpoints that a service's targets stand for, all targets merged. Everything is told on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from services.gateway.discovery import dns
from services.gateway.discovery.endpoints import Endpoints, merge
from services.gateway.discovery.targets import DnsTarget, KubernetesTarget, StaticTarget, check_target, parse
from services.shared.observe.log_fields import fields

if TYPE_CHECKING:
    from services.gateway.discovery.kubernetes_service import KubernetesService
    from services.gateway.discovery.kubernetes_watch import LoadClient

__all__ = ["Discovery", "check_target"]

logger = logging.getLogger(__name__)

DNS_REFRESH_S = 2.0


class Discovery:
    """Follows the targets of one service. `changed` gets the whole map, once at the start and then whenever it differs."""

    def __init__(
        self,
        targets: Sequence[str],
        changed: Callable[[Mapping[str, bool]], None],
        *,
        dns_refresh_s: float = DNS_REFRESH_S,
        resolve: dns.Resolve = dns.resolve,
        load_client: LoadClient | None = None,
    ) -> None:
        """`load_client` makes the client for the Kubernetes API; by default that of the pod's cluster, or of the kubeconfig file.

        Raises ValueError for a target that is none.
        """
        self._targets = [parse(target) for target in dict.fromkeys(targets)]
        self._changed = changed
        self._dns_refresh_s = dns_refresh_s
        self._resolve = resolve
        self._load_client = load_client
        self._parts: dict[int, Endpoints] = {}  # by the target's place
        self._told: dict[str, bool] | None = None
        self._names: list[dns.DnsWatch | KubernetesService] = []

    def trouble(self) -> str:
        """Why a name of the targets cannot be looked up, empty if all can."""
        return next(filter(None, (watch.trouble for watch in self._names)), "")

    async def run(self) -> None:
        """Until cancelled. Addresses that need no looking up are told before anything is waited for."""
        async with asyncio.TaskGroup() as group:
            for place, target in enumerate(self._targets):
                if isinstance(target, StaticTarget):
                    self._parts[place] = {target.address: True}
            self._tell()
            for place, target in enumerate(self._targets):
                if isinstance(target, DnsTarget):
                    watch = dns.DnsWatch(target, self._dns_refresh_s, self._resolve, self._hear(place))
                    self._names.append(watch)
                    group.create_task(watch.run())
                elif isinstance(target, KubernetesTarget):
                    service = self._service(target, self._hear(place))
                    self._names.append(service)
                    group.create_task(service.run())
            await asyncio.get_running_loop().create_future()

    def _service(self, target: KubernetesTarget, heard: Callable[[Endpoints], None]) -> KubernetesService:
        # Not before it is needed: the client is the gateway's largest import.
        from services.gateway.discovery.kubernetes_api import load_client
        from services.gateway.discovery.kubernetes_service import KubernetesService

        return KubernetesService(target, heard, self._dns_refresh_s, self._resolve, self._load_client or load_client)

    def _hear(self, place: int) -> Callable[[Endpoints], None]:
        def heard(endpoints: Endpoints) -> None:
            self._parts[place] = endpoints
            self._tell()

        return heard

    def _tell(self) -> None:
        merged = merge(self._parts[place] for place in sorted(self._parts))
        if merged == self._told:
            return
        before, self._told = self._told or {}, merged
        added, gone = sorted(merged.keys() - before.keys()), sorted(before.keys() - merged.keys())
        logger.info("endpoints: %d, %d ready", len(merged), sum(merged.values()), extra=fields(added=added, gone=gone))
        self._changed(dict(merged))
