"""If the cluster enforces NetworkPolicies, a pod outside the release can reach only the gateway's HTTP port."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.cluster.conftest import Install
from tests.cluster.kubernetes import Cluster, Object, Release, until
from tests.cluster.load import load_on
from tests.cluster.spaces import namespace
from tests.cluster.values import FAKE

LOOK = """
import json, socket, sys
reached = []
for name, host, port in json.loads(sys.argv[1]):
    with socket.socket() as probe:
        probe.settimeout(2)
        if probe.connect_ex((host, port)) == 0:
            reached.append(name)
print(json.dumps(reached))
"""


def ports_of(release: Release) -> list[tuple[str, str, int]]:
    """Returns (component and port name, address, port) of each declared port of the release's pods."""
    out = []
    for pod in release.get("pods", "-l", f"app.kubernetes.io/instance={release.name}")["items"]:
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        for container in pod["spec"]["containers"]:
            out += [
                (f"{component} {port['name']}", pod["status"]["podIP"], port["containerPort"])
                for port in container.get("ports", ())
            ]
    return out


def stranger(image: str, targets: list[tuple[str, str, int]]) -> Object:
    container = {
        "name": "stranger",
        "image": image,
        "command": ["python", "-c", LOOK, json.dumps(targets)],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10099,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    metadata = {"name": "stranger", "labels": {"app": "stranger"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"restartPolicy": "Never", "containers": [container]},
    }


def reached_from(cluster: Cluster, space: str, image: str, targets: list[tuple[str, str, int]]) -> set[str]:
    cluster.kubectl("-n", space, "apply", "-f", "-", given=json.dumps(stranger(image, targets)))

    def ended() -> bool:
        phase: str = cluster.get("-n", space, "pod", "stranger")["status"]["phase"]
        return phase in ("Succeeded", "Failed")

    until(ended, "the foreign pod to end")
    output = cluster.kubectl("-n", space, "logs", "stranger")
    cluster.kubectl("-n", space, "delete", "pod", "stranger", "--wait=true", "--timeout=60s")
    return set(json.loads(output))


def test_foreign_pod_reaches_only_the_gateway_port(install: Install, cluster: Cluster, proved: Callable[[str], None]) -> None:
    release = install({"worker": {"replicas": 1, "settings": FAKE}})
    with load_on(release, 2) as load:
        until(lambda: load.ended >= 2, "completed requests through the gateway's port")
    load.check()
    targets = ports_of(release)
    kinds = {name for name, _, _ in targets}
    assert len(kinds) > 8, targets
    (gateway,) = release.get("deployment", release.object_name("gateway"))["spec"]["template"]["spec"]["containers"]
    assert reached_from(cluster, release.namespace, gateway["image"], targets) == {"gateway http"}
    with namespace(cluster, "strangers") as space:
        assert reached_from(cluster, space, gateway["image"], targets) == {"gateway http"}
    proved(f"a foreign pod, in the same and in another namespace, reaches 1 of {len(kinds)} kinds of port: the gateway's")
