"""Checks pods against the Pod Security Standard "restricted", which includes "baseline". Each control is a function.

Source: https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Spec = Mapping[str, Any]
Control = Callable[[Spec, Mapping[str, str]], Iterator[str]]

SAFE_SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
}
VOLUME_TYPES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
APPARMOR = "container.apparmor.security.beta.kubernetes.io/"


def violations(spec: Spec, annotations: Mapping[str, str]) -> list[str]:
    """Returns a message per violation of a pod. Each message begins with the name of the violated control."""
    return [f"{control.__name__}: {fault}" for control in CONTROLS for fault in control(spec, annotations)]


def containers(spec: Spec) -> Iterator[Mapping[str, Any]]:
    for key in ("containers", "initContainers", "ephemeralContainers"):
        yield from spec.get(key) or []


def contexts(spec: Spec) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the owner and the securityContext of the pod and of each container."""
    yield "pod", spec.get("securityContext") or {}
    for each in containers(spec):
        yield each["name"], each.get("securityContext") or {}


def inherited(spec: Spec, key: str) -> Iterator[tuple[str, Any]]:
    """Yields (container name, value of a securityContext setting). A container without a value inherits the pod's."""
    default = (spec.get("securityContext") or {}).get(key)
    for each in containers(spec):
        yield each["name"], (each.get("securityContext") or {}).get(key, default)


def host_process(spec: Spec, _: Mapping[str, str]) -> Iterator[str]:
    yield from (whose for whose, context in contexts(spec) if (context.get("windowsOptions") or {}).get("hostProcess"))


def host_namespaces(spec: Spec, _: Mapping[str, str]) -> Iterator[str]:
    yield from (key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key))


def privileged(spec: Spec, _: Mapping[str, str]) -> Iterator[str]:
    yield from (whose for whose, context in contexts(spec) if context.get("privileged"))


def capabilities(spec: Spec, _: Mapping[str, str]) -> Iterator[str]:
    for each in containers(spec):
        held = (each.get("securityContext") or {}).get("capabilities") or {}
        if "ALL" not in (held.get("drop") or []):
            yield f"{each['name']} does not drop ALL"
        yield from (f"{each['name']} adds {name}" for name in held.get("add") or [] if name != "NET_BIND_SERVICE")


def host_ports(spec: Spec, _: Mapping[str, str]) -> Iterator[str]:
    yield from (each["name"] for each in containers(spec) for port in each.get("ports") or [] if port.get("hostPort"))


def host_probes_and_hooks(spec: Spec, _: Mapping[str, str]) -> Iterator[str]:
    for each in containers(spec):
        lifecycle = each.get("lifecycle") or {}
        handlers = [each.get(key) for key in ("livenessProbe", "readinessProbe", "startupProbe")]
        for handler in [*handlers, *lifecycle.values()]:
            for action in ("httpGet", "tcpSocket"):
                if ((handler or {}).get(action) or {}).get("host"):
                    yield each["name"]


def app_armor(spec: Spec, annotations: Mapping[str, str]) -> Iterator[str]:
    for whose, context in contexts(spec):
        if (context.get("appArmorProfile") or {}).get("type", "RuntimeDefault") not in ("RuntimeDefault", "Localhost"):
            yield whose
    for key, value in annotations.items():
        if key.startswith(APPARMOR) and value != "runtime/default" and not value.startswith("localhost/"):
            yield key


def selinux(spec: Spec, _: Mapping[str, str]) -> Iterator[str]:
    for whose, context in contexts(spec):
        options = context.get("seLinuxOptions") or {}
        if options.get("type", "") not in SELINUX_TYPES or options.get("user") or options.get("role"):
            yield whose


def proc_mount(spec: Spec, _: Mapping[str, str]) -> Iterator[str]:
    yield from (whose for whose, context in contexts(spec) if context.get("procMount", "Default") != "Default")


def sysctls(spec: Spec, _: Mapping[str, str]) -> Iterator[str]:
    asked = (spec.get("securityContext") or {}).get("sysctls") or []
    yield from (each["name"] for each in asked if each["name"] not in SAFE_SYSCTLS)


def volume_types(spec: Spec, _: Mapping[str, str]) -> Iterator[str]:
    for volume in spec.get("volumes") or []:
        kinds = set(volume) - {"name"}
        if not kinds & VOLUME_TYPES or kinds - VOLUME_TYPES:
            yield f"{volume['name']} is {sorted(kinds)}"


def privilege_escalation(spec: Spec, _: Mapping[str, str]) -> Iterator[str]:
    for each in containers(spec):
        if (each.get("securityContext") or {}).get("allowPrivilegeEscalation") is not False:
            yield each["name"]


def run_as_non_root(spec: Spec, _: Mapping[str, str]) -> Iterator[str]:
    yield from (whose for whose, value in inherited(spec, "runAsNonRoot") if value is not True)


def run_as_root_user(spec: Spec, _: Mapping[str, str]) -> Iterator[str]:
    yield from (whose for whose, context in contexts(spec) if context.get("runAsUser") == 0)


def seccomp(spec: Spec, _: Mapping[str, str]) -> Iterator[str]:
    for whose, profile in inherited(spec, "seccompProfile"):
        if (profile or {}).get("type") not in ("RuntimeDefault", "Localhost"):
            yield whose


CONTROLS: tuple[Control, ...] = (
    host_process,
    host_namespaces,
    privileged,
    capabilities,
    host_ports,
    host_probes_and_hooks,
    app_armor,
    selinux,
    proc_mount,
    sysctls,
    volume_types,
    privilege_escalation,
    run_as_non_root,
    run_as_root_user,
    seccomp,
)
