"""Creates namespaces for tests, and describes a namespace for the message of a failed test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.cluster.kubernetes import Cluster, CommandFailed, Object, Release

LOG_LINES = 12
EVENTS = 20
ENDS = ("reason", "exitCode", "finishedAt", "message")  # described fields of a terminated or waiting container's state


def described(cluster: Cluster, pods: Sequence[Object]) -> str:
    """Describes pods: a line per pod, and the last log lines of a pod that is not ready, was restarted or is the only one."""
    lines = []
    for pod in pods:
        name, space = pod["metadata"]["name"], pod["metadata"]["namespace"]
        statuses = pod["status"].get("containerStatuses", ())
        ready = sum(each["ready"] for each in statuses)
        restarts = sum(each["restartCount"] for each in statuses)
        ends = [each.get("lastState", {}).get("terminated") or each["state"].get("waiting") or {} for each in statuses]
        why = ", ".join(" ".join(str(end[key]) for key in ENDS if key in end) for end in ends if end)
        leaving = ", leaving" if "deletionTimestamp" in pod["metadata"] else ""
        conditions = pod["status"].get("conditions", ())
        unplaced = [each.get("message", "") for each in conditions if each.get("reason") == "Unschedulable"]
        lines.append(
            f"{name} on {pod['spec'].get('nodeName', 'no node')}: {pod['status'].get('phase')}, {ready}/{len(statuses)} ready,"
            f" {restarts} restarts{leaving} {why} {' '.join(unplaced)}".rstrip()
        )
        if ready < len(statuses) or restarts or len(pods) == 1:
            for previous in ((), ("--previous",)) if restarts else ((),):
                lines.append(_log(cluster, space, name, *previous))
    return "\n".join(lines) or "no pods"


def _log(cluster: Cluster, space: str, pod: str, *flags: str) -> str:
    try:
        log = cluster.kubectl(
            "logs", "-n", space, pod, "--all-containers", f"--tail={LOG_LINES}", "--request-timeout=20s", *flags
        )
    except CommandFailed as error:
        log = str(error).splitlines()[-1]
    return "\n".join(f"    {line[:300]}" for line in log.splitlines())


def state_of(cluster: Cluster, space: str) -> str:
    """Describes a namespace: its pods with log lines, and its last events."""
    try:
        events = cluster.kubectl("get", "events", "-n", space, "--sort-by=.lastTimestamp").splitlines()
        return "\n".join([described(cluster, cluster.get("pods", "-n", space)["items"]), *events[-EVENTS:]])
    except CommandFailed as error:
        return f"the state of the namespace {space} cannot be read: {error}"


def gateway_state(release: Release, url: str) -> str:
    """Describes the pod of the gateway at this URL: the number and causes of its restarts, and its last log lines."""
    items = release.get("pods", "-l", f"app.kubernetes.io/instance={release.name},app.kubernetes.io/component=gateway")["items"]
    found = [each for each in items if f"//{each['status'].get('podIP')}:" in url]
    return described(release.cluster, found) if found else f"no gateway has the URL {url}; ready gateways: {release.urls()}"


@contextmanager
def namespace(cluster: Cluster, name: str) -> Iterator[str]:
    """Creates a namespace with restricted Pod Security. On exit, starts its deletion without waiting for it.

    If the body raises, the exception gets the state of the namespace as a note.
    """
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    try:
        yield name
    except Exception as error:
        error.add_note(state_of(cluster, name))
        raise
    finally:
        cluster.kubectl("delete", "namespace", name, "--wait=false")
