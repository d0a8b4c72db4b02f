"""The targets of a service, as settings name them, and its endpoints, as a map of address to ready.

A target is host:port, dns:///name:port or k8s:///service.namespace:port. An address is "host:port". An IPv6 host is in brackets.
An endpoint that is not ready gets no new work, and its running work continues. An address that is not in the map does not exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

DNS = "dns:///"
KUBERNETES = "k8s:///"

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SERVICE = re.compile(rf"(?P<service>{_LABEL})(\.(?P<namespace>{_LABEL}))?", re.ASCII)
_PORT_NAME = re.compile(_LABEL, re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9_]([-A-Za-z0-9_.]*[A-Za-z0-9_.])?", re.ASCII)
_IPV6 = re.compile(r"\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._~-]+)?\]", re.ASCII)


@dataclass(frozen=True)
class StaticTarget:
    """A single address. If the host is a name, gRPC resolves it and uses one of the results."""

    address: str


@dataclass(frozen=True)
class DnsTarget:
    """All addresses of a DNS name."""

    name: str
    port: int


@dataclass(frozen=True)
class KubernetesTarget:
    """The pods behind a Service."""

    service: str
    namespace: str  # "": namespace of the gateway
    port: int | str  # port number of the pods, or the Service's name for it


Target = StaticTarget | DnsTarget | KubernetesTarget


def parse_target(target: str) -> Target:
    """Parses a target. Raises ValueError with a message for the operator."""
    if target.startswith(KUBERNETES):
        return _kubernetes(target)
    if target.startswith(DNS):
        name, port = _split(target, target.removeprefix(DNS))
        if not _HOST.fullmatch(name):
            raise ValueError(f"'{target}' has no valid DNS name. Write dns:///name:port.")
        return DnsTarget(name, _port(target, port))
    if "/" in target:
        raise ValueError(f"'{target}' is not a target. Write host:port, dns:///name:port or k8s:///service.namespace:port.")
    host, port = _split(target, target)
    if not (_HOST.fullmatch(host) or _IPV6.fullmatch(host)):
        raise ValueError(f"'{target}' has no valid host. Write host:port, with an IPv6 address in brackets.")
    _port(target, port)
    return StaticTarget(target)


def check_target(target: str) -> str:
    """Returns the target unchanged. Raises ValueError with a message for the operator if it is invalid."""
    parse_target(target)
    return target


def _kubernetes(target: str) -> KubernetesTarget:
    name, port = _split(target, target.removeprefix(KUBERNETES))
    match = _SERVICE.fullmatch(name)
    if match is None:
        raise ValueError(f"'{target}' names no Service. Write k8s:///service.namespace:port or k8s:///service:port.")
    named = not port.isdecimal()
    if named and not (_PORT_NAME.fullmatch(port) and len(port) <= 15):
        raise ValueError(f"'{target}' has no valid port. Write a number or the name of one of the Service's ports.")
    return KubernetesTarget(match["service"], match["namespace"] or "", port if named else _port(target, port))


def _split(target: str, rest: str) -> tuple[str, str]:
    name, colon, port = rest.rpartition(":")
    if not colon:
        raise ValueError(f"'{target}' has no port.")
    return name, port


def _port(target: str, port: str) -> int:
    number = int(port) if re.fullmatch(r"[0-9]{1,5}", port) else 0
    if not 1 <= number <= 65535:
        raise ValueError(f"'{target}' has no port from 1 to 65535.")
    return number


Endpoints = Mapping[str, bool]


def join_address(host: str, port: int) -> str:
    """Returns "host:port". `host` may be a name, an IPv4 address or an IPv6 address without brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def merge_endpoints(parts: Iterable[Endpoints]) -> dict[str, bool]:
    """Merges endpoints. An address is ready if it is ready in any part."""
    merged: dict[str, bool] = {}
    for part in parts:
        for address, ready in part.items():
            merged[address] = merged.get(address, False) or ready
    return merged
