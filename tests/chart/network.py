"""Evaluates NetworkPolicies like a network plugin: which pods may open connections to each other, on which ports.

A connection passes if the source's egress policies and the target's ingress policies both allow it. If no policy
of a direction selects a pod, the pod is open in this direction.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chart.pods import pods, selects
from tests.chart.release import NAMESPACE, Object, Release

NAMESPACE_NAME = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class Party:
    """A pod of any namespace with its named ports, or an address outside of the cluster (`ip`)."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: Mapping[str, str] = field(default_factory=dict)  # labels of its namespace
    ports: Mapping[str, int] = field(default_factory=dict)  # port numbers by name
    ip: str = ""  # address outside of the cluster; "" for a pod

    @property
    def in_release_namespace(self) -> bool:
        """Whether the party is in the release's namespace. Only then can the release's policies select it."""
        return self.namespace.get(NAMESPACE_NAME) == NAMESPACE


@dataclass(frozen=True, order=True)
class Edge:
    source: str
    target: str
    port: int
    protocol: str = "TCP"


def parties(release: Release) -> list[Party]:
    """Returns a party per component and model of the release."""
    found: dict[str, Party] = {}
    for pod in pods(release):
        name = f"{pod.component}/{pod.model}" if pod.model else pod.component
        name += pod.role.split(" ")[1] if " " in pod.role else ""
        found[name] = Party(name, pod.labels, {NAMESPACE_NAME: NAMESPACE}, pod.ports())
    return list(found.values())


def edges(
    policies: Sequence[Object], inside: Sequence[Party], outside: Sequence[Party], ports: set[tuple[int, str]]
) -> set[Edge]:
    """Returns the allowed connections on `ports` that begin or end at a party of `inside`."""
    everyone = [*inside, *outside]
    own = {each.name for each in inside}
    return {
        Edge(source.name, target.name, port, protocol)
        for source in everyone
        for target in everyone
        if source.name in own or target.name in own
        for port, protocol in ports
        if passes(policies, source, target, port, protocol)
    }


def passes(policies: Sequence[Object], source: Party, target: Party, port: int, protocol: str) -> bool:
    out = _allows(policies, "Egress", source, target, target, port, protocol)
    return out and _allows(policies, "Ingress", target, source, target, port, protocol)


def directions(policies: Sequence[Object], party: Party) -> set[str]:
    """Returns the directions in which policies select a party."""
    return {each for policy in policies for each in _types(policy) if selects(policy["spec"]["podSelector"], party.labels)}


def _types(policy: Object) -> list[str]:
    spec = policy["spec"]
    return list(spec.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in spec else [])])


def _allows(
    policies: Sequence[Object], direction: str, owner: Party, peer: Party, target: Party, port: int, protocol: str
) -> bool:
    if not owner.in_release_namespace or direction not in directions(policies, owner):
        return True
    return any(
        _any_peer_matches(rule.get("from" if direction == "Ingress" else "to"), peer)
        and _port_matches(rule.get("ports"), target, port, protocol)
        for rule in _rules(policies, direction, owner)
    )


def _rules(policies: Sequence[Object], direction: str, owner: Party) -> Iterator[Mapping[str, Any]]:
    for policy in policies:
        spec = policy["spec"]
        if direction in _types(policy) and selects(spec["podSelector"], owner.labels):
            yield from spec.get(direction.lower()) or []


def _any_peer_matches(peers: Sequence[Mapping[str, Any]] | None, party: Party) -> bool:
    return not peers or any(_peer_matches(peer, party) for peer in peers)


def _peer_matches(peer: Mapping[str, Any], party: Party) -> bool:
    if "ipBlock" in peer:
        block = peer["ipBlock"]
        if not party.ip:  # whether an ipBlock applies to pods' addresses depends on the network plugin
            return False
        address = ipaddress.ip_address(party.ip)
        excepted = any(address in ipaddress.ip_network(each) for each in block.get("except") or [])
        return address in ipaddress.ip_network(block["cidr"]) and not excepted
    if party.ip:
        return False
    namespaces = peer.get("namespaceSelector")
    in_namespace = party.in_release_namespace if namespaces is None else selects(namespaces, party.namespace)
    return in_namespace and selects(peer.get("podSelector", {}), party.labels)


def _port_matches(ports: Sequence[Mapping[str, Any]] | None, target: Party, port: int, protocol: str) -> bool:
    if not ports:
        return True
    for each in ports:
        if each.get("protocol", "TCP") != protocol:
            continue
        given = each.get("port")
        number = target.ports.get(given) if isinstance(given, str) else given
        if given is None or number == port or (isinstance(given, int) and given <= port <= each.get("endPort", given)):
            return True
    return False
