"""The workers that operators can name: those that discovery knows, with the control services that they have told of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.gateway.dispatch.model_pool import PREFILL, AnyLink, ModelPool
from services.gateway.request.errors import ApiError, unavailable
from services.shared.control_values import as_json

RETRY_AFTER_S = 1


class Workers(Protocol):
    """Links to all that discovery knows, by address."""

    @property
    def links(self) -> Mapping[str, AnyLink]: ...

    def pool_of(self, link: AnyLink) -> ModelPool[Any] | None:
        """That of its model, while it is connected."""


@dataclass(frozen=True, slots=True)
class KnownWorker:
    """worker_id: "" where it has not said it yet. address: of its gRPC port, "" where nobody knows it. control: address of its
    control service, "" for none. why: why it has none, in words. link: None for one that is configured by its control address
    and known by nothing else. pool: that of its model, while it is connected."""

    worker_id: str
    address: str
    control: str
    why: str = ""
    link: AnyLink | None = None
    pool: ModelPool[Any] | None = None

    def is_called(self, name: str) -> bool:
        return name in (self.worker_id, self.address, self.control)

    @property
    def names(self) -> dict[str, str]:
        """For answers."""
        address = self.address or self.control
        return {"worker": self.worker_id or address, "address": address}

    @property
    def is_read_by_others(self) -> bool:
        """It computes prompts whose KV other workers read."""
        return self.link is not None and self.link.info is not None and self.link.info.role == PREFILL

    @property
    def load(self) -> dict[str, Any] | None:
        """What it told last, and how it is seen here; None while it is not connected."""
        link, pool = self.link, self.pool
        if link is None or link.info is None or pool is None:
            return None
        seen = {"model": pool.model.name, "usable": link in pool.usable(), "open_here": len(link.open)}
        limits = {"max_running_requests": link.info.max_running_requests, "context_len": link.info.context_len}
        return {**seen, **limits, **(as_json(link.load) if link.load is not None else {})}


class WorkerDirectory:
    """controls: addresses of control services, where they are configured; none: as the workers say, on the host that each is
    reached at."""

    def __init__(self, workers: Workers, controls: Sequence[str]) -> None:
        self._workers = workers
        self._controls = controls

    def find(self, name: str | None) -> list[KnownWorker]:
        """Those of this name (worker id or address), all for None. Raises ApiError where there are none."""
        known = self._known()
        found = [worker for worker in known if name is None or worker.is_called(name)]
        if found:
            return found
        if name is None:
            raise unavailable("No worker is known.", RETRY_AFTER_S, "no_worker")
        there = ", ".join(worker.names["worker"] for worker in known)
        raise ApiError(404, f"There is no such worker; there are: {there}.", param="worker", code="worker_not_found")

    def _known(self) -> list[KnownWorker]:
        linked = [_of(link, self._workers.pool_of(link)) for link in self._workers.links.values()]
        if not self._controls:
            return sorted(linked, key=lambda worker: (worker.worker_id, worker.address))
        by_control = {worker.control: worker for worker in linked if worker.control}
        return [by_control.get(control) or KnownWorker("", "", control) for control in self._controls]


def _of(link: AnyLink, pool: ModelPool[Any] | None) -> KnownWorker:
    info = link.info or link.last_info
    if info is None:
        return KnownWorker("", link.address, "", "it has never been connected", link, pool)
    if not info.control_port:
        return KnownWorker(info.worker_id, link.address, "", "its control service is off (control_port)", link, pool)
    host = link.address.rpartition(":")[0]
    return KnownWorker(info.worker_id, link.address, f"{host}:{info.control_port}", link=link, pool=pool)
