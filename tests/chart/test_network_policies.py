"""Tests that NetworkPolicies allow exactly the connections that the release needs: requests, Redis, metrics and DNS."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rootstock_llm.services.shared.settings import ENV_PREFIX
from tests.chart.laws import offences
from tests.chart.network import NAMESPACE_NAME, Edge, Party, directions, edges, parties, passes
from tests.chart.pods import pod
from tests.chart.release import NAMESPACE, Release, ci_names, merged, render
from tests.chart.variants import ALL, VARIANTS, model

DNS = Party("dns", {"k8s-app": "kube-dns"}, {NAMESPACE_NAME: "kube-system"})
SYSTEM = Party("another of kube-system", {"k8s-app": "metrics-server"}, {NAMESPACE_NAME: "kube-system"})
PROMETHEUS = Party("prometheus", {"app": "prometheus"}, {NAMESPACE_NAME: "monitoring", "name": "monitoring"})
OF_A_USER = Party("prometheus of a user", {"app.kubernetes.io/name": "prometheus"}, {NAMESPACE_NAME: "metrics"})
CLIENT = Party("client", {"app": "chat"}, {NAMESPACE_NAME: "apps"})
NEIGHBOUR = Party("neighbour", {"app": "other"}, {NAMESPACE_NAME: NAMESPACE})
OTHER_RELEASE = Party(
    "gateway of another release",
    {"app.kubernetes.io/name": "rootstock", "app.kubernetes.io/instance": "second", "app.kubernetes.io/component": "gateway"},
    {NAMESPACE_NAME: NAMESPACE},
)
INTERNET = Party("internet", ip="203.0.113.7")
NODE_DNS = Party("dns on the node", ip="169.254.20.10")
OUTSIDE = (DNS, SYSTEM, NODE_DNS, PROMETHEUS, OF_A_USER, CLIENT, NEIGHBOUR, OTHER_RELEASE, INTERNET)
ANY = "*"  # every party outside of the release
SERVING = (7000, 7001, 7002, 7003, 7004, 7005, 7011, 7012, 7013, 7103, 8000, 8001, 9101, 9102, 9103, 9104)
PORTS = (22, 53, 5353, 80, 443, 3128, 9000, 4317, 6379, 6380, 6443, *SERVING, 8080, 9090, 9999)

REQUEST = {
    (ANY, "gateway", 8000),
    ("gateway", "tokenizer", 7001),
    ("gateway", "detokenizer", 7002),
    ("gateway", "worker", 7003),
    ("gateway", "redis", 6379),
    ("worker", "redis", 6379),
    ("gateway", "gateway", 7005),
}
MEASURED = {"tokenizer": 9101, "detokenizer": 9102, "worker": 9103, "gateway": 9104}
METRICS = {(source, name, port) for name, port in MEASURED.items() for source in ("prometheus", "prometheus of a user")}


def names(*sources: str) -> set[tuple[str, str, int]]:
    """Returns the edges from `sources` to DNS servers.

    The servers may be in kube-system, on the node (NodeLocal DNSCache) or on port 5353 (OpenShift).
    """
    return {(source, ANY, port) for source in sources for port in (53, 5353)}


NAMES = names("gateway", "worker", "test")
HELM_TEST = {("test", "gateway", 8000)}
DIAGNOSIS = {("test", "redis", 6379), ("test", ANY, 443), ("test", ANY, 6443)}
DELETION_COST = {("worker", ANY, 443), ("worker", ANY, 6443)}
WHOLE = REQUEST | METRICS | NAMES | HELM_TEST | DIAGNOSIS
OF_PREFILL = {
    ("gateway", "prefill", 7003),
    ("prefill", "redis", 6379),
    ("prometheus", "prefill", 9103),
    ("prometheus of a user", "prefill", 9103),
    ("worker", "prefill", 7103),
}
COLLECTOR = {(source, ANY, 4317) for source in ("gateway", "tokenizer", "detokenizer", "worker")}

CASES: dict[str, tuple[dict[str, Any], set[tuple[str, str, int]]]] = {
    "defaults": ({}, WHOLE),
    "two models": ({"models": [model("a"), model("b")]}, WHOLE),
    "without tests": ({"tests": {"enabled": False}}, WHOLE - HELM_TEST - DIAGNOSIS - names("test")),
    "without the diagnosis": ({"tests": {"diagnose": False}}, WHOLE - DIAGNOSIS),
    "it asks Prometheus": (VARIANTS["monitoring"], WHOLE | {("test", ANY, 80), ("test", ANY, 9090)}),
    "with the control service": ({"auth": {"controlTokenSecret": "t"}}, WHOLE | {("gateway", "worker", 7004)}),
    "operated": (VARIANTS["operated"], WHOLE | {("gateway", "worker", 7004)}),
    "gateways watch EndpointSlices": (
        {"gateway": {"discovery": "k8s"}},
        WHOLE | {("gateway", ANY, 443), ("gateway", ANY, 6443)},
    ),
    "deletion cost": ({"worker": {"deletionCost": True}}, WHOLE | DELETION_COST),
    "encrypted": (
        VARIANTS["encrypted"],
        WHOLE | OF_PREFILL | names("prefill") | {(each, "state", 6379) for each in ("gateway", "test")},
    ),
    "Redis elsewhere": (
        VARIANTS["redis-elsewhere"],
        WHOLE - {(each, "redis", 6379) for each in ("gateway", "worker", "test")}
        | {(each, ANY, 6379) for each in ("gateway", "worker", "test")}
        | {(each, ANY, 6380) for each in ("gateway", "test")},
    ),
    "state store": (VARIANTS["kept"], WHOLE | {("gateway", "state", 6379), ("test", "state", 6379)}),
    "traced": (
        {"tracing": {"otlpEndpoint": "otel.observability.svc:4317"}},
        WHOLE | COLLECTOR | names("tokenizer", "detokenizer"),
    ),
    "named clients": (
        {"networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {NAMESPACE_NAME: "apps"}}}]}},
        WHOLE - {(ANY, "gateway", 8000)} | {("client", "gateway", 8000)},
    ),
    "prometheus with other labels": (
        {"networkPolicy": {"monitoring": [{"podSelector": {"matchLabels": {"app": "other"}}}]}},
        WHOLE - METRICS | {("neighbour", target, port) for _, target, port in METRICS},
    ),
    "prometheus of one namespace": (
        {"networkPolicy": {"monitoringNamespaces": {"matchLabels": {NAMESPACE_NAME: "other"}}}},
        WHOLE - {each for each in METRICS if each[0] == OF_A_USER.name},
    ),
    "dns in one namespace": (
        {"networkPolicy": {"dns": [{"namespaceSelector": {"matchLabels": {NAMESPACE_NAME: "kube-system"}}}]}},
        WHOLE - NAMES | {(source, target, port) for source, _, port in NAMES for target in ("dns", "another of kube-system")},
    ),
    "another API server port, and connections of sidecars": (
        {
            "worker": {"deletionCost": True},
            "networkPolicy": {
                "apiServerPorts": [8080],
                "extraEgress": [{"ports": [{"port": 4317}]}],
                "extraIngress": [{"from": [{"podSelector": {"matchLabels": {"app": "other"}}}], "ports": [{"port": 9999}]}],
            },
        },
        WHOLE - {("test", ANY, 443), ("test", ANY, 6443)}
        | {("worker", ANY, 8080), ("test", ANY, 8080)}
        | {(source, ANY, 4317) for source in ("gateway", "tokenizer", "detokenizer", "worker", "redis", "test")}
        | {("neighbour", target, 9999) for target in ("gateway", "tokenizer", "detokenizer", "worker", "redis", "test")},
    ),
    "prefill workers, and additional worker egress": (
        merged(VARIANTS["apart"], {"networkPolicy": {"workerEgress": [{"ports": [{"port": 6380}]}]}}),
        WHOLE | OF_PREFILL | names("prefill") | {(source, ANY, 6380) for source in ("worker", "prefill")},
    ),
    "KV tier in shared storage": (
        VARIANTS["tiers-shared"],
        WHOLE | OF_PREFILL | names("prefill") | {(source, ANY, 6380) for source in ("worker", "prefill")},
    ),
    "prefill workers with the control service": (
        merged(VARIANTS["apart"], {"auth": {"controlTokenSecret": "t"}, "worker": {"deletionCost": True}}),
        WHOLE
        | DELETION_COST
        | {("prefill", ANY, port) for port in (443, 6443)}
        | OF_PREFILL
        | names("prefill")
        | {("gateway", "worker", 7004), ("gateway", "prefill", 7004)},
    ),
    "pods that download their model": (
        VARIANTS["fetched-by-pods"],
        WHOLE - DELETION_COST
        | {(source, ANY, 443) for source in ("tokenizer", "detokenizer", "worker")}
        | names("tokenizer", "detokenizer"),
    ),
    "tokenizers that download through a proxy": (
        VARIANTS["tokenizers-fetched"],
        WHOLE
        | {(source, ANY, port) for source in ("tokenizer", "detokenizer", "prefetch") for port in (443, 3128, 9000)}
        | names("tokenizer", "detokenizer", "prefetch"),
    ),
    "prefetch": (
        VARIANTS["prefetch"],
        WHOLE | {("prefetch", ANY, 443)} | names("prefetch"),
    ),
    "endpoint without a port": (
        merged(VARIANTS["prefetch"], {"modelCache": {"prefetch": {"hubEndpoint": "http://hub.example.com"}}}),
        WHOLE | {("prefetch", ANY, port) for port in (80, 443)} | names("prefetch"),
    ),
}


def graph(release: Release) -> set[tuple[str, str, int]]:
    """Returns the TCP edges between components. Edges that all outside parties have are replaced by one edge with ANY."""
    policies = list(release.kind("NetworkPolicy"))
    inside = parties(release)
    found = edges(policies, inside, OUTSIDE, {(port, "TCP") for port in PORTS})
    named = {(component(each.source), component(each.target), each.port) for each in found}
    outside = {each.name for each in OUTSIDE}
    for source, target, port in sorted(named):
        if source in outside and {(each, target, port) for each in outside} <= named:
            named -= {(each, target, port) for each in outside}
            named.add((ANY, target, port))
        if target in outside and {(source, each, port) for each in outside} <= named:
            named -= {(source, each, port) for each in outside}
            named.add((source, ANY, port))
    return named


def component(name: str) -> str:
    return name.partition("/")[0]


@pytest.mark.by_day(one_in=3, seed=66)
@pytest.mark.by_day(one_in=1, case="endpoint without a port")
@pytest.mark.parametrize("case", CASES)
def test_policies_allow_exactly_the_data_flow(case: str) -> None:
    values, expected = CASES[case]
    found = graph(render(values))
    assert (sorted(found - expected), sorted(expected - found)) == ([], []), (
        "connections: (allowed but not expected, expected but not allowed)"
    )


def test_policies_allow_no_udp_connections_except_dns() -> None:
    release = render({})
    found = edges(list(release.kind("NetworkPolicy")), parties(release), OUTSIDE, {(port, "UDP") for port in PORTS})
    connections = {(component(each.source), each.target, each.port) for each in found}
    assert connections == {(source, each.name, port) for source, _, port in NAMES for each in OUTSIDE}


def test_every_pod_has_policies_in_both_directions() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        policies = list(release.kind("NetworkPolicy"))
        for party in parties(release):
            if (found := directions(policies, party)) != {"Ingress", "Egress"}:
                yield f"{party.name}: {sorted(found)}"

    assert offences(law, [name for name in ALL if name != "open-network"]) == {}


def test_hosts_of_a_multi_host_worker_connect_only_to_each_other() -> None:
    values = merged(
        VARIANTS["leader-worker-set"], {"models": [model("a"), model("b", worker={"kind": "Deployment", "hosts": 1})]}
    )
    release = render(values)
    policies = list(release.kind("NetworkPolicy"))
    by_name = {party.name: party for party in parties(release)}
    leader, member, other = (by_name[name] for name in ("worker/aleaderTemplate", "worker-member/aworkerTemplate", "worker/b"))
    assert passes(policies, leader, member, 29500, "TCP") and passes(policies, member, leader, 29500, "TCP")
    assert not passes(policies, other, leader, 29500, "TCP") and not passes(policies, member, other, 29500, "TCP")
    assert not passes(policies, by_name["gateway"], member, 7003, "TCP") and passes(
        policies, by_name["gateway"], leader, 7003, "TCP"
    )


def test_only_decode_workers_reach_prefill_kv_ports() -> None:
    release = render(VARIANTS["apart-in-one-of-two-models"])
    policies = list(release.kind("NetworkPolicy"))
    inside = parties(release)
    by_name = {party.name: party for party in inside}
    assert {"worker/small", "worker/large", "prefill/large"} <= set(by_name)
    readers = {each.source for each in edges(policies, inside, OUTSIDE, {(7103, "TCP")}) if each.target == "prefill/large"}
    assert readers == {"worker/large"}
    for source in ("prefill/large", "worker/small"):
        assert not [each for each in by_name.values() if passes(policies, by_name[source], each, 7103, "TCP")], source


def test_no_policies_are_rendered_when_disabled() -> None:
    assert not list(render(VARIANTS["open-network"]).kind("NetworkPolicy"))


def test_policies_allow_connections_to_every_configured_service() -> None:
    """The gateways' variables name Services. The policies must allow gateways to connect to each of them."""

    def law(_: str, release: Release) -> Iterator[str]:
        found = graph(release)
        env = release.get("ConfigMap", pod(release, "gateway").owner["metadata"]["name"])["data"]
        for target, port in (("tokenizer", 7001), ("detokenizer", 7002), ("worker", 7003)):
            address, *more = env[f"{ENV_PREFIX}{target.upper()}S"].split(",")
            if [each.rpartition("/")[2].partition(".")[0].rpartition("-")[2] for each in more] != ["prefill"] * len(more) or (
                more and ("gateway", "prefill", port) not in found
            ):
                yield f"{target}s at {more}"
            if not address.endswith((f"-{target}.{NAMESPACE}.svc:{port}", f"-{target}.{NAMESPACE}:{port}")):
                yield f"{target}s at {address}"
            if ("gateway", target, port) not in found:
                yield f"the policies block connections to {target}"

    assert offences(law, ci_names()) == {}


