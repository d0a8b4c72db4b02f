"""Operations on a running release under load: evictions, and an upgrade to another kind of discovery with its rollback."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.cluster.conftest import BASE, Install
from tests.cluster.images import checkout
from tests.cluster.kubernetes import CHART, ROOT, Cluster, CommandFailed, Pod, Release, run, until
from tests.cluster.load import load_on
from tests.cluster.values import FAKE, SERVICES, TWO

STREAMS = 8


def evict(release: Release, pod: Pod) -> bool:
    """Requests the eviction of a pod. Returns whether the API server allowed it."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod.name, "namespace": release.namespace}}
    path = f"/api/v1/namespaces/{release.namespace}/pods/{pod.name}/eviction"
    try:
        release.cluster.kubectl("create", "--raw", path, "-f", "-", given=json.dumps(body))
    except CommandFailed as error:
        assert "disruption budget" in str(error), error
        return False
    return True


def test_disruption_budget_allows_one_eviction_of_two_pods(install: Install, proved: Callable[[str], None]) -> None:
    release = install({**TWO, "worker": {"replicas": 2, "settings": FAKE}, "drainSeconds": 20})
    with load_on(release, STREAMS) as load:
        until(lambda: load.ended >= STREAMS, "the first completed requests")
        for component, model in SERVICES:
            first, second = release.ready(component, model)
            assert (evict(release, first), evict(release, second)) == (True, False), component
            until(lambda: len(release.ready(component, model)) == 2, "the replacement of the evicted pod")  # noqa: B023
    proved(f"one of two pods of each service was evicted, the second eviction was refused: {load.check()}")


def previous_chart(folder: Path) -> tuple[Path, str]:
    """Returns the chart before the latest change of its templates, and the id of the commit that has it.

    Without a git history, returns the current chart and a text that says so.
    """
    templates = CHART.relative_to(ROOT) / "templates"
    commits = run("git", "-C", str(ROOT), "log", "-2", "--format=%h", "--", str(templates)).split()
    if len(commits) < 2:
        return CHART, "the current chart, because there is no git history"
    chart = CHART.relative_to(ROOT)
    return checkout(commits[1], folder / "previous", str(chart)) / chart, commits[1]


def test_streams_survive_an_upgrade_and_a_rollback(
    cluster: Cluster, space: str, tmp_path: Path, proved: Callable[[str], None]
) -> None:
    """Upgrades from the previous chart with settings that replace every pod and change the kind of discovery. Then rolls back.

    After the upgrade, the gateways lose the right to read EndpointSlices, as if a newer chart had removed it. Their streams must
    still complete.
    """
    chart, commit = previous_chart(tmp_path)
    release = Release(cluster, "rootstock", space, BASE)
    replace(release, chart=chart).install({**TWO, "drainSeconds": 20})
    password = release.get("secret", release.object_name("redis"))["data"]["password"]
    with load_on(release, STREAMS) as load:
        until(lambda: load.ended >= STREAMS, "the first completed requests")
        pods = {pod.name for component, model in SERVICES for pod in release.ready(component, model)}
        release.install({**TWO, "drainSeconds": 20, "logLevel": "debug", "gateway": {"replicas": 2, "discovery": "k8s"}})
        until(lambda: not pods & names(release), "the old pods to end")
        assert release.get("secret", release.object_name("redis"))["data"]["password"] == password
        upgraded = names(release)
        before = load.ended
        until(lambda: load.ended >= before + STREAMS, "completed requests afterwards")
        release.kubectl("delete", "rolebinding", release.object_name("gateway"))
        release.cluster.helm("rollback", release.name, "1", "-n", release.namespace, "--wait", "--timeout", "300s")
        until(lambda: not upgraded & names(release), "the upgraded pods to end")
        before = load.ended
        until(lambda: load.ended >= before + STREAMS, "completed requests after the rollback")
    proved(f"upgraded from the previous chart ({commit}) to debug logs and EndpointSlices, then rolled back: {load.check()}")


def names(release: Release) -> set[str]:
    return {pod.name for component, model in SERVICES for pod in release.pods(component, model, leaving=True)}
