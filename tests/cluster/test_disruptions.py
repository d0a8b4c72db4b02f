"""What an operator does to a running release: evictions, a drained node, an upgrade and its rollback, other discovery."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.conftest import Install
from tests.cluster.kubernetes import Cluster, CommandFailed, Pod, Release, until
from tests.cluster.load import Load

TWO = {name: {"replicas": 2} for name in ("gateway", "tokenizer", "detokenizer", "worker")}
SERVICES = (("gateway", ""), ("tokenizer", "demo"), ("detokenizer", "demo"), ("worker", "demo"))
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
    release = install({**TWO, "drainSeconds": 20})
    with Load(STREAMS, release.urls) as load:
        until(lambda: load.ended >= STREAMS, "the load")
        for component, model in SERVICES:
            first, second = release.ready(component, model)
            assert (evict(release, first), evict(release, second)) == (True, False), component
            until(lambda: len(release.ready(component, model)) == 2, "the one in its place")  # noqa: B023
    proved(f"one of two pods of each service evicted, the other refused: {load.check()}")


@pytest.fixture
def cordoned(cluster: Cluster) -> Iterator[Callable[[str], None]]:
    """cordoned(node): drained; it takes pods again in the end."""
    done: list[str] = []

    def drain(node: str) -> None:
        done.append(node)
        cluster.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=240s")

    yield drain
    for node in done:
        cluster.kubectl("uncordon", node)


def test_a_node_is_drained(install: Install, cordoned: Callable[[str], None], proved: Callable[[str], None]) -> None:
    """Whatever stands on it: also the gateway that is asked, and the Redis."""
    release = install({**TWO, "drainSeconds": 20})
    (redis,) = release.ready("redis")
    with Load(STREAMS, release.urls) as load:
        until(lambda: load.ended >= STREAMS, "the load")
        cordoned(redis.node)
        before = load.ended
        until(lambda: load.ended >= before + STREAMS, "answers afterwards")
    line = load.check()
    assert {pod.node for component, model in SERVICES for pod in release.ready(component, model)} - {redis.node}
    proved(f"the node of the Redis drained: {line}")


def test_an_upgrade_and_its_rollback(install: Install, proved: Callable[[str], None]) -> None:
    """Every setting and every pod changes; so does how gateways find the others."""
    release = install({**TWO, "drainSeconds": 20})
    password = release.get("secret", release.object_name("redis"))["data"]["password"]
    with Load(STREAMS, release.urls) as load:
        until(lambda: load.ended >= STREAMS, "the load")
        pods = {pod.name for component, model in SERVICES for pod in release.ready(component, model)}
        release.install({**TWO, "drainSeconds": 20, "logLevel": "debug", "gateway": {"replicas": 2, "discovery": "k8s"}})
        until(lambda: not pods & names(release), "the old pods' end")
        assert release.get("secret", release.object_name("redis"))["data"]["password"] == password
        upgraded = names(release)
        before = load.ended
        until(lambda: load.ended >= before + STREAMS, "answers afterwards")
        release.cluster.helm("rollback", release.name, "1", "-n", release.namespace, "--wait", "--timeout", "300s")
        until(lambda: not upgraded & names(release), "the upgraded pods' end")
        before = load.ended
        until(lambda: load.ended >= before + STREAMS, "answers at last")
    proved(f"upgraded to debug logs and EndpointSlices, then rolled back: {load.check()}")


def names(release: Release) -> set[str]:
    return {pod.name for component, model in SERVICES for pod in release.pods(component, model, leaving=True)}