POLICY: dict[str, Any] = {"spec": {"podSelector": {"matchLabels": {"a": "1"}}, "policyTypes": ["Ingress"]}}
A = Party("a", {"a": "1"}, {NAMESPACE_NAME: NAMESPACE}, {"http": 80})
EVALUATED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "nothing": ({}, set()),
    "empty rule": ({"ingress": [{}]}, {each.name for each in OUTSIDE}),
    "pod selector without a namespace selector": (
        {"ingress": [{"from": [{"podSelector": {}}]}]},
        {NEIGHBOUR.name, OTHER_RELEASE.name},
    ),
    "pod and namespace selector of one peer": (
        {"ingress": [{"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "chat"}}}]}]},
        {CLIENT.name},
    ),
    "IP block": ({"ingress": [{"from": [{"ipBlock": {"cidr": "203.0.113.0/24"}}]}]}, {INTERNET.name}),
    "IP block with an exception": (
        {"ingress": [{"from": [{"ipBlock": {"cidr": "203.0.113.0/24", "except": ["203.0.113.0/28"]}}]}]},
        set(),
    ),
    "expressions": (
        {"ingress": [{"from": [{"namespaceSelector": {"matchExpressions": [{"key": "name", "operator": "Exists"}]}}]}]},
        {PROMETHEUS.name},
    ),
    "named port": (
        {"ingress": [{"ports": [{"port": "http"}], "from": [{"podSelector": {"matchLabels": {"app": "other"}}}]}]},
        {NEIGHBOUR.name},
    ),
    "another port": ({"ingress": [{"ports": [{"port": 81}]}]}, set()),
    "port range": ({"ingress": [{"ports": [{"port": 70, "endPort": 90}]}]}, {each.name for each in OUTSIDE}),
    "another protocol": ({"ingress": [{"ports": [{"port": 80, "protocol": "UDP"}]}]}, set()),
}


@pytest.mark.by_day(one_in=3, seed=3)
@pytest.mark.parametrize("case", EVALUATED)
def test_policies_are_evaluated_as_in_kubernetes(case: str) -> None:
    rules, sources = EVALUATED[case]
    policy = {"spec": {**POLICY["spec"], **rules}}
    found = edges([policy], [A], OUTSIDE, {(80, "TCP")})
    assert {each.source for each in found if each.target == "a"} - {"a"} == sources
    assert {each for each in found if each.source == "a"} >= {Edge("a", each.name, 80) for each in OUTSIDE}, (
        "without egress rules, the pod may connect to any party"
    )
