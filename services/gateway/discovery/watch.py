"""Follows the endpoints of all targets of a service, on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rootstock_llm.services.gateway.discovery import dns
from rootstock_llm.services.gateway.discovery.endpoints import (
    DnsTarget,
    Endpoints,
    KubernetesTarget,
    StaticTarget,
    check_target,
    merge_endpoints,
    parse_target,
)
from rootstock_llm.services.shared.observe.log_fields import fields

if TYPE_CHECKING:
    from rootstock_llm.services.gateway.discovery.kubernetes_watch import KubernetesService, LoadClient

__all__ = ["Discovery", "check_target"]

logger = logging.getLogger(__name__)

DNS_REFRESH_S = 2.0  # pause between two look-ups of a DNS name, in seconds


class Discovery:
    """Follows the targets of one service, and reports their merged endpoints."""

    def __init__(
        self,
        targets: Sequence[str],
        changed: Callable[[Mapping[str, bool]], None],
        *,
        dns_refresh_s: float = DNS_REFRESH_S,
        resolve: dns.Resolve = dns.resolve,
        load_client: LoadClient | None = None,
    ) -> None:
        """Makes the discovery.

        Args:
            changed: Called with all endpoints, once at the start and then after every change.
            dns_refresh_s: Pause between two look-ups of a DNS name, in seconds.
            resolve: Looks up a DNS name.
            load_client: Makes the client of the Kubernetes API. By default, kubernetes_api.load_client().

        Raises:
            ValueError: A target is invalid.
        """
        self._targets = [parse_target(target) for target in dict.fromkeys(targets)]
        self._changed = changed
        self._dns_refresh_s = dns_refresh_s
        self._resolve = resolve
        self._load_client = load_client
        self._parts: dict[int, Endpoints] = {}  # by index of the target
        self._reported: dict[str, bool] | None = None
        self._names: list[dns.DnsWatch | KubernetesService] = []

    def trouble(self) -> str:
        """Returns the error of a DNS name that cannot be looked up; "" if all DNS names can be looked up."""
        return next(filter(None, (watch.trouble for watch in self._names)), "")

    async def run(self) -> None:
        """Follows the targets until cancelled. Reports static addresses first, before any wait."""
        async with asyncio.TaskGroup() as group:
            for index, target in enumerate(self._targets):
                if isinstance(target, StaticTarget):
                    self._parts[index] = {target.address: True}
            self._report()
            for index, target in enumerate(self._targets):
                if isinstance(target, DnsTarget):
                    watch = dns.DnsWatch(target, self._dns_refresh_s, self._resolve, self._setter(index))
                    self._names.append(watch)
                    group.create_task(watch.run())
                elif isinstance(target, KubernetesTarget):
                    service = self._service(target, self._setter(index))
                    self._names.append(service)
                    group.create_task(service.run())
            await asyncio.get_running_loop().create_future()

    def _service(self, target: KubernetesTarget, changed: Callable[[Endpoints], None]) -> KubernetesService:
        # Imported here, because the Kubernetes client is the gateway's largest import.
        from rootstock_llm.services.gateway.discovery.kubernetes_api import load_client
        from rootstock_llm.services.gateway.discovery.kubernetes_watch import KubernetesService

        return KubernetesService(target, changed, self._dns_refresh_s, self._resolve, self._load_client or load_client)

    def _setter(self, index: int) -> Callable[[Endpoints], None]:
        def changed(endpoints: Endpoints) -> None:
            self._parts[index] = endpoints
            self._report()

        return changed

    def _report(self) -> None:
        merged = merge_endpoints(self._parts[index] for index in sorted(self._parts))
        if merged == self._reported:
            return
        before, self._reported = self._reported or {}, merged
        added, gone = sorted(merged.keys() - before.keys()), sorted(before.keys() - merged.keys())
        logger.info("endpoints changed: %d, %d ready", len(merged), sum(merged.values()), extra=fields(added=added, gone=gone))
        self._changed(dict(merged))
