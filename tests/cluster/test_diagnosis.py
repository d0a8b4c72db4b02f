"""`helm test` on real installations: it names each fault with a remedy, and finds no fault in a working installation."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import pytest

from tests.cluster.conftest import BASE
from tests.cluster.kubernetes import Cluster, CommandFailed, Object, Release
from tests.cluster.overlays import merged
from tests.cluster.side_by_side import collected_names, result_of, side_by_side
from tests.cluster.spaces import namespace
from tests.cluster.values import FAKE

LITTLE: Object = {"resources": {"requests": {"cpu": "20m"}}}
ONE: Object = {
    **dict.fromkeys(("gateway", "tokenizer", "detokenizer", "redis"), LITTLE),
    "worker": {"replicas": 1, **LITTLE},
    "tests": {"patienceSeconds": 90},
}
NO_MODEL = merged(ONE, {"worker": {"settings": FAKE}})
PATIENT_S = "300s"  # time limit of `helm test`
AT_ONCE = 2  # concurrent installations, which mostly wait; other tests run in parallel


@dataclass(frozen=True)
class Broken:
    """A fault of an installation, and the texts that the report must contain."""

    check: str  # name of the check that reports the fault
    said: str  # text of the fault
    mend: str  # text of the remedy
    values: Object = field(default_factory=dict)  # merged over ONE or NO_MODEL
    before: Callable[[Release], None] = lambda release: None  # changes the namespace before the installation
    after: Callable[[Release], None] = lambda release: None  # changes the namespace after the installation


def apply(release: Release, *objects: Object) -> None:
    for each in objects:
        release.kubectl("apply", "-f", "-", given=json.dumps(each))


def policy(name: str, spec: Object) -> Object:
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": name}, "spec": spec}


def secret_without_its_key(release: Release) -> None:
    data = {"TOKEN": base64.b64encode(b"t").decode()}
    apply(release, {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "control"}, "data": data})


def claim_of_one_node(release: Release) -> None:
    spec = {"accessModes": ["ReadWriteOnce"], "storageClassName": "no-such-class", "resources": {"requests": {"storage": "1Gi"}}}
    apply(release, {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "models"}, "spec": spec})


def claim_on_two_nodes(release: Release) -> None:
    """Creates a ReadWriteOnce claim, which only one node may use. The folder of the claim's volume exists on every node."""
    volume = f"{release.namespace}-models"
    spec = {"accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": volume}
    of = {"claimRef": {"namespace": release.namespace, "name": "models"}, "hostPath": {"path": "/tmp"}}
    capacity: Object = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "persistentVolumeReclaimPolicy": "Retain",
    }
    apply(
        release,
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume}, "spec": {**capacity, **of}},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "models"},
            "spec": {**spec, "resources": {"requests": {"storage": "1Gi"}}},
        },
    )


def other_ports(release: Release) -> None:
    name = release.object_name("gateway")
    port = [{"op": "replace", "path": "/spec/ports/0/name", "value": "web"}]
    release.kubectl("patch", "service", name, "--type=json", "-p", json.dumps(port))


def cut_off(release: Release) -> None:
    """Blocks connections to tokenizers by a policy outside the chart. Deletes the chart's policy, which allows connections."""
    release.kubectl("delete", "networkpolicy", release.object_name("tokenizer"))
    chosen = {"matchLabels": {"app.kubernetes.io/component": "tokenizer"}}
    apply(release, policy("somebody-elses", {"podSelector": chosen, "policyTypes": ["Ingress"]}))
    release.kubectl("rollout", "restart", f"deployment/{release.object_name('gateway')}")
    release.kubectl("rollout", "status", f"deployment/{release.object_name('gateway')}", "--timeout=120s")


CLAIMED: Object = {
    "modelCache": {"type": "pvc", "pvc": {"existingClaim": "models"}},
    "models": [{"name": "demo", "path": "/models/demo"}],
}
APART: Object = {
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {
                "topologyKey": "kubernetes.io/hostname",
                "labelSelector": {"matchLabels": {"app.kubernetes.io/component": "tokenizer"}},
            }
        ]
    }
}
ON_TWO_NODES: Object = {**CLAIMED, "tokenizer": {"replicas": 2, "affinity": APART}}
NO_DNS: Object = {"networkPolicy": {"dns": [{"ipBlock": {"cidr": "192.0.2.1/32"}}]}}
MODEL: Object = {"models": [{"name": "demo", "path": "/app/models/nothing"}]}
SCALED: Object = {"worker": {"autoscaling": {"enabled": True, "minReplicas": 1, "maxReplicas": 2}}}
URL = "http://prometheus-server.monitoring.svc:80"

