"""Every pod of every set of values satisfies the Pod Security Standard "restricted", and writes only to its own volumes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chart.pod_security import containers, violations
from tests.chart.pods import pods
from tests.chart.release import merged
from tests.chart.variants import ALL, rendered

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
# A folder of the node and a model in an OCI image are no volumes of the standard's list; whoever asks for them knows it.
BEYOND = {"host-path-cache": {"volume_types"}, "image-volume": {"volume_types"}, "scale-from-zero": {"volume_types"}}


def test_the_controls_pass_a_good_pod() -> None:
    assert violations(GOOD, {}) == []


@pytest.mark.parametrize("control", BAD)
def test_each_control_sees_what_it_is_about(control: str) -> None:
    assert {fault.split(":")[0] for fault in violations(BAD[control], {})} == {control}


@pytest.mark.parametrize("name", ALL)
def test_pods_are_restricted(name: str) -> None:
    found_pods = pods(rendered(name))
    assert found_pods
    for pod in found_pods:
        found = {fault.split(":")[0] for fault in violations(pod.spec, pod.annotations)}
        assert found <= BEYOND.get(name, set()), (pod.role, violations(pod.spec, pod.annotations))


@pytest.mark.parametrize("name", ALL)
def test_root_file_system_is_read_only_and_nothing_else_is_shared_with_the_node(name: str) -> None:
    release = rendered(name)
    for pod in pods(release):
        assert pod.spec.get("enableServiceLinks") is False, pod.role
        assert pod.spec["securityContext"].get("runAsUser", 0) > 0, f"{pod.role}: an image's user may be a name"
        volumes = {volume["name"] for volume in pod.spec.get("volumes", [])}
        claims = {claim["metadata"]["name"] for claim in pod.owner["spec"].get("volumeClaimTemplates", [])}
        for each in containers(pod.spec):
            assert each["securityContext"].get("readOnlyRootFilesystem") is True, (pod.role, each["name"])
            mounts = {mount["name"] for mount in each.get("volumeMounts", [])}
            assert mounts <= volumes | claims, (pod.role, each["name"])
