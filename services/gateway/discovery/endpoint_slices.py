"""Converts the EndpointSlices of a Service to endpoints, from the JSON of the API discovery.k8s.io/v1."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from services.gateway.discovery.endpoints import join

SERVICE_LABEL = "kubernetes.io/service-name"
HEADLESS_LABEL = "service.kubernetes.io/headless"

# A pod of a dual-stack Service is in one slice of each family. Its address of the first of these families is used.
_FAMILIES = ("IPv4", "IPv6", "FQDN")

Slice = Mapping[str, Any]


def endpoints_of(slices: Iterable[Slice], port: int | str) -> dict[str, bool]:
    """Returns the endpoints of all slices. An endpoint is ready if its pod is ready and not terminating.

    Args:
        port: Port number of the pods, or a port name. A name is looked up in each slice, and slices without it are ignored.
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
            # All addresses of an endpoint lead to the same pod. An endpoint that moves between slices is in both for a time.
            address = join(addresses[0], number)
            found[address] = found.get(address, False) or _is_ready(endpoint.get("conditions") or {})
    return found


def has_names(slices: Iterable[Slice]) -> bool:
    """Returns whether the Service is headless by its slices, so that its DNS name has the addresses of all ready pods."""
    labels = [slice_.get("metadata", {}).get("labels") or {} for slice_ in slices]
    return bool(labels) and all(HEADLESS_LABEL in each for each in labels)


def number_of(slices: Iterable[Slice], port: int | str) -> int | None:
    """Returns the number of a port. None if the slices have no port with this name, or different numbers for it."""
    if isinstance(port, int):
        return port
    numbers = {_port_named(slice_, port) for slice_ in slices} - {None}
    return numbers.pop() if len(numbers) == 1 else None


def _is_ready(conditions: Mapping[str, Any]) -> bool:
    """Returns whether an endpoint may get new work. An unset `ready` means true.

    `serving` is ignored, because a terminating pod gets no new work.
    """
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
