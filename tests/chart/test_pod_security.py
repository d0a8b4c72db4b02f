"""Tests that every pod meets the Pod Security Standard "restricted" and writes only to its volumes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.chart.laws import offences
from tests.chart.pod_security import containers, contexts, violations
from tests.chart.pods import PodTemplate, pods
from tests.chart.release import Release, merged, render
from tests.chart.variants import ALL, GPU_RESOURCES, rendered

GOOD: dict[str, Any] = {
    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    "containers": [{"name": "a", "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}}],
}
CONTAINER = {"name": "a", "securityContext": GOOD["containers"][0]["securityContext"]}


def with_container(**fields: Any) -> dict[str, Any]:
    return {**GOOD, "containers": [merged(CONTAINER, fields)]}


def with_pod(**context: Any) -> dict[str, Any]:
    return {**GOOD, "securityContext": {**GOOD["securityContext"], **context}}


BAD = {
    "host_process": with_pod(windowsOptions={"hostProcess": True}),
    "host_namespaces": {**GOOD, "hostPID": True},
    "privileged": with_container(securityContext={"privileged": True}),
    "capabilities": with_container(securityContext={"capabilities": {"drop": ["ALL"], "add": ["SYS_PTRACE"]}}),
    "host_ports": with_container(ports=[{"containerPort": 1, "hostPort": 1}]),
    "host_probes_and_hooks": with_container(livenessProbe={"httpGet": {"host": "10.0.0.1", "port": 1}}),
    "app_armor": with_pod(appArmorProfile={"type": "Unconfined"}),
    "selinux": with_pod(seLinuxOptions={"type": "spc_t"}),
    "proc_mount": with_container(securityContext={"procMount": "Unmasked"}),
    "sysctls": with_pod(sysctls=[{"name": "kernel.msgmax", "value": "1"}]),
    "volume_types": {**GOOD, "volumes": [{"name": "v", "hostPath": {"path": "/"}}]},
    "privilege_escalation": with_container(securityContext={"allowPrivilegeEscalation": True}),
    "run_as_non_root": with_pod(runAsNonRoot=False),
    "run_as_root_user": with_pod(runAsUser=0),
    "seccomp": with_pod(seccompProfile={"type": "Unconfined"}),
}
# Value sets that break the standard, which allows neither hostPath volumes nor volumes of OCI images.
BEYOND = {
    "node-cache": {"volume_types"},
    "host-path-cache": {"volume_types"},
    "image-volume": {"volume_types"},
    "scale-from-zero": {"volume_types"},
}


def test_pod_that_meets_the_restricted_standard_has_no_violations() -> None:
    assert violations(GOOD, {}) == []


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("control", BAD)
def test_pod_security_violation_names_the_broken_control(control: str) -> None:
    assert {fault.split(":")[0] for fault in violations(BAD[control], {})} == {control}


def test_every_release_has_pods() -> None:
    assert [name for name in ALL if not pods(rendered(name))] == []


def test_every_pod_meets_the_restricted_standard() -> None:
    def law(name: str, release: Release) -> Iterator[str]:
        for pod in pods(release):
            faults = violations(pod.spec, pod.annotations)
            yield from (f"{pod.role}: {fault}" for fault in faults if fault.split(":")[0] not in BEYOND.get(name, set()))

    assert offences(law) == {}


def test_pods_have_no_service_links() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        yield from (pod.role for pod in pods(release) if pod.spec.get("enableServiceLinks") is not False)

    assert offences(law) == {}


def test_pods_run_as_a_numeric_user_other_than_root() -> None:
    """If an image names its user, Kubernetes cannot check that the user is not root, so the chart sets a number."""

    def law(_: str, release: Release) -> Iterator[str]:
        yield from (pod.role for pod in pods(release) if not pod.spec["securityContext"].get("runAsUser", 0) > 0)

    assert offences(law, [name for name in ALL if name != "openshift"]) == {}


def test_chart_sets_no_user_ids_when_the_cluster_assigns_user_ids() -> None:
    """OpenShift assigns users to each namespace and refuses pods with other users."""
    numbers = ("runAsUser", "runAsGroup", "fsGroup")
    for pod in pods(rendered("openshift")):
        assert not [key for _, context in contexts(pod.spec) for key in numbers if key in context], pod.role
    bare = render({"pod": {"securityContext": None, "containerSecurityContext": None}})
    assert [pod.role for pod in pods(bare) if any(context for _, context in contexts(pod.spec))] == []
    one = render({"gateway": {"pod": {"securityContext": None}}})
    assert [pod.component for pod in pods(one) if "securityContext" not in pod.spec] == ["gateway"]


def test_root_file_system_is_read_only_in_pods_without_gpus() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        for pod in pods(release):
            for each in containers(pod.spec):
                if each["securityContext"].get("readOnlyRootFilesystem") is asks_for_a_gpu(pod):
                    yield f"{pod.role} {each['name']}"

    assert offences(law, [name for name in ALL if name != "operators-overlay"]) == {}


def asks_for_a_gpu(pod: PodTemplate) -> bool:
    """Whether the pod requests a GPU. Its root file system must then be writable, because CDI hooks write into it."""
    resources = pod.container()["resources"]
    return bool(resources.get("claims")) or any("/" in name for name in resources["limits"])


@pytest.mark.parametrize("read_only", [True, False])
def test_read_only_root_file_system_follows_the_values(read_only: bool) -> None:
    gpu = {"gpus": 1, "resources": GPU_RESOURCES, "pod": {"containerSecurityContext": {"readOnlyRootFilesystem": read_only}}}
    release = render({"worker": gpu})
    found = {pod.component: pod.container()["securityContext"]["readOnlyRootFilesystem"] for pod in pods(release)}
    assert found == {**dict.fromkeys(found, True), "worker": read_only}


def test_every_mount_refers_to_a_volume_of_the_same_pod() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        for pod in pods(release):
            volumes = {volume["name"] for volume in pod.spec.get("volumes", [])}
            claims = {claim["metadata"]["name"] for claim in pod.owner["spec"].get("volumeClaimTemplates", [])}
            for each in containers(pod.spec):
                others = {mount["name"] for mount in each.get("volumeMounts", [])} - volumes - claims
                if others:
                    yield f"{pod.role} {each['name']}: {sorted(others)}"

    assert offences(law) == {}
