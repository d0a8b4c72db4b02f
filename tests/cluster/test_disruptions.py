"""What an operator does to a running release: evictions, an upgrade and its rollback, other discovery."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.cluster.conftest import BASE, Install
from tests.cluster.kubernetes import CHART, ROOT, Cluster, CommandFailed, Pod, Release, run, until
from tests.cluster.load import load_on
from tests.cluster.values import FAKE, SERVICES, TWO

STREAMS = 8


def evict(release: Release, pod: Pod) -> bool:
    """Whether the API server let it go."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod.name, "namespace": release.namespace}}
    path = f"/api/v1/namespaces/{release.namespace}/pods/{pod.name}/eviction"
    try:
        release.cluster.kubectl("create", "--raw", path, "-f", "-", given=json.dumps(body))
    except CommandFailed as error:
        assert "disruption budget" in str(error), error
        return False
    return True


def test_of_two_pods_one_may_be_evicted(install: Install, proved: Callable[[str], None]) -> None:
    release = install({**TWO, "worker": {"replicas": 2, "settings": FAKE}, "drainSeconds": 20})
    with load_on(release, STREAMS) as load:
        until(lambda: load.ended >= STREAMS, "the load")
        for component, model in SERVICES:
            first, second = release.ready(component, model)
            assert (evict(release, first), evict(release, second)) == (True, False), component
            until(lambda: len(release.ready(component, model)) == 2, "the one in its place")  # noqa: B023
    proved(f"one of two pods of each service evicted, the other refused: {load.check()}")


def previous_chart(folder: Path) -> tuple[Path, str]:
    """The chart before the last commit that changed its templates, and that commit's name; today's where no history is there."""
    templates = CHART.relative_to(ROOT) / "templates"
    commits = run("git", "-C", str(ROOT), "log", "-2", "--format=%h", "--", str(templates)).split()
    if len(commits) < 2:
        return CHART, "today's: no history is here"
    archive = folder / "chart.tar"
    run("git", "-C", str(ROOT), "archive", "--output", str(archive), commits[1], str(CHART.relative_to(ROOT)))
    shutil.unpack_archive(archive, folder)
    return folder / CHART.relative_to(ROOT), commits[1]


def test_an_upgrade_and_its_rollback(cluster: Cluster, space: str, tmp_path: Path, proved: Callable[[str], None]) -> None:
    """From the chart before this one. Every setting and every pod changes; so does how gateways find the others.

    Those that end their streams after the rollback have lost the right to read EndpointSlices, as where a chart takes it away.
    """
    chart, commit = previous_chart(tmp_path)
    release = Release(cluster, "rootstock", space, BASE)
    replace(release, chart=chart).install({**TWO, "drainSeconds": 20})
    password = release.get("secret", release.object_name("redis"))["data"]["password"]
    with load_on(release, STREAMS) as load:
        until(lambda: load.ended >= STREAMS, "the load")
        pods = {pod.name for component, model in SERVICES for pod in release.ready(component, model)}
        release.install({**TWO, "drainSeconds": 20, "logLevel": "debug", "gateway": {"replicas": 2, "discovery": "k8s"}})
        until(lambda: not pods & names(release), "the old pods' end")
        assert release.get("secret", release.object_name("redis"))["data"]["password"] == password
        upgraded = names(release)
        before = load.ended
        until(lambda: load.ended >= before + STREAMS, "answers afterwards")
        release.kubectl("delete", "rolebinding", release.object_name("gateway"))
        release.cluster.helm("rollback", release.name, "1", "-n", release.namespace, "--wait", "--timeout", "300s")
        until(lambda: not upgraded & names(release), "the upgraded pods' end")
        before = load.ended
        until(lambda: load.ended >= before + STREAMS, "answers at last")
    proved(f"from the chart before ({commit}) to debug logs and EndpointSlices, then rolled back: {load.check()}")


def names(release: Release) -> set[str]:
    return {pod.name for component, model in SERVICES for pod in release.pods(component, model, leaving=True)}