BROKEN: dict[str, Broken] = {
    "no scrape": Broken(
        "scrape",
        "Prometheus has no series of",
        "monitoring.podMonitor.enabled",
        {**SCALED, "autoscaling": {"prometheusUrl": URL}},
    ),
    "no adapter": Broken("scaling", "no API of the cluster serves", "install prometheus-adapter", SCALED),
    "DNS at another port": Broken("dns", "no name resolves", "5353", NO_DNS),
    "missing Secret": Broken(
        "secrets",
        "Secret api-keys, which auth.apiKeysSecret names, does not exist",
        "create secret generic api-keys",
        {"auth": {"apiKeysSecret": "api-keys"}},
    ),
    "Secret without its key": Broken(
        "secrets",
        "Secret control (auth.controlTokenSecret) has no key token; it has TOKEN",
        "add the key",
        {"auth": {"controlTokenSecret": "control"}},
        secret_without_its_key,
    ),
    "claim that is not bound": Broken(
        "storage", "claim models of no-such-class is not bound", "StorageClass", CLAIMED, claim_of_one_node
    ),
    "RWO shared over nodes": Broken(
        "storage", "is ReadWriteOnce, a volume of one node, and is used by", "ReadWriteMany", ON_TWO_NODES, claim_on_two_nodes
    ),
    "Redis without memory": Broken("redis", "has no memory left", "raise redis.maxMemory", {"redis": {"maxMemory": "1kb"}}),
    "missing RuntimeClass": Broken(
        "gpus", "RuntimeClass no-such-class is missing", "get runtimeclass", {"worker": {"runtimeClassName": "no-such-class"}}
    ),
    "model that never loads": Broken("pods", "ended with status", "--previous", MODEL),
    "port of another name": Broken("services", "gateways look up", "undo the patch", after=other_ports),
    "policy of somebody else": Broken("models", "the gateway reaches none of them", "somebody-elses", after=cut_off),
}


WELL = "well"
WITH_MODEL = (WELL, "model that never loads")
FAULTS = {WELL: Broken("", "", ""), **BROKEN}
Diagnoses = Mapping[str, Future[tuple[bool, str]]]


@pytest.fixture(scope="module")
def diagnoses(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Diagnoses]:
    if cluster.local:
        cluster.addon("prometheus")
    names = [WELL, *collected_names(request, test_helm_test_names_the_fault.__name__)]
    with side_by_side({name: partial(diagnosis, cluster, name) for name in names}, AT_ONCE) as running:
        yield running


def diagnosis(cluster: Cluster, name: str) -> tuple[bool, str]:
    """Returns whether `helm test` passes on an installation with this fault, and the report."""
    fault = FAULTS[name]
    with ExitStack() as gone, namespace(cluster, f"install-{name.lower().replace(' ', '-')}") as space:
        release = Release(cluster, "rootstock", space, BASE)
        gone.callback(cluster.kubectl, "delete", "persistentvolume", f"{space}-models", "--ignore-not-found", "--wait=false")
        fault.before(release)
        values = merged(ONE if name in WITH_MODEL else NO_MODEL, fault.values)
        release.install(values, wait=name == WELL or fault.after is not Broken.after)
        fault.after(release)
        job = f"{release.name}-test-diagnosis"
        try:
            cluster.helm("test", release.name, "-n", space, "--timeout", PATIENT_S, "--filter", f"name={job}")
            passed = True
        except CommandFailed:
            passed = False
        return passed, release.kubectl("logs", job)


def test_helm_test_passes_on_a_working_installation(diagnoses: Diagnoses, proved: Callable[[str], None]) -> None:
    passed, report = result_of(diagnoses[WELL])
    assert passed, report
    assert "BROKEN" not in report and "unknown" not in report, report
    proved(f"helm test finds nothing: {report.strip().splitlines()[-1]}")


@pytest.mark.parametrize("name", BROKEN)
def test_helm_test_names_the_fault(name: str, diagnoses: Diagnoses, proved: Callable[[str], None]) -> None:
    fault = BROKEN[name]
    passed, report = result_of(diagnoses[name])
    assert not passed, report
    lines = report.splitlines()
    found = [at for at, line in enumerate(lines) if line.split()[1:2] == [fault.check] and fault.said in line]
    assert found, report
    assert fault.mend in lines[found[-1] + 1], report
    proved(f"{name}: {lines[found[-1]].strip()}")
