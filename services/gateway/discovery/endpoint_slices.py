"""EndpointSlices of one Service → its endpoints. Plain functions over the API's JSON (discovery.k8s.io/v1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from services.gateway.discovery.endpoints import join

SERVICE_LABEL = "kubernetes.io/service-name"
HEADLESS_LABEL = "service.kubernetes.io/headless"

# A pod of a dual-stack Service stands in one slice of each family; the first family that it has is taken.
_FAMILIES = ("IPv4", "IPv6", "FQDN")

Slice = Mapping[str, Any]


def endpoints_of(slices: Iterable[Slice], port: int | str) -> dict[str, bool]:
    """All slices merged. A port's number is the pods' own; a name is looked up in each slice, and slices without it are left out.

    Ready: the endpoint is ready and not terminating.
    """
    found: dict[str, bool] = {}
    family_of: dict[str, str] = {}  # by pod
    for slice_ in sorted(slices, key=_family_rank):
        number = port if isinstance(port, int) else _port_named(slice_, port)
        if number is None:
            continue
        family = str(slice_.get("addressType", ""))
        for endpoint in slice_.get("endpoints") or ():
            addresses = endpoint.get("addresses")
            if not addresses:
                continue
            pod = (endpoint.get("targetRef") or {}).get("uid") or addresses[0]
            if family_of.setdefault(pod, family) != family:
                continue
            # The addresses of one endpoint are equal ways to one pod. While it moves between slices it stands in two.
            address = join(addresses[0], number)
            found[address] = found.get(address, False) or _is_ready(endpoint.get("conditions") or {})
    return found


def has_names(slices: Iterable[Slice]) -> bool:
    """Whether the Service's name has each ready pod's address in DNS: its slices say that it is headless. False without any."""
    labels = [slice_.get("metadata", {}).get("labels") or {} for slice_ in slices]
    return bool(labels) and all(HEADLESS_LABEL in each for each in labels)


def number_of(slices: Iterable[Slice], port: int | str) -> int | None:
    """The one number that a port has in all slices that know it; None where they differ or none does. A number is its own."""
    if isinstance(port, int):
        return port
    numbers = {_port_named(slice_, port) for slice_ in slices} - {None}
    return numbers.pop() if len(numbers) == 1 else None


def _is_ready(conditions: Mapping[str, Any]) -> bool:
    """An unset `ready` means yes. `serving` is left out: what serves while it terminates gets nothing new."""
    return conditions.get("ready") is not False and not conditions.get("terminating")


def _family_rank(slice_: Slice) -> tuple[int, str]:
    family = slice_.get("addressType")
    rank = _FAMILIES.index(family) if family in _FAMILIES else len(_FAMILIES)
    return rank, str(slice_.get("metadata", {}).get("name", ""))


def _port_named(slice_: Slice, name: str) -> int | None:
    for port in slice_.get("ports") or ():
        if (port.get("name") or "") == name and port.get("port"):
            return int(port["port"])
    return None
