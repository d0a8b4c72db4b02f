"""The workers that operators can name: those that discovery knows, with the control services that they have told of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.peers.worker_link import WorkerLink
from services.gateway.request.errors import ApiError, unavailable
from services.shared.control_values import as_json

RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class KnownWorker:
    """worker_id: "" where it has not said it yet. address: of its gRPC port, "" where nobody knows it. control: address of its
    control service, "" for none. why: why it has none, in words. link: None for one that is configured by its control address
    and known by nothing else."""

    worker_id: str
    address: str
    control: str
    why: str = ""
    link: WorkerLink | None = None

    def is_called(self, name: str) -> bool:
        return name in (self.worker_id, self.address, self.control)

    @property
    def names(self) -> dict[str, str]:
        """For answers."""
        address = self.address or self.control
        return {"worker": self.worker_id or address, "address": address}

    @property
    def load(self) -> dict[str, Any] | None:
        """What it told last, and how it is seen here; None while it is not connected."""
        link = self.link
        if link is None or link.info is None or link.pool is None:
            return None
        seen = {"model": link.pool.model.name, "usable": link in link.pool.usable(), "open_here": len(link.open)}
        limits = {"max_running_requests": link.info.max_running_requests, "context_len": link.info.context_len}
        return {**seen, **limits, **(as_json(link.load) if link.load is not None else {})}


class WorkerDirectory:
    """links: to all workers that are known. controls: addresses of control services, where they are configured; none: as the
    workers say, on the host that each is reached at."""

    def __init__(self, links: Callable[[], Collection[WorkerLink]], controls: Sequence[str]) -> None:
        self._links = links
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
        linked = [_of(link) for link in self._links()]
        if not self._controls:
            return sorted(linked, key=lambda worker: (worker.worker_id, worker.address))
        by_control = {worker.control: worker for worker in linked if worker.control}
        return [by_control.get(control) or KnownWorker("", "", control) for control in self._controls]


def _of(link: WorkerLink) -> KnownWorker:
    info = link.info or link.last_info
    if info is None:
        return KnownWorker("", link.address, "", "it has never been connected", link)
    if not info.control_port:
        return KnownWorker(info.worker_id, link.address, "", "its control service is off (control_port)", link)
    host = link.address.rpartition(":")[0]
    return KnownWorker(info.worker_id, link.address, f"{host}:{info.control_port}", link=link)
