"""The Prometheus operator and a real Prometheus accept the chart's monitors and rules, and alerts fire and clear."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import BASE
from tests.cluster.kubernetes import Cluster, Release, as_pod, until
from tests.cluster.load import load_on
from tests.cluster.spaces import namespace
from tests.cluster.values import FAKE, MONITORED

SERVICES = ("gateway", "tokenizer", "detokenizer", "worker")
SOON_S = 240.0


@pytest.fixture(scope="module", autouse=True)
def operator(cluster: Cluster) -> None:
    if cluster.local:
        cluster.addon("prometheus")


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Iterator[Release]:
    """A release that Prometheus scrapes, for all tests of this file. A test must undo its changes of the release."""
    with namespace(cluster, "monitoring-of-a-release") as space:
        made = Release(cluster, "rootstock", space, BASE)
        patient = {"replicas": 1, "queueTimeoutSeconds": 300}
        monitoring = {**MONITORED, "dashboards": {"enabled": True}}
        made.install({"worker": {"replicas": 1, "settings": FAKE}, "gateway": patient, "monitoring": monitoring})
        until(lambda: Prometheus(cluster).all_up(space), "all targets to respond", SOON_S)
        yield made


class Prometheus:
    """API client of the Prometheus in the namespace `monitoring`."""

    def __init__(self, cluster: Cluster) -> None:
        pods = cluster.get("-n", "monitoring", "pods", "-l", "app.kubernetes.io/name=prometheus")["items"]
        (pod, *_) = [each for each in map(as_pod, pods) if each.ready and not each.leaving]
        self._url = f"http://{pod.ip}:9090/api/v1"

    def get(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self._url}/{path}", params=parameters, timeout=30)
        answer.raise_for_status()
        return answer.json()["data"]

    def targets(self, space: str) -> dict[str, str]:
        """Returns the health of the targets in a namespace, by pod and URL."""
        found = [
            each for each in self.get("targets", state="active")["activeTargets"] if each["labels"].get("namespace") == space
        ]
        return {f"{each['labels']['pod']} {each['scrapeUrl']}": each["health"] for each in found}

    def all_up(self, space: str) -> bool:
        """Whether there are at least four targets, one per service, and all targets respond."""
        targets = self.targets(space)
        return len(targets) >= len(SERVICES) and set(targets.values()) == {"up"}

    def rules(self, space: str) -> list[dict[str, Any]]:
        groups = [each for each in self.get("rules")["groups"] if f"/{space}-" in each["file"]]
        return [rule for group in groups for rule in group["rules"]]

    def alerts(self) -> set[str]:
        """Returns the names of all firing alerts in the cluster."""
        return {each["labels"]["alertname"] for each in self.get("alerts")["alerts"] if each["state"] == "firing"}

    def firing(self, space: str) -> set[str]:
        alerts = self.get("alerts")["alerts"]
        return {
            each["labels"]["alertname"]
            for each in alerts
            if each["state"] == "firing" and each["labels"].get("namespace") == space
        }


def shorten_delays(release: Release) -> None:
    """Shortens the `for` of all alerts from minutes to five seconds."""
    found = release.get("prometheusrule", release.object_name("").rstrip("-"))
    groups = found["spec"]["groups"]
    for rule in (rule for group in groups for rule in group["rules"] if "for" in rule):
        rule["for"] = "5s"
    release.kubectl("patch", "prometheusrule", release.name, "--type=merge", "-p", json.dumps({"spec": {"groups": groups}}))


def test_prometheus_accepts_monitors_rules_and_dashboards(
    release: Release, cluster: Cluster, proved: Callable[[str], None]
) -> None:
    prometheus, space = Prometheus(cluster), release.namespace
    with load_on(release, 2) as load:
        until(lambda: prometheus.rules(space), "the rules to be loaded", SOON_S)
        until(lambda: all(rule["lastEvaluation"] > "2" for rule in prometheus.rules(space)), "all rules to be evaluated", SOON_S)
    load.check()
    rules = prometheus.rules(space)
    assert [rule for rule in rules if rule["health"] == "err"] == []
    boards = release.get("configmaps", "-l", "grafana_dashboard=1")["items"]
    assert boards and all(json.loads(text)["panels"] for board in boards for text in board["data"].values())
    alerts = sum(rule["type"] == "alerting" for rule in rules)
    targets = len(prometheus.targets(space))
    proved(f"{targets} targets up, {len(rules)} rules without an error, {alerts} of them alerts, {len(boards)} dashboards")


def test_no_ready_worker_alert_fires_and_clears(release: Release, cluster: Cluster, proved: Callable[[str], None]) -> None:
    """Scales to zero workers under load, then to one. The requests wait until the worker is ready."""
    prometheus, space = Prometheus(cluster), release.namespace
    shorten_delays(release)
    name = f"deployment/{release.object_name('worker', 'demo')}"
    fired = "RootstockNoReadyWorker"
    with load_on(release, 2) as load:
        until(lambda: load.ended >= 2, "the first completed requests")
        until(lambda: fired not in prometheus.firing(space), "an earlier alert to clear", SOON_S)
        release.kubectl("scale", name, "--replicas=0")
        fires = until(lambda: fired in prometheus.firing(space), "the alert to fire", SOON_S)
        release.kubectl("scale", name, "--replicas=1")
        clears = until(lambda: fired not in prometheus.firing(space), "the alert to clear", SOON_S)
    proved(f"no worker: {fired} fired after {fires:.0f} s, cleared {clears:.0f} s after scaling up (`for`: 5 s); {load.check()}")


def test_target_down_alert_fires_and_clears(release: Release, cluster: Cluster, proved: Callable[[str], None]) -> None:
    """A NetworkPolicy blocks all connections to tokenizers, including those of Prometheus. The test sends no requests."""
    prometheus, space = Prometheus(cluster), release.namespace
    shorten_delays(release)
    fired = "RootstockTargetDown"
    until(lambda: prometheus.all_up(space) and fired not in prometheus.firing(space), "all targets up and no alert", SOON_S)
    policy = release.get("networkpolicy", release.object_name("tokenizer"))
    name, ingress = policy["metadata"]["name"], policy["spec"]["ingress"]
    release.kubectl("patch", "networkpolicy", name, "--type=merge", "-p", json.dumps({"spec": {"ingress": []}}))
    fires = until(lambda: fired in prometheus.firing(space), "the alert to fire", SOON_S)
    release.kubectl("patch", "networkpolicy", name, "--type=merge", "-p", json.dumps({"spec": {"ingress": ingress}}))
    clears = until(lambda: fired not in prometheus.firing(space), "the alert to clear", SOON_S)
    assert prometheus.all_up(space), "the alert must clear only when all targets respond again"
    proved(f"tokenizers cut off from Prometheus: {fired} fired after {fires:.0f} s, cleared after {clears:.0f} s (`for` of 5 s)")
